#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/files/json.hpp"

namespace switchyard {

/// Reads `config.json` key by key, each under any of the names that it has been written by
/// (config_keys.hpp); every value is checked where it is read. A key that is null counts as absent,
/// as the public checkpoints have it.
/// All throw Error{kBadFile} that names file, key and value; also where a file gives a value under
/// two names and they differ.
class ConfigReader {
 public:
  ConfigReader(const Json& json, std::string file);

  [[nodiscard]] const std::string& file() const { return file_; }
  [[nodiscard]] bool has(std::string_view key) const { return find(key).value != nullptr; }
  [[nodiscard]] bool is_null(std::string_view key) const;  ///< The file has it, as null.
  /// A whole number in [low, high]; or a list of it, once for each layer.
  [[nodiscard]] std::int64_t whole(std::string_view key, std::int64_t low, std::int64_t high) const;
  [[nodiscard]] std::int64_t whole_or(std::string_view key, std::int64_t low, std::int64_t high,
                                      std::int64_t absent) const;
  /// A finite number >= 0.
  [[nodiscard]] float real_or(std::string_view key, float absent) const;
  [[nodiscard]] bool flag_or(std::string_view key, bool absent) const;
  [[nodiscard]] std::string text_or(std::string_view key, const char* absent) const;
  [[nodiscard]] bool is_list(std::string_view key) const;
  /// A list of whole numbers >= 0; empty where absent.
  [[nodiscard]] std::vector<std::int64_t> list(std::string_view key) const;
  /// A list of words; empty where absent.
  [[nodiscard]] std::vector<std::string> words(std::string_view key) const;
  /// The object under a key, to be read like this one.
  [[nodiscard]] ConfigReader object(std::string_view key) const;
  /// Refuses any value but this one (as JSON) of a key that changes what a block computes, where
  /// nothing else is computed; absent is fine.
  void require_value(std::string_view key, std::string_view expected) const;

 private:
  struct Found {
    std::string_view name;        ///< As the file has it; the key asked for, where it has none.
    const Json* value = nullptr;  ///< Null: absent.
  };
  [[nodiscard]] Found find(std::string_view key) const;
  [[nodiscard]] Found at(std::string_view key) const;

  const Json& json_;
  std::string file_;
};

}  // namespace switchyard

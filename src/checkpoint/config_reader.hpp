#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/files/json.hpp"

namespace switchyard {

/// Reads `config.json` key by key; every value is checked where it is read. A key that is null
/// counts as absent, as the public checkpoints have it.
/// All throw Error{kBadFile} that names file, key and value.
class ConfigReader {
 public:
  ConfigReader(const Json& json, std::string file);

  [[nodiscard]] const std::string& file() const { return file_; }
  [[nodiscard]] bool has(const char* key) const;
  /// A whole number in [low, high].
  [[nodiscard]] std::int64_t whole(const char* key, std::int64_t low, std::int64_t high) const;
  [[nodiscard]] std::int64_t whole_or(const char* key, std::int64_t low, std::int64_t high,
                                      std::int64_t absent) const;
  /// A finite number >= 0.
  [[nodiscard]] float real_or(const char* key, float absent) const;
  [[nodiscard]] bool flag_or(const char* key, bool absent) const;
  [[nodiscard]] std::string text_or(const char* key, const char* absent) const;
  /// A list of whole numbers >= 0; empty where absent.
  [[nodiscard]] std::vector<std::int64_t> list(const char* key) const;

 private:
  const Json& json_;
  std::string file_;
};

}  // namespace switchyard

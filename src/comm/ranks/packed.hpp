#pragma once

// What a rank tells another as bytes: MessagePack, with arrays as they lie in memory.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/check.hpp"

namespace switchyard {

template <typename T>
nlohmann::json pack_array(const std::vector<T>& values) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(values.data());
  return nlohmann::json::binary(
      std::vector<std::uint8_t>(bytes, bytes + values.size() * sizeof(T)));
}

/// @throws Error{kCommunication}: the bytes are no whole number of elements.
template <typename T>
std::vector<T> array_of(const nlohmann::json& packed) {
  const auto& bytes = packed.get_binary();
  if (bytes.size() % sizeof(T) != 0) {
    fail(ErrorCode::kCommunication, "an array of another rank has {} bytes, want a multiple of {}",
         bytes.size(), sizeof(T));
  }
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

inline std::vector<std::byte> pack_message(const nlohmann::json& message) {
  const std::vector<std::uint8_t> bytes = nlohmann::json::to_msgpack(message);
  const auto* begin = reinterpret_cast<const std::byte*>(bytes.data());
  return {begin, begin + bytes.size()};
}

inline nlohmann::json unpack_message(const std::vector<std::byte>& bytes) {
  const auto* begin = reinterpret_cast<const std::uint8_t*>(bytes.data());
  return nlohmann::json::from_msgpack(begin, begin + bytes.size());
}

}  // namespace switchyard

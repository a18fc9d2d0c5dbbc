#pragma once

// What a rank tells another as bytes: MessagePack, with arrays as they lie in memory.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <vector>

namespace switchyard {

template <typename T>
nlohmann::json pack_array(const std::vector<T>& values) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(values.data());
  return nlohmann::json::binary(
      std::vector<std::uint8_t>(bytes, bytes + values.size() * sizeof(T)));
}

template <typename T>
std::vector<T> array_of(const nlohmann::json& packed) {
  const auto& bytes = packed.get_binary();
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

inline std::vector<std::byte> pack(const nlohmann::json& message) {
  const std::vector<std::uint8_t> bytes = nlohmann::json::to_msgpack(message);
  const auto* begin = reinterpret_cast<const std::byte*>(bytes.data());
  return {begin, begin + bytes.size()};
}

inline nlohmann::json unpack(const std::vector<std::byte>& bytes) {
  const auto* begin = reinterpret_cast<const std::uint8_t*>(bytes.data());
  return nlohmann::json::from_msgpack(begin, begin + bytes.size());
}

}  // namespace switchyard

#pragma once

// What a cache of keys and values holds, for the models that fill one.

#include <cstdint>
#include <memory>
#include <vector>

#include "switchyard/models/model.hpp"

namespace switchyard::models {

/// Keys and values on a GPU. Of one model, which outlives it.
class DeviceCache {
 public:
  DeviceCache() = default;
  DeviceCache(const DeviceCache&) = delete;
  DeviceCache& operator=(const DeviceCache&) = delete;
  virtual ~DeviceCache() = default;
};

struct Cache::State {
  std::int64_t batch = 0, capacity = 0, length = 0;
  struct Layer {
    std::vector<float> keys, values;  ///< [B, capacity, M, D], keys as attention takes them.
    std::vector<float> read{};        ///< [B, capacity, H] what Soft-MoE has read; else empty.
  };
  std::vector<Layer> layers;            ///< Empty on a GPU:
  std::unique_ptr<DeviceCache> device;  ///< all is there. Null on a CPU.
};

}  // namespace switchyard::models

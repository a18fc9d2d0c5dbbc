#pragma once

// What a cache of keys and values holds, for the models that fill one.

#include <cstdint>
#include <vector>

#include "switchyard/models/model.hpp"

namespace switchyard::models {

struct Cache::State {
  std::int64_t batch = 0, capacity = 0, length = 0;
  struct Layer {
    std::vector<float> keys, values;  ///< [B, capacity, M, D], keys as attention takes them.
  };
  std::vector<Layer> layers;
};

}  // namespace switchyard::models

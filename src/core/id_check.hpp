#pragma once

#include <cstdint>

#include "core/check.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

/// Expert ids in host memory: [T, K], each -1 (unused) or one of the experts.
inline void require_ids(const char* name, const Matrix<const std::int32_t>& ids,
                        std::int32_t num_experts) {
  const std::int64_t top_k = ids.shape[1];
  for (std::int64_t i = 0; i < ids.size(); ++i) {
    require(ids.data[i] >= -1 && ids.data[i] < num_experts,
            "{}[{}, {}] is {}, want -1 (unused) or less than {}", name, i / top_k, i % top_k,
            ids.data[i], num_experts);
  }
}

}  // namespace switchyard

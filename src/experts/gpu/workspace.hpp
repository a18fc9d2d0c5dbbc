#pragma once

// How the workspace of experts() on a GPU is divided.

#include <cstdint>

#include "experts/gpu/grouped/gemm.hpp"
#include "experts/gpu/streaming/streaming.hpp"

namespace switchyard {

inline constexpr std::int64_t kStreamingSyncAt = grouped_gemm_workspace_bytes();
inline constexpr std::int64_t kActAt = kStreamingSyncAt + std::int64_t{sizeof(StreamingSync)};
static_assert(kStreamingSyncAt % 256 == 0 && kActAt % 256 == 0);

}  // namespace switchyard

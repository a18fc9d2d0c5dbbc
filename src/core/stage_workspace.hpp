#pragma once

#include <cstdint>

namespace switchyard {

/// How Execution::workspace begins; what follows is scratch of whichever stage runs. All of it is
/// zero between calls: each kernel leaves its counters as it found them.
struct StageWorkspace {
  static constexpr int kMaxTiles = 1024;

  std::uint32_t blocks_arrived;  ///< Where all blocks of a grid meet (plan/counting.cuh).
  std::uint32_t blocks_left;
  std::uint32_t padding[62];
  std::uint32_t tile_parts[kMaxTiles];  ///< Parts of an output tile that are done (router GEMM).
};
static_assert(sizeof(StageWorkspace) % 256 == 0);

}  // namespace switchyard

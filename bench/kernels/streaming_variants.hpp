#pragma once

// Other tiles, rings and ways to launch than those chosen: what streaming_bench can time beside
// them.

#include <functional>
#include <string>
#include <vector>

#include "bench/kernels/streaming_layers.hpp"

namespace switchyard::bench {

struct StreamingVariant {
  std::string name{};
  /// Changes what choose_streaming() has chosen, and maybe the parameters.
  std::function<void(StreamingParams&, StreamingShape&)> change{};
  /// Instead of the streaming kernels; empty: those.
  std::function<void(const StreamingLayers&, const StreamingParams&, cudaStream_t)> launch{};
};

/// When the next kernel is let in, a plan made just before, the portable path, ...
[[nodiscard]] std::vector<StreamingVariant> streaming_variants();

/// The grouped GEMM in place of the streaming kernels, whole and in parts.
[[nodiscard]] std::vector<StreamingVariant> grouped_variants();

/// Of codes: the grouped GEMM on numbers that are made first, and where the case `streams` the
/// streaming kernels and their tiles.
[[nodiscard]] std::vector<StreamingVariant> coded_variants(bool streams);

/// The grouped products of e4m3 rows by themselves, and combine.
[[nodiscard]] std::vector<StreamingVariant> fp8_variants();

/// Each of the two kernels alone, over tiles, pieces and rings.
[[nodiscard]] std::vector<StreamingVariant> streaming_grid();

}  // namespace switchyard::bench

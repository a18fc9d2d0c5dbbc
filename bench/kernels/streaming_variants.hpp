#pragma once

// Other tiles, rings and ways to launch than those chosen: what decode_bench can time beside them.

#include <functional>
#include <string>
#include <vector>

#include "bench/kernels/streaming_layers.hpp"

namespace switchyard::bench {

struct DecodeVariant {
  std::string name{};
  /// Changes what choose_decode() has chosen, and maybe the parameters.
  std::function<void(DecodeParams&, DecodeShape&)> change{};
  /// Instead of the streaming kernels; empty: those.
  std::function<void(const DecodeLayers&, const DecodeParams&, cudaStream_t)> launch{};
};

/// When the next kernel is let in, a plan made just before, the portable path, ...
[[nodiscard]] std::vector<DecodeVariant> decode_variants();

/// The grouped GEMM in place of the streaming kernels, whole and in parts.
[[nodiscard]] std::vector<DecodeVariant> grouped_variants();

/// Each of the two kernels alone, over tiles, pieces and rings.
[[nodiscard]] std::vector<DecodeVariant> decode_grid();

}  // namespace switchyard::bench

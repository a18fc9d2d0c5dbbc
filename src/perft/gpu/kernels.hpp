#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/gpu/host_device.hpp"
#include "switchyard/perft.hpp"

namespace switchyard {

/// Where the numbers of A [M, r, H] and B [M, H, r] lie as weights of the experts that the adapters
/// are on a GPU. Each adapter is an expert of `width`: r, and zeros up to a multiple of 16 bytes,
/// which add nothing, for every activation of 0 is 0. Those that every token meets (dense, shared)
/// are side by side in one expert: the sum over the adapters is then one product's, in fp32, and a
/// token has one row instead of M.
struct AdapterLayout {
  std::int64_t adapters = 0, rank = 0, hidden = 0;
  std::int64_t experts = 0, width = 0;

  AdapterLayout() = default;
  AdapterLayout(const PerftConfig& config, DType compute)
      : adapters(config.num_adapters), rank(config.rank), hidden(config.hidden) {
    const bool all = config.kind == PerftKind::kDense || config.kind == PerftKind::kShared;
    const std::int64_t columns = all ? adapters * rank : rank;
    const std::int64_t multiple = 16 / size_of(compute);
    experts = all ? 1 : adapters;
    width = (columns + multiple - 1) / multiple * multiple;
  }
  [[nodiscard]] bool merged() const { return experts < adapters; }
  /// Whether the adapters' own arrays are such weights.
  [[nodiscard]] bool is_plain() const { return !merged() && width == rank; }
  [[nodiscard]] std::int64_t cells() const { return experts * width * hidden; }

  /// In weights [experts, width, H], of A's row `i` of adapter `j`.
  [[nodiscard]] SWITCHYARD_HOST_DEVICE std::int64_t row_of_a(std::int64_t j, std::int64_t i) const {
    return experts < adapters ? j * rank + i : j * width + i;
  }
  /// In weights [experts, H, width], of B's number (h, i) of adapter `j`.
  [[nodiscard]] SWITCHYARD_HOST_DEVICE std::int64_t place_of_b(std::int64_t j, std::int64_t h,
                                                               std::int64_t i) const {
    return experts < adapters ? h * width + j * rank + i : (j * hidden + h) * width + i;
  }
};

// Kernels of adapters on a GPU, all bound by memory. Each number is one thread's, so nothing
// depends on an order.

/// out = scale * in + base, in fp32 and rounded once; f32, bf16 or f16 each, H % 4 == 0, all
/// aligned to 16 bytes. `base` may be empty, and `out` or `base` the place of `in`.
void scale_and_add(ConstRawMatrix in, float scale, ConstRawMatrix base, RawMatrix out,
                   cudaStream_t stream);

/// Weights [experts, width, H] and [experts, H, width] in `compute` of A and B in `dtype`. What is
/// of no adapter stays as it is.
void pack_adapters(const AdapterLayout& layout, DType dtype, const void* a, const void* b,
                   DType compute, void* w13, void* w2, cudaStream_t stream);

/// The gradient of A [M*r, H], of B [M*H, r], from those of the weights; empty: not wanted.
struct AdapterGradients {
  const float* w13 = nullptr;  ///< [experts, width, H]
  const float* w2 = nullptr;   ///< [experts, H, width]
  RawMatrix da{}, db{};
};
/// Written, or added once in fp32.
void unpack_gradients(const AdapterLayout& layout, const AdapterGradients& gradients,
                      bool accumulate, cudaStream_t stream);

/// ids [n] = expert, or -1 where `kept` is 0.
void take_kept(const std::int32_t* expert, const std::uint8_t* kept, std::int32_t* ids,
               std::int64_t n, cudaStream_t stream);

}  // namespace switchyard

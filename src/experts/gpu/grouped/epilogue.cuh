#pragma once

// From the sums in registers to 16-bit values: bias and activation in fp32, one rounding.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "experts/gpu/activation.cuh"

namespace switchyard {

/// What the epilogue does to the sums of a tile.
enum class Epilogue : std::uint8_t {
  kGated,      ///< activation(gate, up); the tile's columns are gate ones, then up ones.
  kPlain,      ///< activation(gate).
  kLinear,     ///< Nothing but the bias.
  kGatedKept,  ///< As kGated, and the tile's columns before it, biases included, are stored too.
  kPlainKept,  ///< As kPlain, likewise.
};

constexpr bool is_gated(Epilogue epilogue) {
  return epilogue == Epilogue::kGated || epilogue == Epilogue::kGatedKept;
}
constexpr bool is_plain(Epilogue epilogue) {
  return epilogue == Epilogue::kPlain || epilogue == Epilogue::kPlainKept;
}
constexpr bool keeps_preactivation(Epilogue epilogue) {
  return epilogue == Epilogue::kGatedKept || epilogue == Epilogue::kPlainKept;
}

template <typename T>
__device__ __forceinline__ std::uint32_t pack_two(float a, float b);
template <>
__device__ __forceinline__ std::uint32_t pack_two<__nv_bfloat16>(float a, float b) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const std::uint32_t*>(&two);
}
template <>
__device__ __forceinline__ std::uint32_t pack_two<__half>(float a, float b) {
  const __half2 two = __floats2half2_rn(a, b);
  return *reinterpret_cast<const std::uint32_t*>(&two);
}

struct EpilogueParams {
  void* out;             // [S, columns]
  const float* bias;     // [E, columns] or, gated, [E, 2 * columns]; may be null
  std::int32_t columns;  // of out
  ActivationParams activation;
};

/// Turns the sums of a warpgroup (as wgmma leaves them: kColumns / 2 in each thread) into 16-bit
/// pairs, for one tile.
template <typename T, Epilogue kEpilogue, int kColumns>
class Packer {
 public:
  static constexpr bool kGated = is_gated(kEpilogue);
  static constexpr int kBlocks = (kGated ? kColumns / 2 : kColumns) / 8;  // of 8 columns of out

  __device__ Packer(const EpilogueParams& params, std::int32_t expert, std::int32_t column)
      : activation_(params.activation), columns_(params.columns) {
    const std::int32_t first = column + static_cast<std::int32_t>(threadIdx.x % 4) * 2;
    columns_left_ = columns_ - first;
    if (params.bias != nullptr) {
      bias_ = params.bias + static_cast<std::int64_t>(expert) * columns_ * (kGated ? 2 : 1) + first;
    }
  }

  /// Before block(): the sums get their biases, in a loop of its own that most layers skip.
  __device__ __forceinline__ void add_bias(float (&sums)[kColumns / 2]) const {
    if (bias_ == nullptr) return;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (block * 8 >= columns_left_) continue;
      add_bias(sums, block, bias_ + block * 8);
      if constexpr (kGated) add_bias(sums, block + kBlocks, bias_ + columns_ + block * 8);
    }
  }

  /// The two rows of column block `block`.
  template <Activation kKind>
  __device__ __forceinline__ uint2 block(const float (&sums)[kColumns / 2], int block) const {
    return {pair<kKind>(sums, block, 0), pair<kKind>(sums, block, 1)};
  }

  /// The same before the activation; up ones lie behind the kBlocks gate ones.
  static __device__ __forceinline__ uint2 block_before(const float (&sums)[kColumns / 2],
                                                       int block) {
    return {pack_two<T>(sums[4 * block], sums[4 * block + 1]),
            pack_two<T>(sums[4 * block + 2], sums[4 * block + 3])};
  }

  /// body(integral_constant of the activation); the choice costs nothing inside.
  template <typename Body>
  __device__ __forceinline__ void with_kind(Body&& body) const {
    if constexpr (kEpilogue == Epilogue::kLinear) {
      body(std::integral_constant<Activation, Activation::kSilu>{});
    } else {
      with_activation(activation_.kind, body);
    }
  }

 private:
  static __device__ __forceinline__ void add_bias(float (&sums)[kColumns / 2], int block,
                                                  const float* bias) {
    const float2 b = __ldg(reinterpret_cast<const float2*>(bias));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sums[4 * block + 2 * h] += b.x;
      sums[4 * block + 2 * h + 1] += b.y;
    }
  }

  template <Activation kKind>
  __device__ __forceinline__ std::uint32_t pair(const float (&sums)[kColumns / 2], int block,
                                                int h) const {
    float v0 = sums[4 * block + 2 * h];
    float v1 = sums[4 * block + 2 * h + 1];
    if constexpr (kGated) {
      v0 = activate<kKind, true>(v0, sums[4 * (block + kBlocks) + 2 * h], activation_);
      v1 = activate<kKind, true>(v1, sums[4 * (block + kBlocks) + 2 * h + 1], activation_);
    } else if constexpr (is_plain(kEpilogue)) {
      v0 = activate<kKind, false>(v0, 0.0F, activation_);
      v1 = activate<kKind, false>(v1, 0.0F, activation_);
    }
    return pack_two<T>(v0, v1);
  }

  ActivationParams activation_;
  std::int32_t columns_;
  std::int32_t columns_left_ = 0;
  const float* bias_ = nullptr;
};

}  // namespace switchyard

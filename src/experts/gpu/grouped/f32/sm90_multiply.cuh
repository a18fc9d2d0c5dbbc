#pragma once

// The multiplying warpgroups of the f32 grouped GEMM on Hopper, and the kernel.

#include "experts/gpu/grouped/f32/sm90.cuh"

namespace switchyard::f32_sm90 {

/// A row of weights that stands for row g of an m16 block: two neighbouring lanes' rows then lie in
/// different halves of all banks.
__device__ __forceinline__ int weight_row(int group) { return group >> 1 | (group & 1) << 2; }

/// 16 values of the sum of 16 rows of weights: two products' registers, both terms.
struct Terms {
  std::uint32_t high[2][4];
  std::uint32_t low[2][4];

  __device__ __forceinline__ void split(const int4& upper, const int4& lower) {
    const int values[8] = {upper.x, lower.x, upper.y, lower.y, upper.z, lower.z, upper.w, lower.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const auto value = static_cast<std::uint32_t>(values[i]);
      high[i / 4][i % 4] = value & 0xffffe000U;
      low[i / 4][i % 4] =
          __float_as_uint(__uint_as_float(value) - __uint_as_float(high[i / 4][i % 4]));
    }
  }
};

/// One multiplying warpgroup.
template <Epilogue kEpilogue>
class Multiplier {
 public:
  static constexpr bool kGated = is_gated(kEpilogue);

  __device__ Multiplier(const Context& context, int group)
      : context_(context), first_row_(group * 64 + static_cast<int>(threadIdx.x / 32 % 4) * 16) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int row = weight_row(lane / 4);
    row_at_ = static_cast<std::uint32_t>((first_row_ + row) * kRowBytes + ((lane % 4 ^ row) << 4));
  }

  __device__ __forceinline__ void run() {
    for (std::uint32_t index = 0;; ++index) {
      const Work work = context_.receive(index);
      if (work.expert < 0) return;
      if (work.tile.rows <= 8) {
        unit<8>(work);
      } else if (work.tile.rows <= 16) {
        unit<16>(work);
      } else if (work.tile.rows <= 32) {
        unit<32>(work);
      } else if (work.tile.rows <= 48) {
        unit<48>(work);
      } else {
        unit<64>(work);
      }
    }
  }

 private:
  template <int kN>
  __device__ __forceinline__ void unit(const Work& work) {
    float part[2][kN / 2];
    float sums[2][kN / 2];
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) sums[0][i] = sums[1][i] = 0;
    for (int chunk = 0; chunk < context_.num_chunks; ++chunk) {
      ptx::mbarrier_wait(context_.weights_full(weights_), weights_.phase);
      ptx::mbarrier_wait(context_.tokens_full(tokens_), tokens_.phase);
      const std::uint64_t high = ptx::wgmma_operand(context_.tokens(tokens_));
      const std::uint64_t low = high + (kTermBytes >> 4);
      const std::uint32_t from = context_.weights(weights_) + row_at_;
#pragma unroll
      for (int span = 0; span < 2; ++span) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const std::uint32_t at = (from ^ (span * 64U)) + m * (kHalfM * kRowBytes);
          const int4 upper = ptx::load_shared_16(at);
          const int4 lower = ptx::load_shared_16(at + 8 * kRowBytes);
          // The tile's last products are done with its registers; the other tile's run on.
          if (span > 0) ptx::wgmma_wait<1>();
          terms_[m].split(upper, lower);
          hold(terms_[m]);
          ptx::wgmma_fence();
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const std::uint64_t k = span * 4 + j * 2;
            ptx::wgmma_tf32<kN>(part[m], terms_[m].low[j], high + k, span > 0 || j > 0 ? 1 : 0);
            ptx::wgmma_tf32<kN>(part[m], terms_[m].high[j], low + k, 1);
            ptx::wgmma_tf32<kN>(part[m], terms_[m].high[j], high + k, 1);
          }
          ptx::wgmma_commit();
        }
      }
      release(context_.weights_empty(weights_));
      ptx::wgmma_wait<1>();
      hold(part[0]);
      flush(sums[0], part[0]);
      ptx::wgmma_wait<0>();
      release(context_.tokens_empty(tokens_));
      hold(part[1]);
      flush(sums[1], part[1]);
      weights_.advance<kWeightStages>();
      tokens_.advance<kTokenStages>();
    }
    store<kN>(sums, work);
  }

  /// The compiler must not move what it does with the values across this.
  template <int kCount>
  static __device__ __forceinline__ void hold(float (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
  }
  static __device__ __forceinline__ void hold(Terms& terms) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      asm volatile("" : "+r"(terms.high[i / 4][i % 4]), "+r"(terms.low[i / 4][i % 4])::"memory");
    }
  }

  template <int kCount>
  static __device__ __forceinline__ void flush(float (&sums)[kCount], const float (&part)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] = __fadd_rn(sums[i], part[i]);
  }

  static __device__ __forceinline__ void release(std::uint32_t barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
  }

  /// Bias, activation and stores: eight lanes store eight columns of a row, 32 bytes of memory.
  template <int kN>
  __device__ __forceinline__ void store(const float (&sums)[2][kN / 2], const Work& work) const {
    const EpilogueParams& params = context_.params.epilogue;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const float* const bias =
        params.bias == nullptr
            ? nullptr
            : params.bias + std::int64_t{work.expert} * params.columns * (kGated ? 2 : 1);
    float* const out = static_cast<float*>(params.out) +
                       std::int64_t{work.tile.row + lane % 4 * 2} * params.columns;
    const auto column_block = [&](auto kind, int m, int h) {
      [[maybe_unused]] constexpr Activation kKind = decltype(kind)::value;
      const std::int32_t column = work.tile.column_tile * (kGated ? kHalfM : kTileM) + m * kHalfM +
                                  first_row_ + 8 * h + weight_row(lane / 4);
      if (column >= params.columns) return;
      const float b = bias == nullptr ? 0 : bias[column];
      [[maybe_unused]] const float up_b =
          bias == nullptr || !kGated ? 0 : bias[params.columns + column];
#pragma unroll
      for (int i = 0; i < kN / 8; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (8 * i + lane % 4 * 2 + r >= work.tile.rows) continue;
          float v = sums[m][4 * i + 2 * h + r] + b;
          if constexpr (keeps_preactivation(kEpilogue)) {
            float* const before = context_.params.preactivation +
                                  std::int64_t{work.tile.row + lane % 4 * 2 + 8 * i + r} *
                                      context_.params.weight_rows +
                                  column;
            *before = v;
            if constexpr (kGated) before[params.columns] = sums[1][4 * i + 2 * h + r] + up_b;
          }
          if constexpr (kGated) {
            v = activate<kKind, true>(v, sums[1][4 * i + 2 * h + r] + up_b, params.activation);
          } else if constexpr (is_plain(kEpilogue)) {
            v = activate<kKind, false>(v, 0.0F, params.activation);
          }
          out[std::int64_t{8 * i + r} * params.columns + column] = v;
        }
      }
    };
    const auto store_all = [&](auto kind) {
#pragma unroll
      for (int m = 0; m < (kGated ? 1 : 2); ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) column_block(kind, m, h);
      }
    };
    if constexpr (kEpilogue == Epilogue::kLinear) {
      store_all(std::integral_constant<Activation, Activation::kSilu>{});
    } else {
      with_activation(params.activation.kind, store_all);
    }
  }

  const Context& context_;
  int first_row_;         // of this warp, in the upper 128 rows of the tile
  std::uint32_t row_at_;  // where this lane's begins in a stage
  Cursor weights_;
  Cursor tokens_;
  Terms terms_[2];
};

template <Epilogue kEpilogue>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm_f32_sm90(const __grid_constant__ CUtensorMap map,
                          const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) char shared[];
  const Context context{params, ptx::shared_address(shared), (params.depth + kChunk - 1) / kChunk};
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&map);
    context.init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    ptx::lower_registers<kSplitRegisters>();
    if (threadIdx.x < 32) {
      run_loader<is_gated(kEpilogue)>(context, &map);
    } else {
      Splitter(context).run();
    }
  } else {
    ptx::raise_registers<kMultiplyRegisters>();
    Multiplier<kEpilogue>(context, static_cast<int>(threadIdx.x / 128) - 1).run();
  }
}

}  // namespace switchyard::f32_sm90

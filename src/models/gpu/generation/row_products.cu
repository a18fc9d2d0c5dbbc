// Products of few rows: a warp has one or two rows of weights, which it has asked for before the
// stage before it has ended, and all rows of x, which its block makes in shared memory: the norm of
// the residual stream, or what attention's splits add up to.
#include "core/gpu/ptx.cuh"
#include "models/gpu/generation/row_makers.cuh"
#include "models/gpu/generation/stages.hpp"
#include "models/gpu/launch.cuh"

namespace switchyard::models::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kAhead = 4;  // loads of a lane under way, of each row of weights

/// Rows of x + delta normalised; the first block writes these sums too.
template <typename T, int kRows>
__device__ __forceinline__ void make_normed(const RowProductArgs& p, T* rows,
                                            float (&sums)[kWarps]) {
  const T* const delta = static_cast<const T*>(p.delta);
  const auto load = [&](int row, int column, float(&to)[4]) {
    const std::int64_t at = row * p.in + column;
    load4(p.x + at, to);
    if (delta == nullptr) return;
    float more[4];
    load4(delta + at, more);
#pragma unroll
    for (int j = 0; j < 4; ++j) to[j] += more[j];
    if (p.sum != nullptr && blockIdx.x == 0) store4(p.sum + at, to);
  };
  make_normed_rows<T, kRows, kThreads>(load, static_cast<int>(p.rows), static_cast<int>(p.in),
                                       p.norm_weight, p.epsilon, rows, static_cast<int>(p.in),
                                       sums);
}

template <typename T, int kRows, int kOuts, bool kNormed>
__global__ void __launch_bounds__(kThreads) row_product_kernel(RowProductArgs p) {
  extern __shared__ int4 shared[];
  __shared__ float sums[kWarps];
  T* const rows = reinterpret_cast<T*>(shared);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t first_out = (std::int64_t{blockIdx.x} * kWarps + warp) * kOuts;
  const int packs = static_cast<int>(p.in) / kPack<T>;
  const int4* const weights = static_cast<const int4*>(p.w);
  int4 w[kOuts][kAhead];
  const auto load = [&](int first) {
#pragma unroll
    for (int o = 0; o < kOuts; ++o) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int at = first + 32 * i + lane;
        const bool inside = at < packs && first_out + o < p.out;
        w[o][i] = inside ? __ldg(weights + (first_out + o) * packs + at) : int4{};
      }
    }
  };
  load(0);
  if constexpr (kNormed) prefetch_row<kThreads>(p.norm_weight, static_cast<int>(p.in));
  ptx::start_after_previous_kernel();
  if constexpr (kNormed) {
    make_normed<T, kRows>(p, rows, sums);
  } else {
    make_attended_rows<T, kRows, kThreads>({p.mixed, p.parts, p.stats, p.splits, p.heads},
                                           static_cast<int>(p.rows), static_cast<int>(p.in), rows,
                                           static_cast<int>(p.in));
  }
  __syncthreads();

  float sum[kOuts][kRows] = {};
  for (int first = 0; first < packs; first += 32 * kAhead) {
    if (first > 0) load(first);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = first + 32 * i + lane;
      if (at >= packs) continue;
      float a[kOuts][kPack<T>];
#pragma unroll
      for (int o = 0; o < kOuts; ++o) unpack16(w[o][i], a[o], T{});
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float b[kPack<T>];
        unpack16(shared[r * packs + at], b, T{});
#pragma unroll
        for (int o = 0; o < kOuts; ++o) {
#pragma unroll
          for (int j = 0; j < kPack<T>; ++j) sum[o][r] = fmaf(a[o][j], b[j], sum[o][r]);
        }
      }
    }
  }
  // Lane o * kRows + r writes that sum.
  float mine = 0;
#pragma unroll
  for (int o = 0; o < kOuts; ++o) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float total = warp_sum(sum[o][r]);
      if (lane == o * kRows + r) mine = total;
    }
  }
  const std::int64_t out = first_out + lane / kRows, row = lane % kRows;
  if (lane >= kOuts * kRows || out >= p.out || row >= p.rows) return;
  const std::int64_t at = row * p.out + out;
  if (p.add != nullptr) mine += p.add[at];
  if (p.y_is_f32) {
    static_cast<float*>(p.y)[at] = mine;
  } else {
    store(static_cast<T*>(p.y) + at, mine);
  }
}

template <typename T, int kRows>
void launch_rows(const RowProductArgs& args) {
  const bool normed = args.x != nullptr;
  const std::size_t bytes = sizeof(T) * static_cast<std::size_t>(kRows * args.in);
  // Few columns are dealt out to more blocks.
  constexpr int kOutsOfNormed = 2;
  const auto kernel = normed ? row_product_kernel<T, kRows, kOutsOfNormed, true>
                             : row_product_kernel<T, kRows, 1, false>;
  if (bytes > (48U << 10U)) allow_most_shared_memory(reinterpret_cast<const void*>(kernel));
  const unsigned blocks = blocks_for(args.out, normed ? kOutsOfNormed * kWarps : kWarps);
  launch_overlapped(kernel, blocks, kThreads, bytes, args.stream, args);
}

}  // namespace

void row_product(const RowProductArgs& args) {
  by_type(args.bf16, [&](auto type) {
    using T = decltype(type);
    if (args.rows == 1) return launch_rows<T, 1>(args);
    if (args.rows == 2) return launch_rows<T, 2>(args);
    if (args.rows <= 4) return launch_rows<T, 4>(args);
    launch_rows<T, 8>(args);
  });
}

}  // namespace switchyard::models::gpu

// The sums on the way back that are no products: who takes which part of a weights' gradient,
// biases and row weights. Bound by reading the rows once more, and where there is little of that by
// the launch.

#include "core/gpu/cuda_check.hpp"
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/pack16.cuh"
#include "experts/gpu/backward/products.hpp"

namespace switchyard {
namespace {

constexpr int kThreads = 256;
constexpr std::uint32_t kAllLanes = 0xFFFFFFFFU;
constexpr int kStripes = 32;  // of rows, each summed up by a thread of its own
constexpr int kChunks = kThreads / kStripes;

/// Calls body(T{}) for the type.
template <typename Body>
void with_type(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kF32: return body(float{});
    case DType::kBF16: return body(__nv_bfloat16{});
    default: return body(__half{});
  }
}

/// Calls body(kernels) for the type and the path.
template <typename Body>
void with_kernels(DType dtype, BackwardPath path, Body&& body) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (sizeof(T) == 2) {
      if (path == BackwardPath::kSm90) return body(HopperBackward<T>{});
    }
    body(PortableBackward<T>{});
  });
}

template <typename T>
__device__ __forceinline__ void load_chunk(const void* rows, std::int64_t at,
                                           float (&x)[kPack<T>]) {
  unpack16(__ldg(reinterpret_cast<const int4*>(static_cast<const T*>(rows) + at)), x, T{});
}

__global__ void __launch_bounds__(kMaxBackwardExperts)
    prepare_units(const __grid_constant__ PrepareUnits args) {
  __shared__ std::int32_t before[kMaxBackwardExperts];
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  for (std::int32_t i = thread; i < args.num_zeroed; i += kMaxBackwardExperts) args.zeroed[i] = 0;
  const bool exists = thread < args.rows.num_experts;
  const std::int32_t rows = exists ? args.rows.rows[thread] : 0;
  /// Sum of `mine` over the threads up to and with this one.
  const auto sum_up_to = [&](std::int32_t mine) {
    before[thread] = mine;
    __syncthreads();
    for (int distance = 1; distance < kMaxBackwardExperts; distance *= 2) {
      const std::int32_t add = thread >= distance ? before[thread - distance] : 0;
      __syncthreads();
      before[thread] += add;
      __syncthreads();
    }
    const std::int32_t sum = before[thread];
    __syncthreads();
    return sum;
  };
#pragma unroll 1
  for (int product = 0; product < 2; ++product) {
    const RaggedUnits& units = args.units[product];
    if (units.parts_before == nullptr) continue;
    const std::int32_t parts = exists ? parts_of(rows, units.part_rows) : 0;
    const std::int32_t parts_sum = sum_up_to(parts);
    const std::int32_t split_sum = sum_up_to(parts > 1 ? parts : 0);
    if (!exists) continue;
    if (thread == 0) units.parts_before[0] = units.split_parts_before[0] = 0;
    units.parts_before[thread + 1] = parts_sum;
    units.split_parts_before[thread + 1] = split_sum;
  }
}

/// One block: kChunks chunks of columns of one expert.
template <typename T>
__global__ void __launch_bounds__(kThreads) sum_columns(const __grid_constant__ ColumnSums args) {
  __shared__ float sums[kStripes][kChunks * kPack<T>];
  const auto expert = static_cast<std::int64_t>(blockIdx.y);
  const int chunk = static_cast<int>(threadIdx.x) % kChunks * kPack<T>;
  const int stripe = static_cast<int>(threadIdx.x) / kChunks;
  const std::int64_t first_column = std::int64_t{blockIdx.x} * kChunks * kPack<T>;
  const std::int64_t first = args.rows.begin[expert];
  const std::int32_t rows = first_column + chunk < args.in.cols ? args.rows.rows[expert] : 0;
  float sum[kPack<T>] = {};
#pragma unroll 4
  for (std::int32_t i = stripe; i < rows; i += kStripes) {
    const std::int64_t row = first + i;
    const std::int64_t from = args.in.token == nullptr ? row : args.in.token[row];
    const float weight = args.weighted ? args.rows.weight[row] : 1.0F;
    float x[kPack<T>];
    load_chunk<T>(args.in.rows, from * args.in.cols + first_column + chunk, x);
#pragma unroll
    for (int j = 0; j < kPack<T>; ++j) sum[j] = fmaf(weight, x[j], sum[j]);
  }
#pragma unroll
  for (int j = 0; j < kPack<T>; ++j) sums[stripe][chunk + j] = sum[j];
  __syncthreads();
  const std::int64_t column = first_column + threadIdx.x;
  if (threadIdx.x >= kChunks * kPack<T> || column >= args.in.cols) return;
  float all = 0;
  for (int s = 0; s < kStripes; ++s) all += sums[s][threadIdx.x];
  float* const out = args.out + expert * args.in.cols + column;
  *out = args.accumulate ? *out + all : all;
}

/// The expert whose rows hold `row`: the last one that begins no later.
__device__ __forceinline__ std::int32_t expert_of_row(const ExpertRows& rows, std::int64_t row) {
  std::int32_t low = 0;
  std::int32_t high = rows.num_experts - 1;
  while (low < high) {
    const std::int32_t middle = (low + high + 1) / 2;
    if (__ldg(rows.begin + middle) <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

/// A warp a row.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    sum_row_weights(const __grid_constant__ RowWeightSums args) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t warps = std::int64_t{gridDim.x} * (kThreads / 32);
  const std::int64_t end = args.rows.begin[args.rows.num_experts];
  for (std::int64_t row = std::int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32; row < end;
       row += warps) {
    const std::int64_t expert = expert_of_row(args.rows, row);
    if (row - args.rows.begin[expert] >= args.rows.rows[expert]) continue;
    float of_bias = 0;
    if (args.b2 != nullptr) {
      const std::int64_t from = std::int64_t{args.rows.token[row]} * args.hidden;
      const float* const bias = args.b2 + expert * args.hidden;
      for (std::int64_t h = lane * kPack<T>; h < args.hidden; h += 32 * kPack<T>) {
        float x[kPack<T>];
        load_chunk<T>(args.dout, from + h, x);
#pragma unroll
        for (int j = 0; j < kPack<T>; ++j) of_bias = fmaf(x[j], __ldg(bias + h + j), of_bias);
      }
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        of_bias += __shfl_xor_sync(kAllLanes, of_bias, distance);
      }
    }
    if (lane != 0) continue;
    float sum = 0;
    for (std::int64_t i = 0; i < args.num_dots; ++i) sum += args.dots[row * args.num_dots + i];
    args.out[row] = sum + of_bias;
  }
}

}  // namespace

void launch_prepare_units(const PrepareUnits& args, cudaStream_t stream) {
  prepare_units<<<1, kMaxBackwardExperts, 0, stream>>>(args);
  SWITCHYARD_CUDA(cudaGetLastError());
}

void launch_down_gradient(const DownGradient& args, BackwardPath path, cudaStream_t stream) {
  with_kernels(args.dtype, path, [&](auto kernels) { kernels.down(args, stream); });
}

void launch_rows_gradient(const RowsGradient& args, BackwardPath path, cudaStream_t stream) {
  with_kernels(args.dtype, path, [&](auto kernels) { kernels.rows(args, stream); });
}

void launch_weight_gradient(const WeightGradient& args, BackwardPath path, cudaStream_t stream) {
  with_kernels(args.dtype, path, [&](auto kernels) { kernels.weights(args, stream); });
}

void launch_column_sums(const ColumnSums& args, cudaStream_t stream) {
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr std::int64_t kColumns = kChunks * kPack<T>;
    const dim3 blocks(static_cast<unsigned>((args.in.cols + kColumns - 1) / kColumns),
                      static_cast<unsigned>(args.rows.num_experts));
    sum_columns<T><<<blocks, kThreads, 0, stream>>>(args);
  });
  SWITCHYARD_CUDA(cudaGetLastError());
}

void launch_row_weight_sums(const RowWeightSums& args, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(8 * num_multiprocessors());
  with_type(args.dtype, [&](auto type) {
    sum_row_weights<decltype(type)><<<blocks, kThreads, 0, stream>>>(args);
  });
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard

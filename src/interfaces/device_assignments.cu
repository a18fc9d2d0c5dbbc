// What the flat and the bucketed interface do beside the exchange: meta, rows into buckets, and the
// weighted sums at home. Bound by memory. A warp takes a row, or a thread 8 values of a token.
#include <algorithm>

#include "comm/device/exchange.cuh"
#include "core/gpu/cuda_device.hpp"
#include "interfaces/device_assignment_kernels.hpp"

namespace switchyard {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMetaWidth = 5;

__global__ void __launch_bounds__(kThreads) keep_kernel(const __grid_constant__ KeepParams p) {
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  const std::int64_t first = blockIdx.x * std::int64_t{kThreads} + threadIdx.x;
  for (std::int64_t i = first; i < p.count; i += stride) {
    p.kept_expert[i] = p.expert[i];
    p.kept_weight[i] = p.weight[i];
  }
  if (p.meta == nullptr) return;
  for (std::int64_t i = first; i < p.meta_size; i += stride) p.meta[i] = -1;
}

__global__ void __launch_bounds__(kThreads)
    flat_meta_kernel(const ReceivedAssignments received, int2* meta) {
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; i < received.places;
       i += stride) {
    const std::int32_t expert = received.expert[i];
    meta[i] = {expert < 0 ? -1 : __float_as_int(received.position[i]), expert};
  }
}

__global__ void __launch_bounds__(kThreads) bucket_kernel(const __grid_constant__ BucketParams p) {
  if (blockIdx.x == 0 && threadIdx.x == 0) p.found->lost_rows = p.status->lost_rows;
  __shared__ std::int64_t source_end[kMaxDeviceRanks];
  if (threadIdx.x == 0) {
    std::int64_t rows = 0;
    for (int s = 0; s < p.num_ranks; ++s) {
      rows += p.counts[s * p.num_ranks + p.rank];
      source_end[s] = rows;
    }
  }
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t words = p.x.row_bytes() / 16;
  const std::int64_t stride = std::int64_t{gridDim.x} * kWarps;
  for (std::int64_t place = blockIdx.x * std::int64_t{kWarps} + threadIdx.x / 32;
       place < source_end[p.num_ranks - 1]; place += stride) {
    const std::int32_t begin = p.token_begin[place];
    if (p.token_begin[place + 1] == begin) continue;  // more than its bucket holds
    const std::int64_t row = p.token_row[begin];
    const auto* const from = reinterpret_cast<const int4*>(p.x.data) + place * words;
    auto* const to = reinterpret_cast<int4*>(p.rows) + row * words;
    std::int64_t i = lane;
    constexpr int kBatch = 8;  // loads under way
    for (; i + (kBatch - 1) * 32 < words; i += kBatch * 32) {
      int4 value[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) value[j] = from[i + j * 32];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) to[i + j * 32] = value[j];
    }
    for (; i < words; i += 32) to[i] = from[i];
    if (lane >= kMetaWidth) continue;
    const std::int32_t position = __float_as_int(p.received.position[place]);
    std::int32_t source = 0;
    while (source_end[source] <= place) ++source;
    const std::int32_t meta[kMetaWidth] = {p.received.expert[place], source, position / p.top_k,
                                           position % p.top_k, 0};
    std::int32_t value = 0;
#pragma unroll
    for (int m = 0; m < kMetaWidth; ++m) value = lane == m ? meta[m] : value;
    p.meta[row * kMetaWidth + lane] = value;
    if (lane == 0) p.row_of_place[place] = static_cast<std::int32_t>(row);
  }
}

template <typename Out>
__device__ __forceinline__ void store_eight(void* out, std::int64_t at, const float (&sum)[8]) {
  Eight<Out> values;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) set_pair(values, pair, {sum[2 * pair], sum[2 * pair + 1]});
  *reinterpret_cast<Eight<Out>*>(static_cast<Out*>(out) + at) = values;
}

template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads)
    add_kernel(const __grid_constant__ AddAssignmentsParams p) {
  const std::int64_t columns = p.out.cols / 8;
  const std::int64_t item = blockIdx.x * std::int64_t{kThreads} + threadIdx.x;
  if (item >= p.out.rows * columns) return;
  const std::int64_t token = item / columns;
  const std::int64_t column = item % columns * 8;
  const auto* const rows = reinterpret_cast<const In*>(p.rows.data);
  float sum[8] = {};
#pragma unroll 4
  for (int k = 0; k < p.top_k; ++k) {
    const std::int64_t i = token * p.top_k + k;
    const Eight<In> values = *reinterpret_cast<const Eight<In>*>(rows + i * p.out.cols + column);
    if (p.expert[i] < 0) continue;
    const float weight = p.weight[i];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const float2 value = get_pair(values, pair);
      sum[2 * pair] = __fmaf_rn(weight, value.x, sum[2 * pair]);
      sum[2 * pair + 1] = __fmaf_rn(weight, value.y, sum[2 * pair + 1]);
    }
  }
  store_eight<Out>(p.out.data, token * p.out.cols + column, sum);
}

using AddKernel = void (*)(AddAssignmentsParams);

template <typename In>
AddKernel add_kernel_to(DType out) {
  switch (out) {
    case DType::kBF16: return add_kernel<In, __nv_bfloat16>;
    case DType::kF16: return add_kernel<In, __half>;
    default: return add_kernel<In, float>;
  }
}

AddKernel add_kernel_of(DType in, DType out) {
  switch (in) {
    case DType::kBF16: return add_kernel_to<__nv_bfloat16>(out);
    case DType::kF16: return add_kernel_to<__half>(out);
    default: return add_kernel_to<float>(out);
  }
}

unsigned blocks_for(std::int64_t items, std::int64_t of_a_block) {
  return static_cast<unsigned>((items + of_a_block - 1) / of_a_block);
}

}  // namespace

void keep_input(const KeepParams& params, cudaStream_t stream) {
  const std::int64_t items = std::max(params.count, params.meta == nullptr ? 0 : params.meta_size);
  if (items == 0) return;
  const unsigned most = 4U * static_cast<unsigned>(num_multiprocessors());
  keep_kernel<<<std::min(most, blocks_for(items, kThreads)), kThreads, 0, stream>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

void make_flat_meta(const ReceivedAssignments& received, std::int32_t* meta, cudaStream_t stream) {
  if (received.places == 0) return;
  flat_meta_kernel<<<blocks_for(received.places, kThreads), kThreads, 0, stream>>>(
      received, reinterpret_cast<int2*>(meta));
  SWITCHYARD_CUDA(cudaGetLastError());
}

void fill_buckets(const BucketParams& params, cudaStream_t stream) {
  if (params.received.places == 0) return;
  const unsigned most = 4U * static_cast<unsigned>(num_multiprocessors());
  bucket_kernel<<<std::min(most, blocks_for(params.received.places, kWarps)), kThreads, 0,
                  stream>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

void add_assignments(const AddAssignmentsParams& params, cudaStream_t stream) {
  const std::int64_t items = params.out.rows * params.out.cols / 8;
  if (items == 0) return;
  add_kernel_of(params.rows.dtype,
                params.out.dtype)<<<blocks_for(items, kThreads), kThreads, 0, stream>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard

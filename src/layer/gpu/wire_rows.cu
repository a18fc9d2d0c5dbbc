// Rows out of the type that they travel in, and there and back where no other rank is. A warp takes
// 256 values of a row, 8 a lane, so that half a warp has the 128 of a scale. Bound by memory.
#include <algorithm>

#include "comm/device/exchange.cuh"
#include "core/check.hpp"
#include "core/gpu/cuda_device.hpp"
#include "layer/gpu/wire_rows.hpp"

namespace switchyard {
namespace {

constexpr int kThreads = 256;
constexpr int kWarpValues = 256;

struct DecodeParams {
  const void* x;
  const float* scale;
  const std::int32_t* expert;
  void* out;
  std::int64_t rows, hidden;
  std::int32_t top_k;
};

struct QuantiseParams {
  const __nv_bfloat16* x;
  const std::int32_t* expert;  // or null
  __nv_fp8_e4m3* out;
  float* scale;
  std::int64_t rows, hidden;
  std::int32_t top_k;
};

struct CrossParams {
  const void* in;
  void* out;
  std::int64_t rows, hidden;
};

template <typename T, typename Wire>
__device__ __forceinline__ Eight<T> decoded(const Eight<Wire>& in, float scale) {
  Eight<T> out;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    float2 v = get_pair(in, pair);
    if constexpr (kIsFp8<Wire>) v = {__fmul_rn(v.x, scale), __fmul_rn(v.y, scale)};
    set_pair(out, pair, v);
  }
  return out;
}

/// Calls work(row, first value of this lane) for each piece of each row that is this warp's.
template <typename Work>
__device__ __forceinline__ void for_each_piece(std::int64_t rows, std::int64_t hidden,
                                               Work&& work) {
  const std::int64_t pieces = (hidden + kWarpValues - 1) / kWarpValues;
  const std::int64_t warps = std::int64_t{gridDim.x} * (kThreads / 32);
  const std::int64_t warp = std::int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  for (std::int64_t i = warp; i < rows * pieces; i += warps) {
    work(i / pieces, i % pieces * kWarpValues + threadIdx.x % 32 * 8);
  }
}

template <typename T, typename Wire>
__global__ void __launch_bounds__(kThreads) decode_kernel(const DecodeParams p) {
  const auto lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t scales = (p.hidden + kScaleBlock - 1) / kScaleBlock;
  for_each_piece(p.rows, p.hidden, [&](std::int64_t row, std::int64_t at) {
    const bool used = lane < p.top_k && p.expert[row * p.top_k + lane] >= 0;
    if (__ballot_sync(0xffffffffU, used) == 0 || at >= p.hidden) return;
    const auto in =
        *reinterpret_cast<const Eight<Wire>*>(static_cast<const Wire*>(p.x) + row * p.hidden + at);
    const float scale = kIsFp8<Wire> ? p.scale[row * scales + at / kScaleBlock] : 1.0F;
    *reinterpret_cast<Eight<T>*>(static_cast<T*>(p.out) + row * p.hidden + at) =
        decoded<T>(in, scale);
  });
}

template <typename T, typename Wire>
__global__ void __launch_bounds__(kThreads) cross_kernel(const CrossParams p) {
  for_each_piece(p.rows, p.hidden, [&](std::int64_t row, std::int64_t at) {
    Eight<T> in[1] = {};
    const std::int64_t place = row * p.hidden + at;
    if (at < p.hidden)
      in[0] = *reinterpret_cast<const Eight<T>*>(static_cast<const T*>(p.in) + place);
    Eight<Wire> crossed[1];
    float scale = encode<Wire>(in, crossed);  // in the first lane of each half warp
    scale = __shfl_sync(0xffffffffU, scale, static_cast<int>(threadIdx.x) & 16);
    if (at >= p.hidden) return;
    *reinterpret_cast<Eight<T>*>(static_cast<T*>(p.out) + place) = decoded<T>(crossed[0], scale);
  });
}

__global__ void __launch_bounds__(kThreads) quantise_kernel(const QuantiseParams p) {
  const auto lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t scales = (p.hidden + kScaleBlock - 1) / kScaleBlock;
  for_each_piece(p.rows, p.hidden, [&](std::int64_t row, std::int64_t at) {
    const bool used =
        p.expert == nullptr || (lane < p.top_k && p.expert[row * p.top_k + lane] >= 0);
    if (__ballot_sync(0xffffffffU, used) == 0) return;
    Eight<__nv_bfloat16> in[1] = {};
    const std::int64_t place = row * p.hidden + at;
    if (at < p.hidden) in[0] = *reinterpret_cast<const Eight<__nv_bfloat16>*>(p.x + place);
    Eight<__nv_fp8_e4m3> codes[1];
    const float scale = encode<__nv_fp8_e4m3>(in, codes);  // in the first lane of each half warp
    if (at >= p.hidden) return;
    *reinterpret_cast<Eight<__nv_fp8_e4m3>*>(p.out + place) = codes[0];
    if (lane % 16 == 0) p.scale[row * scales + at / kScaleBlock] = scale;
  });
}

unsigned blocks_for(std::int64_t rows, std::int64_t hidden) {
  const std::int64_t pieces = rows * ((hidden + kWarpValues - 1) / kWarpValues);
  const std::int64_t wanted = (pieces + kThreads / 32 - 1) / (kThreads / 32);
  return static_cast<unsigned>(std::min<std::int64_t>(wanted, 16 * num_multiprocessors()));
}

/// Calls with a value of the type for `dtype`.
template <typename Call>
void with_float_type(DType dtype, Call&& call) {
  switch (dtype) {
    case DType::kBF16: return call(__nv_bfloat16{});
    case DType::kF16: return call(__half{});
    default: return call(float{});
  }
}
template <typename Call>
void with_wire_type(DType wire, Call&& call) {
  if (wire == DType::kF8E4M3) return call(__nv_fp8_e4m3{});
  with_float_type(wire, call);
}

}  // namespace

void load_wire_kernels(DType dtype, DType wire) {
  with_float_type(dtype, [&]<typename T>(T) {
    with_wire_type(wire, [&]<typename Wire>(Wire) {
      cudaFuncAttributes attributes;
      SWITCHYARD_CUDA(cudaFuncGetAttributes(&attributes, decode_kernel<T, Wire>));
      SWITCHYARD_CUDA(cudaFuncGetAttributes(&attributes, cross_kernel<T, Wire>));
    });
  });
}

void decode_rows(const WireRows& rows, RawMatrix out, cudaStream_t stream) {
  if (rows.x.rows == 0) return;
  const DecodeParams params{.x = rows.x.data,
                            .scale = rows.scale.data,
                            .expert = rows.expert.data,
                            .out = out.data,
                            .rows = rows.x.rows,
                            .hidden = rows.x.cols,
                            .top_k = static_cast<std::int32_t>(rows.expert.shape[1])};
  with_float_type(out.dtype, [&]<typename T>(T) {
    with_wire_type(rows.x.dtype, [&]<typename Wire>(Wire) {
      decode_kernel<T, Wire>
          <<<blocks_for(params.rows, params.hidden), kThreads, 0, stream>>>(params);
    });
  });
  SWITCHYARD_CUDA(cudaGetLastError());
}

void quantise_rows(const WireRows& rows, RawMatrix out, Matrix<float> scale, cudaStream_t stream) {
  if (rows.x.rows == 0) return;
  const QuantiseParams params{
      .x = reinterpret_cast<const __nv_bfloat16*>(rows.x.data),
      .expert = rows.expert.data,
      .out = reinterpret_cast<__nv_fp8_e4m3*>(out.data),
      .scale = scale.data,
      .rows = rows.x.rows,
      .hidden = rows.x.cols,
      .top_k = rows.expert.data == nullptr ? 0 : static_cast<std::int32_t>(rows.expert.shape[1])};
  quantise_kernel<<<blocks_for(params.rows, params.hidden), kThreads, 0, stream>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

void cross_wire(ConstRawMatrix in, DType wire, RawMatrix out, cudaStream_t stream) {
  if (in.rows == 0) return;
  const CrossParams params{in.data, out.data, in.rows, in.cols};
  with_float_type(in.dtype, [&]<typename T>(T) {
    with_wire_type(wire, [&]<typename Wire>(Wire) {
      cross_kernel<T, Wire><<<blocks_for(in.rows, in.cols), kThreads, 0, stream>>>(params);
    });
  });
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard

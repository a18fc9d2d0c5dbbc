// The reference of streaming_bench: doubles, a warp an output, weights read as they lie.
#include "bench/kernels/streaming_check.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <fmt/core.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/check.hpp"
#include "experts/gpu/coded/layout.hpp"
#include "testkit/gpu/device_array.hpp"

namespace switchyard::bench {
namespace {

__device__ float noise(std::uint64_t i, unsigned seed) {
  std::uint32_t v =
      static_cast<std::uint32_t>(i) * 2654435761U ^ static_cast<std::uint32_t>(i >> 32) * 40503U;
  v += seed;
  v ^= v >> 16;
  v *= 0x85ebca6bU;
  v ^= v >> 13;
  v *= 0xc2b2ae35U;
  v ^= v >> 16;
  return (static_cast<float>(v >> 8) / 8388608.0F - 1.0F) * 1.7320508F;
}

template <typename T>
__global__ void fill_kernel(T* values, std::size_t count, float scale, unsigned seed) {
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    values[i] = static_cast<T>(noise(i, seed) * scale);
  }
}

template <typename T>
__device__ double wide(T value) {
  return static_cast<double>(static_cast<float>(value));
}
__device__ double wide(double value) { return value; }

/// The sum over a warp of a[k] * b[k].
template <typename A, typename B>
__device__ double dot(const A* a, const B* b, std::int64_t size) {
  double sum = 0;
  for (std::int64_t k = threadIdx.x % 32; k < size; k += 32) sum += wide(a[k]) * wide(b[k]);
  for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0U, sum, other);
  return sum;
}

__device__ std::int64_t expert_of(const StreamingParams& p, std::int64_t row) {
  std::int64_t expert = 0;
  while (p.expert_begin[expert + 1] <= row) ++expert;
  return expert;
}

template <typename T>
__global__ void up_kernel(StreamingParams p, double* act) {
  const std::int64_t row = blockIdx.y;
  const std::int64_t j = std::int64_t{blockIdx.x} * 8 + threadIdx.x / 32;
  if (j >= p.inner) return;
  const T* gate = static_cast<const T*>(p.w13) + (expert_of(p, row) * 2 * p.inner + j) * p.hidden;
  const T* x = static_cast<const T*>(p.x) + p.row_token[row] * p.hidden;
  const double g = dot(gate, x, p.hidden);
  const double u = dot(gate + p.inner * p.hidden, x, p.hidden);
  if (threadIdx.x % 32 == 0) act[row * p.inner + j] = g / (1.0 + exp(-g)) * u;
}

template <typename T>
__global__ void down_kernel(StreamingParams p, const double* act, double* out) {
  const std::int64_t token = blockIdx.y;
  const std::int64_t h = std::int64_t{blockIdx.x} * 8 + threadIdx.x / 32;
  if (h >= p.hidden) return;
  double sum = 0;
  for (std::int32_t i = p.token_begin[token]; i < p.token_begin[token + 1]; ++i) {
    const std::int64_t row = p.token_row[i];
    const T* w = static_cast<const T*>(p.w2) + (expert_of(p, row) * p.hidden + h) * p.inner;
    sum += p.row_weight[row] * dot(w, act + row * p.inner, p.inner);
  }
  if (threadIdx.x % 32 == 0) out[token * p.hidden + h] = sum;
}

template <typename T>
void enqueue_reference(const StreamingParams& p, std::int64_t rows, double* act, double* out,
                       cudaStream_t stream) {
  const auto blocks = [](std::int64_t columns, std::int64_t lines) {
    return dim3(static_cast<unsigned>((columns + 7) / 8), static_cast<unsigned>(lines));
  };
  up_kernel<T><<<blocks(p.inner, rows), 256, 0, stream>>>(p, act);
  down_kernel<T><<<blocks(p.hidden, p.num_tokens), 256, 0, stream>>>(p, act, out);
  SWITCHYARD_CUDA(cudaGetLastError());
}

/// work(T{}) for the dtype's T.
template <typename Work>
void with_type(DType dtype, const Work& work) {
  switch (dtype) {
    case DType::kF32: return work(float{});
    case DType::kBF16: return work(__nv_bfloat16{});
    case DType::kF16: return work(__half{});
    default: fail(ErrorCode::kUnsupported, "dtype {} is none of f32, bf16, f16", to_string(dtype));
  }
}

StreamingVerdict compare(const std::vector<float>& got, const std::vector<double>& want,
                         DType dtype, bool fp8_rows) {
  double error = 0, norm = 0, worst = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double difference = std::abs(got[i] - want[i]);
    error += difference * difference;
    norm += want[i] * want[i];
    const double share = difference / (1e-5 + 1e-3 * std::abs(want[i]));
    worst = std::isnan(share) ? std::numeric_limits<double>::infinity() : std::max(worst, share);
  }
  const double relative = std::sqrt(error / norm);
  const double of_type = dtype == DType::kF32 ? 2e-6 : dtype == DType::kBF16 ? 6e-3 : 1e-3;
  const double bound = fp8_rows ? 6e-2 : of_type;
  const bool right = relative < bound && (dtype != DType::kF32 || worst <= 1);
  return {right, fmt::format("{} {:.1e}/{:.2f}", right ? "ok" : "WRONG", relative, worst)};
}

}  // namespace

void fill_uniform(void* values, DType dtype, std::size_t count, float scale, unsigned seed,
                  cudaStream_t stream) {
  with_type(dtype, [&]<typename T>(T) {
    fill_kernel<<<2048, 256, 0, stream>>>(static_cast<T*>(values), count, scale, seed);
  });
  SWITCHYARD_CUDA(cudaGetLastError());
}

namespace {

__device__ unsigned hashed(unsigned x) {
  x = (x ^ (x >> 16)) * 0x7feb352dU;
  x = (x ^ (x >> 15)) * 0x846ca68bU;
  return x ^ (x >> 16);
}

/// Times e4m3's normal numbers, so that of 128 x 128 of them the largest is about 448: what a
/// quantised checkpoint has.
constexpr float kE4M3Deviation = 107;

/// MXFP4: any code, scales of three powers of two. e4m3: normal numbers.
__global__ void fill_codes_kernel(WeightFormat format, unsigned char* codes, std::size_t bytes,
                                  unsigned seed) {
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < bytes; i += stride) {
    const unsigned random =
        hashed(static_cast<unsigned>(i) ^ hashed(static_cast<unsigned>(i >> 32) ^ seed));
    auto code = static_cast<unsigned char>(random);
    if (format == WeightFormat::kE4M3) {
      const float radius = sqrtf(-2.0F * logf((static_cast<float>(random) + 1.0F) * 0x1p-32F));
      const float turns = static_cast<float>(hashed(random ^ seed)) * 0x1p-32F;
      code = __nv_cvt_float_to_fp8(kE4M3Deviation * radius * cospif(2.0F * turns), __NV_SATFINITE,
                                   __NV_E4M3);
    } else if (format == WeightFormat::kMxfp4) {
      if (i % coded::kMxfp4UnitBytes >= coded::kMxfp4ScalesAt) {
        code = static_cast<unsigned char>(coded::kMxfp4LargestScale - random % 3);
      }
    }
    codes[i] = code;
  }
}

__global__ void fill_scales_kernel(float* scales, std::int64_t count, float scale) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) scales[i] = scale;
}

}  // namespace

float fill_codes(WeightFormat format, std::byte* codes, std::size_t bytes, float scale,
                 unsigned seed, cudaStream_t stream) {
  fill_codes_kernel<<<4096, 256, 0, stream>>>(format, reinterpret_cast<unsigned char*>(codes),
                                              bytes, seed);
  SWITCHYARD_CUDA(cudaGetLastError());
  // MXFP4's numbers deviate by 1.6: 2.7 times about a half.
  const float deviation = format == WeightFormat::kMxfp4 ? 1.6F : kE4M3Deviation;
  return std::exp2(std::round(std::log2(scale / deviation)));
}

void fill_scales(float* scales, std::int64_t count, float scale, cudaStream_t stream) {
  fill_scales_kernel<<<static_cast<unsigned>((count + 255) / 256), 256, 0, stream>>>(scales, count,
                                                                                     scale);
  SWITCHYARD_CUDA(cudaGetLastError());
}

StreamingVerdict check_streaming(
    const StreamingParams& params,
    const std::function<void(const StreamingParams&, cudaStream_t)>& launch, cudaStream_t stream,
    bool fp8_rows) {
  std::int32_t rows = 0;
  SWITCHYARD_CUDA(cudaMemcpy(&rows, params.expert_begin + params.num_experts, sizeof(rows),
                             cudaMemcpyDeviceToHost));
  const auto size = static_cast<std::size_t>(params.num_tokens * params.hidden);
  const auto act_size = static_cast<std::size_t>(rows * params.inner);
  const DeviceArray<double> act(act_size);
  const DeviceArray<double> want(size);
  with_type(params.dtype, [&]<typename T>(T) {
    enqueue_reference<T>(params, rows, act.data(), want.data(), stream);
  });
  std::vector<float> got(size), again(size);
  for (int repeat = 0; repeat < 4; ++repeat) {
    StreamingParams run = params;
    run.plan_is_older = repeat % 2 == 1;
    SWITCHYARD_CUDA(cudaMemsetAsync(run.sums, 0xff, size * sizeof(float), stream));
    SWITCHYARD_CUDA(cudaMemsetAsync(
        run.act, 0xff, act_size * static_cast<std::size_t>(size_of(run.dtype)), stream));
    launch(run, stream);
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
    std::vector<float>& sums = repeat == 0 ? got : again;
    SWITCHYARD_CUDA(
        cudaMemcpy(sums.data(), run.sums, size * sizeof(float), cudaMemcpyDeviceToHost));
    if (repeat > 0 && std::memcmp(got.data(), again.data(), size * sizeof(float)) != 0) {
      return {false, "BITS DIFFER"};
    }
  }
  return compare(got, want.get(), params.dtype, fp8_rows);
}

}  // namespace switchyard::bench

// The roofs of the current GPU: what a large copy, large reads and large dense products reach.
#include "bench/device_limits.hpp"

#include <cublas_v2.h>

#include <algorithm>
#include <random>
#include <vector>

#include "bench/device_clock.hpp"
#include "bench/device_read.hpp"
#include "core/check.hpp"
#include "core/device_buffer.hpp"

namespace switchyard::bench {
namespace {

constexpr std::int64_t kCopyBytes = std::int64_t{1} << 31;
constexpr std::int64_t kReadBytes = std::int64_t{1} << 32;
constexpr int kRuns = 5;
constexpr int kProducts = 41;

/// Seconds of some runs, the fastest first.
std::vector<double> sorted_runs(int runs, const MeasuredCall& call) {
  StageTimes times;
  const auto clock = make_device_clock(times, nullptr);
  std::vector<double> seconds;
  for (int run = 0; run < runs; ++run) seconds.push_back(clock->run(&times, call) * 1e-6);
  std::sort(seconds.begin(), seconds.end());
  return seconds;
}

double fastest(const MeasuredCall& call) { return sorted_runs(kRuns, call).front(); }

double copy_bytes_per_s() {
  DeviceBuffer from, to;
  from.reserve(kCopyBytes);
  to.reserve(kCopyBytes);
  // Not from a graph: there the runtime may copy by engines that reach two thirds of the rate.
  cudaEvent_t start = nullptr;
  cudaEvent_t stop = nullptr;
  SWITCHYARD_CUDA(cudaEventCreate(&start));
  SWITCHYARD_CUDA(cudaEventCreate(&stop));
  float best = 1e30F;
  for (int run = 0; run < kRuns; ++run) {
    SWITCHYARD_CUDA(cudaEventRecord(start));
    SWITCHYARD_CUDA(cudaMemcpyAsync(to.data(), from.data(), static_cast<std::size_t>(kCopyBytes),
                                    cudaMemcpyDeviceToDevice));
    SWITCHYARD_CUDA(cudaEventRecord(stop));
    SWITCHYARD_CUDA(cudaEventSynchronize(stop));
    float ms = 0;
    SWITCHYARD_CUDA(cudaEventElapsedTime(&ms, start, stop));
    best = std::min(best, ms);
  }
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  return 2 * static_cast<double>(kCopyBytes) / (1e-3 * static_cast<double>(best));
}

double read_bytes_per_s() {
  DeviceBuffer memory, out;
  memory.reserve(kReadBytes);
  out.reserve(sizeof(unsigned));
  double best = 0;
  for (const ReadShape shape : kReadShapes) {
    const double seconds = fastest([&](StageRecorder*, void* stream) {
      launch_read(memory.data(), kReadBytes, reinterpret_cast<unsigned*>(out.data()), shape,
                  static_cast<cudaStream_t>(stream));
    });
    best = std::max(best, static_cast<double>(kReadBytes) / seconds);
  }
  return best;
}

/// Random values: on equal ones a GPU draws less power and clocks higher.
void fill(DeviceBuffer& matrix, cudaDataType type, std::int64_t size) {
  std::mt19937 random(17);
  std::vector<std::uint16_t> block(std::size_t{1} << 21);
  for (std::uint16_t& value : block) {
    // The upper half of a float in [1, 2) or (-2, -1]; as f16, 1 to 2 or so as well.
    const auto bits = static_cast<std::uint16_t>(random());
    value = static_cast<std::uint16_t>((bits & 0x803fU) | (type == CUDA_R_16F ? 0x3c00U : 0x3f80U));
  }
  const std::int64_t bytes = size * (type == CUDA_R_32F ? 4 : 2);
  matrix.reserve(bytes);
  const auto block_bytes = static_cast<std::int64_t>(2 * block.size());
  for (std::int64_t at = 0; at < bytes; at += block_bytes) {
    SWITCHYARD_CUDA(cudaMemcpy(matrix.data() + at, block.data(),
                               static_cast<std::size_t>(std::min(block_bytes, bytes - at)),
                               cudaMemcpyHostToDevice));
  }
}

class Blas {
 public:
  Blas() {
    if (cublasCreate(&handle_) != CUBLAS_STATUS_SUCCESS) {
      fail(ErrorCode::kDevice, "cublasCreate failed");
    }
    workspace_.reserve(64 << 20);  // none may be taken while a graph is captured
    cublasSetWorkspace(handle_, workspace_.data(), 64 << 20);
  }
  ~Blas() { cublasDestroy(handle_); }
  Blas(const Blas&) = delete;
  Blas& operator=(const Blas&) = delete;

  /// C = A^T B, all [n, n].
  double flops(cudaDataType type, int n) {
    DeviceBuffer a, b, c;
    const std::int64_t size = std::int64_t{n} * n;
    fill(a, type, size);
    fill(b, type, size);
    fill(c, type, size);
    const float one = 1;
    const float zero = 0;
    const cublasComputeType_t compute =
        type == CUDA_R_32F ? CUBLAS_COMPUTE_32F_PEDANTIC : CUBLAS_COMPUTE_32F;
    const MeasuredCall product = [&](StageRecorder*, void* stream) {
      cublasSetStream(handle_, static_cast<cudaStream_t>(stream));
      cublasSetWorkspace(handle_, workspace_.data(), 64 << 20);  // setting a stream forgets it
      const cublasStatus_t status =
          cublasGemmEx(handle_, CUBLAS_OP_T, CUBLAS_OP_N, n, n, n, &one, a.data(), type, n,
                       b.data(), type, n, &zero, c.data(), type, n, compute, CUBLAS_GEMM_DEFAULT);
      if (status != CUBLAS_STATUS_SUCCESS) {
        fail(ErrorCode::kDevice, "cublasGemmEx: {}", cublasGetStatusString(status));
      }
    };
    // The median: the first few run at clocks that the power limit does not let stand.
    const double seconds = sorted_runs(kProducts, product)[kProducts / 2];
    return 2 * static_cast<double>(size) * n / seconds;
  }

 private:
  cublasHandle_t handle_ = nullptr;
  DeviceBuffer workspace_;
};

}  // namespace

Limits measure_gpu_limits() {
  Blas blas;
  return {.bandwidth = copy_bytes_per_s(),
          .read_bandwidth = read_bytes_per_s(),
          .flops_f32 = blas.flops(CUDA_R_32F, 4096),
          .flops_bf16 = blas.flops(CUDA_R_16BF, 8192),
          .flops_f16 = blas.flops(CUDA_R_16F, 8192),
          .tensor_router = true};
}

}  // namespace switchyard::bench

// The roofs of the current GPU: what a large copy, large reads and large dense products reach.
#include "bench/measure/device_limits.hpp"

#include <cublas_v2.h>

#include <algorithm>
#include <random>
#include <vector>

#include "bench/measure/device_clock.hpp"
#include "bench/measure/device_read.hpp"
#include "core/check.hpp"
#include "core/gpu/device_buffer.hpp"

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

/// C = A^T B by cuBLAS, all [n, n], random.
class DenseProduct {
 public:
  DenseProduct(cudaDataType type, int n) : type_(type), n_(n) {
    if (cublasCreate(&handle_) != CUBLAS_STATUS_SUCCESS) {
      fail(ErrorCode::kDevice, "cublasCreate failed");
    }
    workspace_.reserve(kWorkspaceBytes);  // none may be taken while a graph is captured
    const std::int64_t size = std::int64_t{n} * n;
    for (DeviceBuffer* const matrix : {&a_, &b_, &c_}) fill(*matrix, type, size);
  }
  ~DenseProduct() { cublasDestroy(handle_); }
  DenseProduct(const DenseProduct&) = delete;
  DenseProduct& operator=(const DenseProduct&) = delete;

  void enqueue(cudaStream_t stream) {
    const float one = 1;
    const float zero = 0;
    const cublasComputeType_t compute =
        type_ == CUDA_R_32F ? CUBLAS_COMPUTE_32F_PEDANTIC : CUBLAS_COMPUTE_32F;
    cublasSetStream(handle_, stream);
    cublasSetWorkspace(handle_, workspace_.data(), kWorkspaceBytes);  // the stream forgets it
    const cublasStatus_t status = cublasGemmEx(handle_, CUBLAS_OP_T, CUBLAS_OP_N, n_, n_, n_, &one,
                                               a_.data(), type_, n_, b_.data(), type_, n_, &zero,
                                               c_.data(), type_, n_, compute, CUBLAS_GEMM_DEFAULT);
    if (status != CUBLAS_STATUS_SUCCESS) {
      fail(ErrorCode::kDevice, "cublasGemmEx: {}", cublasGetStatusString(status));
    }
  }
  [[nodiscard]] double flop() const { return 2.0 * n_ * n_ * n_; }

 private:
  static constexpr std::int64_t kWorkspaceBytes = 64 << 20;
  const cudaDataType type_;
  const int n_;
  cublasHandle_t handle_ = nullptr;
  DeviceBuffer a_, b_, c_, workspace_;
};

double dense_flops(cudaDataType type, int n) {
  DenseProduct product(type, n);
  // The median: the first few run at clocks that the power limit does not let stand.
  const std::vector<double> seconds = sorted_runs(kProducts, [&](StageRecorder*, void* stream) {
    product.enqueue(static_cast<cudaStream_t>(stream));
  });
  return product.flop() / seconds[kProducts / 2];
}

class CublasBeside final : public DenseBeside {
 public:
  explicit CublasBeside(DType dtype)
      : product_(dtype == DType::kF32   ? CUDA_R_32F
                 : dtype == DType::kF16 ? CUDA_R_16F
                                        : CUDA_R_16BF,
                 8192),
        clock_(make_device_clock(times_, nullptr)) {}

  void run() override {
    us_.push_back(clock_->run(this, [this](StageRecorder*, void* stream) {
      product_.enqueue(static_cast<cudaStream_t>(stream));
    }));
  }
  [[nodiscard]] double flops() const override {
    require(!us_.empty(), "no dense product has run");
    return product_.flop() / (statistics(us_).median * 1e-6);
  }

 private:
  DenseProduct product_;
  StageTimes times_;
  std::unique_ptr<RunClock> clock_;
  std::vector<double> us_;
};

}  // namespace

Limits measure_gpu_limits() {
  return {.bandwidth = copy_bytes_per_s(),
          .read_bandwidth = read_bytes_per_s(),
          .flops_f32 = dense_flops(CUDA_R_32F, 4096),
          .flops_bf16 = dense_flops(CUDA_R_16BF, 8192),
          .flops_f16 = dense_flops(CUDA_R_16F, 8192),
          .tensor_router = true};
}

std::unique_ptr<DenseBeside> make_cublas_beside(DType dtype) {
  return std::make_unique<CublasBeside>(dtype);
}

}  // namespace switchyard::bench

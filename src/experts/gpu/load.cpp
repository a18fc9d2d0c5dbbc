// Places the weights of a rank's experts on the GPU: one expert's matrix at a time goes through
// host memory, so no second copy of all ever exists.

#include <cuda_runtime_api.h>

#include <vector>

#include "core/gpu/cuda_check.hpp"
#include "core/row_ops.hpp"
#include "core/shape_check.hpp"
#include "experts/gpu/weights.hpp"
#include "experts/implementations.hpp"

namespace switchyard {
namespace {

class Loader {
 public:
  Loader(const LoadExpertsArgs& args, const CudaExpertWeights& weights)
      : args_(args), weights_(weights) {}

  void load(std::int32_t local) {
    const ExpertConfig& config = args_.config;
    const std::int64_t element = size_of(args_.dtype);
    const std::int64_t half = config.inner * config.hidden * element;
    std::byte* first = weights_.w13() + local * weights_.first_rows() * config.hidden * element;
    load_matrix(local, ExpertPart::kGate, config.inner, half, first);
    if (config.gated) load_matrix(local, ExpertPart::kUp, config.inner, half, first + half);
    load_matrix(local, ExpertPart::kDown, config.hidden, half, weights_.w2() + local * half);
    if (!config.bias) return;
    float* bias = weights_.b13() + local * weights_.first_rows();
    load_bias(local, ExpertPart::kGate, config.inner, bias);
    if (config.gated) load_bias(local, ExpertPart::kUp, config.inner, bias + config.inner);
    load_bias(local, ExpertPart::kDown, config.hidden, weights_.b2() + local * config.hidden);
  }

 private:
  void load_matrix(std::int32_t local, ExpertPart part, std::int64_t rows, std::int64_t bytes,
                   std::byte* to) {
    host_.resize(static_cast<std::size_t>(bytes));
    args_.source->read(args_.first_expert + local, part, 0, rows, args_.dtype, host_.data());
    SWITCHYARD_CUDA(
        cudaMemcpy(to, host_.data(), static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice));
  }
  void load_bias(std::int32_t local, ExpertPart part, std::int64_t count, float* to) {
    bias_.resize(static_cast<std::size_t>(count));
    args_.source->read_bias(args_.first_expert + local, part, bias_.data());
    SWITCHYARD_CUDA(
        cudaMemcpy(to, bias_.data(), bias_.size() * sizeof(float), cudaMemcpyHostToDevice));
  }

  const LoadExpertsArgs& args_;
  const CudaExpertWeights& weights_;
  std::vector<std::byte> host_;
  std::vector<float> bias_;
};

}  // namespace

DeviceMemory::DeviceMemory(std::int64_t bytes) {
  if (bytes == 0) return;
  void* data = nullptr;
  const cudaError_t status = cudaMalloc(&data, static_cast<std::size_t>(bytes));
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    fail(ErrorCode::kOutOfMemory, "the GPU has no room for {} MB of expert weights",
         bytes / 1000000);
  }
  SWITCHYARD_CUDA(status);
  data_ = static_cast<std::byte*>(data);
}

DeviceMemory::~DeviceMemory() {
  if (owned_) cudaFree(data_);
}

CudaExpertWeights::CudaExpertWeights(const LoadExpertsArgs& args)
    : ExpertWeights(args.config, args.dtype, args.format, Backend::kCuda, args.first_expert,
                    args.num_local),
      w13_(args.num_local * first_rows() * args.config.hidden * size_of(args.dtype)),
      w2_(args.num_local * args.config.inner * args.config.hidden * size_of(args.dtype)),
      b13_(args.config.bias ? args.num_local * first_rows() * 4 : 0),
      b2_(args.config.bias ? args.num_local * args.config.hidden * 4 : 0) {}

CudaExpertWeights::CudaExpertWeights(const ExpertConfig& config, DType dtype,
                                     const WeightsOnDevice& weights)
    : ExpertWeights(config, dtype, WeightFormat::kExact, Backend::kCuda, 0, config.num_experts),
      w13_(weights.w13),
      w2_(weights.w2),
      b13_(static_cast<const void*>(weights.b13)),
      b2_(static_cast<const void*>(weights.b2)) {}

void CudaExpertWeights::read(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                             std::int64_t num_rows, DType type, void* out) const {
  const std::int64_t local = local_of(expert, part, first_row, num_rows);
  require_float("the type that weights are read in", type);
  const bool down = part == ExpertPart::kDown;
  const std::int64_t cols = down ? config().inner : config().hidden;
  const std::int64_t row = (down ? local * config().hidden : local * first_rows()) +
                           (part == ExpertPart::kUp ? config().inner : 0) + first_row;
  std::vector<std::byte> host(static_cast<std::size_t>(num_rows * cols * size_of(dtype())));
  SWITCHYARD_CUDA(cudaMemcpy(host.data(), (down ? w2() : w13()) + row * cols * size_of(dtype()),
                             host.size(), cudaMemcpyDeviceToHost));
  row_ops::convert(dtype(), host.data(), type, static_cast<std::byte*>(out), num_rows * cols);
}

void CudaExpertWeights::read_bias(std::int32_t expert, ExpertPart part, float* out) const {
  const std::int64_t local = local_of(expert, part, 0, 0);
  require(config().bias, "the experts have no biases");
  const bool down = part == ExpertPart::kDown;
  const std::int64_t count = down ? config().hidden : config().inner;
  const float* from =
      down ? b2() + local * config().hidden
           : b13() + local * first_rows() + (part == ExpertPart::kUp ? config().inner : 0);
  SWITCHYARD_CUDA(cudaMemcpy(out, from, static_cast<std::size_t>(count) * sizeof(float),
                             cudaMemcpyDeviceToHost));
}

std::unique_ptr<ExpertWeights> load_experts_cuda(const LoadExpertsArgs& args) {
  if (args.format != WeightFormat::kExact) {
    fail(ErrorCode::kUnsupported, "{} weights on cuda: it computes with exact ones",
         to_string(args.format));
  }
  auto weights = std::make_unique<CudaExpertWeights>(args);
  Loader loader(args, *weights);
  for (std::int32_t local = 0; local < args.num_local; ++local) {
    loader.load(local);
    if (args.progress) args.progress(static_cast<double>(local + 1) / args.num_local);
  }
  return weights;
}

}  // namespace switchyard

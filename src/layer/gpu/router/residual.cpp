#include "layer/gpu/router/residual.hpp"

#include "core/gpu/cuda_device.hpp"
#include "core/gpu/cuda_memory.hpp"
#include "experts/raw_matrix.hpp"
#include "layer/gpu/router/network_kernels.hpp"
#include "route/implementations.hpp"
#include "switchyard/backward.hpp"
#include "switchyard/device.hpp"

namespace switchyard {

void CudaGatingResidual::reserve(std::int64_t num_tokens) {
  if (matrix_.empty()) return;
  (void)copy_of_matrix_.matrix<float>(columns_, padded_);
  (void)previous_.matrix<float>(num_tokens, padded_);
  (void)part_.matrix<float>(num_tokens, columns_);
}

void CudaGatingResidual::reserve_backward(std::int64_t num_tokens) {
  if (matrix_.empty()) return;
  (void)dprevious_.matrix<float>(num_tokens, padded_);
  (void)dmatrix_.matrix<float>(columns_, padded_);
}

std::int64_t CudaGatingResidual::workspace_bytes(std::int64_t num_tokens) const {
  return matrix_.empty() ? 0 : router_gemm_workspace_bytes(num_tokens, columns_, padded_);
}

std::int64_t CudaGatingResidual::backward_workspace_bytes(std::int64_t num_tokens) const {
  return matrix_.empty() ? 0 : router_gemm_backward_workspace_bytes(num_tokens, columns_, padded_);
}

ConstRawMatrix CudaGatingResidual::padded(Matrix<const float> from, DeviceBuffer& memory,
                                          cudaStream_t stream) const {
  const std::int64_t rows = from.shape[0];
  const bool as_it_lies =
      padded_ == columns_ && is_aligned_16(from.data) && (rows == 0 || is_on_device(from.data));
  if (as_it_lies) {
    return raw(from);
  }
  const RawMatrix copy = memory.matrix(DType::kF32, rows, padded_);
  if (rows == 0) return copy;
  const auto row_bytes = static_cast<std::size_t>(4 * columns_);
  const auto stride = static_cast<std::size_t>(4 * padded_);
  if (stride > row_bytes) {
    SWITCHYARD_CUDA(cudaMemset2DAsync(copy.data + row_bytes, stride, 0, stride - row_bytes,
                                      static_cast<std::size_t>(rows), stream));
  }
  SWITCHYARD_CUDA(cudaMemcpy2DAsync(copy.data, stride, from.data, row_bytes, row_bytes,
                                    static_cast<std::size_t>(rows), cudaMemcpyDefault, stream));
  return copy;
}

ConstRawMatrix CudaGatingResidual::matrix(cudaStream_t stream) {
  return padded({matrix_.vector().data, {columns_, columns_}}, copy_of_matrix_, stream);
}

void CudaGatingResidual::add(Matrix<const float> previous, Matrix<float> logits,
                             const Execution& execution) {
  auto* const stream = static_cast<cudaStream_t>(execution.stream);
  const Matrix<float> part = part_.matrix<float>(logits.shape[0], columns_);
  const ConstRawMatrix from = padded(previous, previous_, stream);
  const double flops = 2 * static_cast<double>(logits.size() * columns_);
  const ScopedStage stage(execution, "router_gemm", {.flops = flops, .flops_executed = flops});
  router_gemm({.tokens = from,
               .gate = matrix(stream),
               .gate_is_fresh = true,
               .gate_maps = &maps_,
               .logits = part,
               .execution = execution});
  add_on_gpu(part, logits, stream);
}

void CudaGatingResidual::backward(Matrix<const float> previous, Matrix<const float> dlogits,
                                  Matrix<float> dprevious, Vector<float> dresidual, bool accumulate,
                                  const Execution& execution) {
  auto* const stream = static_cast<cudaStream_t>(execution.stream);
  const std::int64_t rows = dlogits.shape[0];
  Matrix<float> dtokens{};
  if (dprevious.data != nullptr) dtokens = dprevious_.matrix<float>(rows, padded_);
  Matrix<float> dmatrix{};
  if (dresidual.data != nullptr) dmatrix = dmatrix_.matrix<float>(columns_, padded_);
  router_gemm_backward({.tokens = padded(previous, previous_, stream),
                        .gate = matrix(stream),
                        .dlogits = dlogits,
                        .dtokens = dtokens,
                        .dgate = dmatrix.data == nullptr
                                     ? RawMatrix{}
                                     : RawMatrix{reinterpret_cast<std::byte*>(dmatrix.data),
                                                 DType::kF32, columns_, padded_},
                        .execution = execution});
  if (dtokens.data != nullptr) take_columns_on_gpu(dtokens, dprevious, false, stream);
  if (dmatrix.data == nullptr) return;
  take_columns_on_gpu(dmatrix, {dresidual.data, {columns_, columns_}}, accumulate, stream);
}

}  // namespace switchyard

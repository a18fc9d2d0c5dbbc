#pragma once

#include "core/gpu/device_buffer.hpp"
#include "core/gpu/tensor_map.hpp"
#include "switchyard/execution.hpp"
#include "switchyard/parameter.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

/// RouterConfig::gating_residual on a GPU: R times the logits of the layer before, by router_gemm,
/// enqueued. Rows of another length than a multiple of 8 are copied to such a length first.
class CudaGatingResidual {
 public:
  /// @param matrix  [E, E] f32 on the device, or none: then nothing is called.
  CudaGatingResidual(std::int64_t num_logits, Parameter matrix)
      : columns_(num_logits), padded_((num_logits + 7) / 8 * 8), matrix_(std::move(matrix)) {}

  void reserve(std::int64_t num_tokens);
  void reserve_backward(std::int64_t num_tokens);
  /// Bytes of Execution::workspace: of add(), and of backward().
  [[nodiscard]] std::int64_t workspace_bytes(std::int64_t num_tokens) const;
  [[nodiscard]] std::int64_t backward_workspace_bytes(std::int64_t num_tokens) const;

  /// logits [T, E] += previous [T, E] R^T.
  void add(Matrix<const float> previous, Matrix<float> logits, const Execution& execution);
  /// dprevious [T, E] = dlogits R; dresidual [E * E] = dlogits^T previous, or added to; either may
  /// be empty.
  void backward(Matrix<const float> previous, Matrix<const float> dlogits, Matrix<float> dprevious,
                Vector<float> dresidual, bool accumulate, const Execution& execution);

 private:
  /// [rows, padded_] with zeros behind the columns, or `from` itself where that can be read as it
  /// lies.
  [[nodiscard]] ConstRawMatrix padded(Matrix<const float> from, DeviceBuffer& memory,
                                      cudaStream_t stream) const;
  [[nodiscard]] ConstRawMatrix matrix(cudaStream_t stream);

  std::int64_t columns_, padded_;
  Parameter matrix_;
  TensorMaps maps_;
  DeviceBuffer copy_of_matrix_, previous_, part_, dprevious_, dmatrix_;
};

}  // namespace switchyard

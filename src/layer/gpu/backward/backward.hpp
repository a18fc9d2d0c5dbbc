#pragma once

#include "layer/gpu/backward/kernels.hpp"
#include "layer/gpu/stages.hpp"
#include "layer/saved_forward.hpp"

namespace switchyard {

/// The way back through a layer on one GPU: its stages in order, in memory that is made once.
class CudaLayerBackward {
 public:
  /// All memory that calls of so many tokens need.
  void reserve(std::int64_t num_tokens, CudaStages& stages);
  /// @param x  [T, H] what the experts were given: tokens after the wire.
  void run(const BackwardArgs& args, const SavedForward::State& saved, ConstRawMatrix x,
           CudaStages& stages);

 private:
  struct Call {
    const BackwardArgs& args;
    const SavedForward::State& saved;
    CudaStages& stages;
    ConstRawMatrix dout{};
  };

  [[nodiscard]] ConstRawMatrix to_compute(const BackwardArgs& args, CudaStages& stages);
  void run_experts(const Call& call, ConstRawMatrix x, bool to_router);
  void run_router(const Call& call, Matrix<float> dtokens);
  void add_up(const Call& call, const TokenGradientParts& parts);
  [[nodiscard]] Matrix<float> weights_of_choice(const Call& call);

  std::int64_t reserved_tokens_ = -1;
  DeviceBuffer workspace_, dout_, sums_, row_weight_, dx_rows_, ones_, dweight_, dlogits_, router_,
      shared_, shared_dlogit_;
};

}  // namespace switchyard

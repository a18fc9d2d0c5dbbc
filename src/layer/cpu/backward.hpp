#pragma once

#include "layer/cpu/buffers.hpp"
#include "layer/cpu/router.hpp"
#include "layer/cpu/shared_experts.hpp"
#include "layer/saved_forward.hpp"
#include "switchyard/combine.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {

/// What a layer has at hand for one way back.
struct LayerBackwardCall {
  const BackwardArgs* args = nullptr;
  const SavedForward::State* saved = nullptr;
  ConstRawMatrix x{};  ///< [T, H] what the experts were given: tokens after the wire.
  PlanView plan{};     ///< The forward's.
  const ExpertWeights* experts = nullptr;
  const CpuRouter* router = nullptr;
  SharedExperts* shared = nullptr;  ///< Or null.
  Subtree subtree{};
  Execution execution{};
};

/// The stages of a layer on one CPU backwards, with buffers that are kept from call to call.
class LayerBackward {
 public:
  void run(const LayerBackwardCall& call);

 private:
  void run_experts(const LayerBackwardCall& call, ConstRawMatrix dout, bool to_router);
  void run_router(const LayerBackwardCall& call, Matrix<float> dtokens);
  void add_up(const LayerBackwardCall& call, Matrix<const float> rest);
  Matrix<float> weights_of_choice(const LayerBackwardCall& call);

  RawBuffer dout_, sums_;
  ArrayBuffer<float> row_weight_, dx_rows_, ones_, dweight_, dlogits_, router_, shared_;
};

}  // namespace switchyard

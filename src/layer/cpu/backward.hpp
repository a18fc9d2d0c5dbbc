#pragma once

#include "comm/host/gradient_exchange.hpp"
#include "layer/cpu/buffers.hpp"
#include "layer/cpu/expert_tokens.hpp"
#include "layer/cpu/replicated_gradients.hpp"
#include "layer/cpu/router.hpp"
#include "layer/cpu/shared_experts.hpp"
#include "layer/cpu/zero_computation.hpp"
#include "layer/saved_forward.hpp"
#include "switchyard/combine.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {

/// What a forward has kept of its own tokens' routing, as chosen.
inline Assignments routing_of(const SavedForward::State& saved) {
  return {.x = saved.tokens, .expert = saved.expert, .weight = saved.weight, .kept = saved.kept};
}

/// What a layer has at hand for one way back.
struct LayerBackwardCall {
  const BackwardArgs* args = nullptr;
  const SavedForward::State* saved = nullptr;
  ConstRawMatrix x{};  ///< [N, H] what this rank's experts were given: tokens after the wire.
  PlanView plan{};     ///< The forward's, of x
  Matrix<const std::int32_t> expert{};  ///< by these [N, K].
  Assignments sent{};                   ///< This rank's tokens with what they were sent by,
  bool weight_on_input = false;         ///< their weights where they were not on the input.
  const ExpertWeights* experts = nullptr;
  CpuRouter* router = nullptr;
  CpuZeroComputation* zero_computation = nullptr;  ///< Of `sent`, or null: there are none.
  SharedExperts* shared = nullptr;                 ///< Or null.
  Subtree subtree{};
  GradientExchange* ranks = nullptr;  ///< Or null: one rank, whose tokens are x.
  const LossConfig* losses = nullptr;
  Execution execution{};
};

/// The stages of a layer on one CPU backwards, with buffers that are kept from call to call.
class LayerBackward {
 public:
  void run(const LayerBackwardCall& call);

 private:
  /// What this rank's tokens, its parameters, and others' tokens need.
  struct Wanted {
    bool tokens = false;   ///< dtokens here,
    bool router = false;   ///< the router's part of it or the router's gradients here,
    bool choice = false;   ///< the gradients of the tokens' weights here,
    bool rows = false;     ///< dx of the experts' rows,
    bool weights = false;  ///< and of the weights that their outputs had.
  };
  [[nodiscard]] static Wanted wanted_of(const LayerBackwardCall& call);
  ConstRawMatrix send(const LayerBackwardCall& call, ConstRawMatrix dout, Wanted& wanted);
  void sum_counts(const LayerBackwardCall& call);
  void run_experts(const LayerBackwardCall& call, ConstRawMatrix dout, const Wanted& wanted);
  GradientsAtHome bring_home(const LayerBackwardCall& call, const Wanted& wanted,
                             const Wanted& here);
  void run_router(const LayerBackwardCall& call, Matrix<float> dtokens);
  void run_noise(const LayerBackwardCall& call, Matrix<const float> dlogits, Matrix<float> dtokens);
  Matrix<float> run_shared(const LayerBackwardCall& call, ConstRawMatrix dout);
  Matrix<float> run_zero_computation(const LayerBackwardCall& call, ConstRawMatrix dout,
                                     const Wanted& here);
  Matrix<float> run_weighted(const LayerBackwardCall& call, const GradientsAtHome& home,
                             const Wanted& here);
  RawMatrix sum_rows(const LayerBackwardCall& call, RawMatrix sums);
  void add_up(const LayerBackwardCall& call, const GradientsAtHome& home, Matrix<const float> rest,
              RawMatrix out);
  Matrix<float> weights_of_choice(const LayerBackwardCall& call);

  BackwardArgs here_{};  ///< The call's, with a rank's own parts of what ranks add up.
  ReplicatedGradients replicated_;
  std::vector<std::int64_t> counts_;  ///< [E] of all ranks, for losses.
  RawBuffer dout_, sums_;
  ArrayBuffer<float> row_weight_, dx_rows_, ones_, dweight_, travelling_, dlogits_, router_,
      noise_dlogits_, noise_, shared_, zero_computation_, weighted_;
};

}  // namespace switchyard

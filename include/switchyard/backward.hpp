#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "switchyard/execution.hpp"
#include "switchyard/experts.hpp"
#include "switchyard/plan.hpp"
#include "switchyard/route.hpp"
#include "switchyard/routing/losses.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

// The way back through the layer, stage by stage: from dout = dL/dout to the gradients of all that
// the forward read. A gradient that nobody gives memory for is not computed. `accumulate` adds to
// what is there, once, in f32; else it is written. Each sum runs in a fixed order: the same bits
// for any number of threads, and whether the pre-activation was kept or is made again. Rounding to
// 16 bits, on the wire too, passes a gradient as it is.
// Source: what is kept, and the gradient of a row's weight without the expert's output: SonicMoE
// (arXiv:2512.14080) section 3.

/// What a forward leaves in memory for its backward.
enum class Recompute : std::uint8_t {
  kNone,             ///< Pre-activations are kept: c * 2I bytes a row, c those of the compute type.
  kActivationInput,  ///< They are made again from the tokens: one more first product.
};

/// "none", "activation_input".
[[nodiscard]] const char* to_string(Recompute recompute) noexcept;

/// What one forward of a layer leaves for the backward that belongs to it. The caller's: made once
/// and used step after step, one for each forward that is not yet gone back through. It grows to
/// the largest call and keeps its memory.
/// Kept, for T tokens of H, K experts each, S rows of the layout, c bytes of the compute type:
/// tokens c*T*H (none where ForwardArgs::tokens_stay spares the copy), logits 4*T*E, routing 8*T*K
/// (with a capacity 9*T*K), pre-activations c*S*2I (plain c*S*I) unless they are made again, and
/// c*T*2I for shared experts of width I. Over R ranks also the N tokens that came for this rank's
/// experts, N*(c*H + 8*K) + 8*R*R. On CUDA S is what the layout has room for, as only the device
/// knows how many rows there are, and over ranks it is R*max_tokens*c*H + 8*R*R that came. Losses
/// of G groups of tokens: G*(28*E + 8*D) + 72. A gating residual: 4*T*E, the logits of the layer
/// before. A chain keeps as much for each iteration, 8*G*E + 56 for what their losses() and
/// counts() come to, and has no logits() here.
class SavedForward {
 public:
  explicit SavedForward(Recompute recompute = Recompute::kNone);
  ~SavedForward();
  SavedForward(SavedForward&&) noexcept;
  SavedForward& operator=(SavedForward&&) noexcept;

  [[nodiscard]] Recompute recompute() const;
  /// Whether a forward has filled it that no backward has used.
  [[nodiscard]] bool ready() const;
  /// Bytes that the last forward has kept, by the formula above.
  [[nodiscard]] std::int64_t bytes() const;
  /// [T, E] of the last forward, where the layer is and once its stream is so far: what auxiliary
  /// losses start from. Valid until the next forward; empty where the routing was given, or the
  /// router has no logits.
  [[nodiscard]] Matrix<const float> logits() const;
  /// [kLossValues] LossValues of the last forward, where and when logits() are; empty where
  /// LayerOptions::losses has none, or the routing was given. With LossScope::kGlobal by the counts
  /// of this call, until a backward has had those of all.
  [[nodiscard]] Vector<const double> losses() const;
  /// [G, E] assignments before any was dropped, where there are losses: what LossScope::kGlobal
  /// wants the sum of.
  [[nodiscard]] Matrix<const std::int64_t> counts() const;

  struct State;  ///< The library's.
  [[nodiscard]] State& state() { return *state_; }

 private:
  std::unique_ptr<State> state_;
};

/// Gradients of experts' parameters, for the El experts of this rank, from the tokens of all ranks.
/// What is empty is not wanted.
struct ExpertGradients {
  RawMatrix w13{};      ///< [El * 2I, H]: each expert's gate rows, then its up rows; plain
                        ///< [El * I, H]. f32, or the compute type (one rounding).
  RawMatrix w2{};       ///< [El * H, I], likewise.
  Matrix<float> b13{};  ///< [El, 2I]; plain [El, I].
  Matrix<float> b2{};   ///< [El, H].
};

/// What MoeLayer::backward() reads and writes. E of dlogits, dgate and drouter_bias is
/// RouterConfig::num_logits(), of dgate and drouter_bias times num_gates(); a chain takes no
/// dlogits and has no dweight. Over ranks dgate, dnoise_gate, drouter_bias, drouter_network,
/// dconstant_experts, dgating_residual and what is of shared experts are sums over all ranks, in
/// f32 by a fixed tree, with the same bits on each: all ranks ask for the same of them.
struct BackwardArgs {
  SavedForward* saved = nullptr;  ///< Of a forward of this layer; used up.
  ConstRawMatrix dout{};          ///< [T, H] f32, bf16 or f16; converted once to the compute type.
  /// [T, E] dL/dlogits of auxiliary losses, added to that of the choice; or empty. Refused where
  /// the routing was given.
  Matrix<const float> dlogits{};
  /// LayerOptions::losses of LossScope::kGlobal: [E] SavedForward::counts() of all ranks and
  /// accumulation steps, where the layer is; over ranks empty: of all ranks. Else empty.
  Vector<const std::int64_t> loss_counts{};
  double loss_scale = 1;         ///< Of the gradient of LayerOptions::losses: that of dout.
  RawMatrix dtokens{};           ///< out [T, H] f32, bf16 or f16: one rounding.
  Matrix<float> dweight{};       ///< out [T, K] of the experts' weights; 0 where unused or dropped.
  RawMatrix dgate{};             ///< out [E, H] f32, bf16 or f16; of a network [E, D].
  RawMatrix dnoise_gate{};       ///< out [E, H] likewise, where the layer has one.
  Vector<float> drouter_bias{};  ///< out [E].
  Vector<float> drouter_network{};    ///< out [RouterNetwork::size(H)].
  Vector<float> dconstant_experts{};  ///< out [C * 3 * H] as LayerModel::constant_experts.
  Vector<float> dgating_residual{};   ///< out [E * E].
  /// out [T, E]: what the layer before takes as its dlogits. Of a gating residual.
  Matrix<float> dprevious_logits{};
  ExpertGradients experts{};     ///< out.
  ExpertGradients shared{};      ///< out; as one expert.
  Vector<float> dshared_gate{};  ///< out [H].
  /// Of the parameters' gradients; dtokens, dweight and dprevious_logits are written.
  bool accumulate = false;
  StageRecorder* recorder = nullptr;
  void* stream = nullptr;  ///< CUDA.
};

struct RouterGemmBackwardArgs {
  ConstRawMatrix tokens{};        ///< [T, H] f32, bf16 or f16.
  ConstRawMatrix gate{};          ///< [E, H] f32, bf16 or f16.
  Matrix<const float> dlogits{};  ///< [T, E].
  Matrix<float> dtokens{};        ///< out [T, H], or empty.
  RawMatrix dgate{};              ///< out [E, H] f32, bf16 or f16, or empty.
  Vector<float> dbias{};          ///< out [E], or empty.
  bool accumulate = false;        ///< Of dgate and dbias.
  Execution execution{};
};

/// dtokens = dlogits gate, dgate = dlogits^T tokens, dbias = sums of dlogits; products and sums in
/// fp32, in ascending e, and in ascending t.
/// @throws Error{kInvalidArgument}: shapes disagree; {kUnsupported}: nobody accepts it.
/// Cost: 4*T*E*H operations.
void router_gemm_backward(const RouterGemmBackwardArgs& args);

struct RouteBackwardArgs {
  Matrix<const float> logits{};         ///< [T, E].
  Matrix<const std::int32_t> expert{};  ///< [T, K] as route() has chosen.
  Matrix<const float> dweight{};        ///< [T, K]; 0 for what was dropped.
  RouterConfig config{};
  LossPrices losses{};      ///< Of auxiliary losses, whose gradient is added; or none.
  RouteRequest request{};   ///< The forward's, where the rule draws.
  Matrix<float> dlogits{};  ///< out [T, E].
  bool accumulate = false;  ///< Add to dlogits: those of losses of the caller's are there.
  Execution execution{};
};

/// Through the rule that made the weights of the chosen experts. The choice itself is a constant:
/// groups and selection bias get nothing. With p the softmax over all experts and q that over the
/// chosen ones (renormalised, or top-k softmax), s the sigmoids, g = scale * dweight:
///   softmax               dlogits_e = p_e (g_e - sum_k g_k p_k), g_e = 0 where e is not chosen
///   q                     dlogits_e = q_e (g_e - sum_k g_k q_k) where e is chosen
///   sigmoid               dlogits_e = g_e s_e (1 - s_e)
///   sigmoid renormalised  dlogits_e = w_e (1 - s_e) (g_e - sum_k g_k w_k), w_e = s_e / sum_k s_k
///   sparse-mixer          choice by choice: dlogits_e -= g_k w_k n_ke, at the choice + g_k w_k;
///   n_k
///                         is the softmax over it and those near it, w_k its own share there (CPU).
///                         Renormalised: of (g_k - sum_j g_j w_j) / sum of the w before
/// Losses, with v_e = score price - entropy price * ln p_e, and q the softmax of the logits:
///   softmax  dlogits_e += p_e (v_e - sum_j v_j p_j) + 2 z q_e logsumexp; sigmoid: times (1 - s_e)
///            but for z.
/// GShard's second expert is made again, for its weight counts where it was left out; top-p and
/// expert choice are as softmax, ReLU passes g where it chose. Rules without logits have none.
/// @throws Error{kInvalidArgument}: shapes disagree, an id outside of [-1, E); {kUnsupported}.
/// Cost: reads 4*T*E + 8*T*K bytes, writes 4*T*E.
void route_backward(const RouteBackwardArgs& args);

struct ExpertsBackwardArgs {
  ConstRawMatrix x{};     ///< [N, H] compute type, gathered by plan.row_token, as the forward's.
  ConstRawMatrix dout{};  ///< [N, H] compute type: the gradient of each token's weighted sum.
  /// [rows of the layout, 2I] (plain [., I]) compute type, as experts() has left it; or empty: made
  /// again from x.
  ConstRawMatrix preactivation{};
  PlanView plan{};  ///< The forward's, in any layout; rows of padding are not touched.
  const ExpertWeights* weights = nullptr;  ///< Exact ones.
  Vector<float> drow_weight{};  ///< out [rows of the layout] gradient of plan.row_weight, or empty.
  /// out [rows of the layout, H], or empty: each row's part of dx. f32, or the compute type: one
  /// rounding, and half of the bytes.
  RawMatrix dx_rows{};
  /// CUDA: room for rows that a call makes on its way, which then need none in the workspace; what
  /// they hold after it is of no use. Empty: in the workspace.
  RawMatrix dpreactivation{};       ///< As preactivation, and may be that: its gradient dz.
  RawMatrix weighted_activation{};  ///< [rows of the layout, I] compute type: w a.
  ExpertGradients gradients{};      ///< out; experts without rows: zeros.
  bool accumulate = false;          ///< Of the gradients.
  /// CUDA: called once drow_weight and dx_rows are enqueued, with the gradients to follow: for what
  /// is to run beside these. Or null.
  const std::function<void()>* rows_enqueued = nullptr;
  Execution execution{};
};

/// Back through the experts and the weighted sum behind them. For a row r of token t with weight w:
/// a' = dout_t W2 (16 bits on Hopper: rounded to the compute type); drow_weight = <a', a> +
/// <dout_t, b2>, a made again from the pre-activation; dz =
/// the activation's gradient for w a', rounded to the compute type; dx_r = dz W13; dW2 = sum of
/// dout_t^T (w a), dW13 = sum of dz^T x_t, in ascending rows of the layout.
/// Reports "experts_backward".
/// @throws Error{kInvalidArgument}: shapes or dtypes disagree, dpreactivation overlaps a part of
///         preactivation, or weighted_activation any of both, weights in another format than exact;
///         {kUnsupported}: nobody accepts it; a CPU takes no room for rows.
/// Cost: 4*(2 or 3)*H*I operations a row (recomputed: + 2*(1 or 2)*H*I); weights of the experts hit
///       are read once (recomputed: gate and up twice), all weights' gradients written once.
void experts_backward(const ExpertsBackwardArgs& args);

}  // namespace switchyard

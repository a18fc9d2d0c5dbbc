#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "switchyard/backward.hpp"
#include "switchyard/execution.hpp"
#include "switchyard/experts.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

// Soft-MoE: no token is given to an expert. Each expert has p slots a group of m tokens; a slot is
// a weighted mean of all tokens of the group, and a token's output one of all slots' outputs:
//   u = x^ phi^^T [m, E*p]      x^, phi^: rows over their length where `normalize`
//   D = softmax of scale * u over the tokens (columns sum to 1), C = the same over the slots (rows)
//   X~ = D^T x,  Y~ = experts(X~), expert e on rows [e*p, (e+1)*p),  y = C Y~
// So every expert has exactly p rows a group: nothing is dropped, and no loss balances anything.
// A token sees the whole group: not causal. Source: Puigcerver et al. 2023 (arXiv:2308.00951)
// section 2.1, normalisation section 2.3.
//
// Causal: groups are consecutive pieces of a sequence, and tokens read the slots of the piece
// before theirs: y_g = C_g Y~_(g-1), with C_g by the tokens' own logits. The first piece of a
// sequence reads none, and its output is 0. A token then depends on itself and on earlier pieces
// alone.

/// Added to the sum of squares under the root of a length, as by the authors' code.
inline constexpr float kSoftMoeEpsilon = 1e-6F;

struct SoftMoeConfig {
  std::int64_t slots = 1;     ///< p of each expert and group; >= 1.
  std::int64_t group = 0;     ///< m, neighbouring tokens; must divide T; 0: all of a sequence.
  std::int64_t sequence = 0;  ///< Tokens of a sequence; must divide T; 0: all of the call.
  bool normalize = true;      ///< Lengths of tokens and of slots' parameters are divided out.
  bool causal = false;        ///< Slots of the group before, in the same sequence.
  float scale = 1.0F;         ///< Of the logits; learned.
};

/// "soft-moe:slots=64,group=128,causal=yes", as parse_router() has it; none: the spelling is of
/// something else. @throws Error{kInvalidArgument} that names the word which is wrong.
[[nodiscard]] std::optional<SoftMoeConfig> parse_soft_moe(std::string_view spelling);

/// What a forward leaves for its backward. The caller's, as SavedForward: it grows to the largest
/// call and keeps its memory, where the experts are; growing while a stream is captured is an
/// error. With S = E*p slots in each of B groups that are read, c bytes of the compute type: tokens
/// c*T*H, logits 4*T*S, slots c*B*S*H, their outputs 4*B*S*H (CUDA: c*B*S*H), and unless made again
/// pre-activations c*B*S*2I (plain c*B*S*I).
class SavedSoftMoe {
 public:
  explicit SavedSoftMoe(Recompute recompute = Recompute::kNone);
  ~SavedSoftMoe();
  SavedSoftMoe(SavedSoftMoe&&) noexcept;
  SavedSoftMoe& operator=(SavedSoftMoe&&) noexcept;

  [[nodiscard]] Recompute recompute() const;
  /// Whether a forward has filled it that no backward has used.
  [[nodiscard]] bool ready() const;
  /// Bytes that the last forward has kept.
  [[nodiscard]] std::int64_t bytes() const;

  struct State;  ///< The library's.
  [[nodiscard]] State& state() { return *state_; }

 private:
  std::unique_ptr<State> state_;
};

struct SoftMoeArgs {
  ConstRawMatrix x{};                      ///< [T, H] of the weights' compute type.
  ConstRawMatrix phi{};                    ///< [E*p, H] f32, bf16 or f16: a row a slot.
  const ExpertWeights* weights = nullptr;  ///< All E experts.
  SoftMoeConfig config{};
  RawMatrix out{};  ///< [T, H] f32, bf16 or f16: one rounding. Not over x.
  /// out [T, E*p], or empty: D, 0 for groups whose slots nobody reads, and C, 0 where a token reads
  /// none.
  Matrix<float> dispatch{};
  Matrix<float> combine{};
  SavedSoftMoe* saved = nullptr;  ///< Filled for soft_moe_backward(); or null.
  Execution execution{};
};

/// The forward. Sums run in fp32 over ascending h, tokens and slots: the same bits for any number
/// of threads. Slots are rounded to the compute type, their outputs are not. Reports "soft_logits",
/// "soft_dispatch", the experts' stages and "soft_combine".
/// CUDA: the call only enqueues, and may be captured. Sums run in fp32 in an order of their own,
/// which follows from the sizes: the same bits in every run on a kind of GPU. The experts write
/// rows of the compute type, so the slots' outputs are rounded to it too. With rows in bf16, slots
/// that 8 divides and cuBLASLt there, D and C (and gradients of logits) are rounded to bf16 where
/// they are multiplied: 2^-9 of each. A logit that is not finite goes into Execution::status
/// (nan_logit, the lowest token and slot), and its group has outputs that are not numbers. hidden
/// is a multiple of 8; pointers are to 16 bytes.
/// @throws Error{kInvalidArgument}: shapes disagree, a group or sequence does not divide (both are
///         named), on a CPU a logit is not finite (the lowest token and slot), on CUDA the
///         workspace is too small (the bytes needed); {kUnsupported}: nobody accepts it.
/// Cost: 6*T*S*H operations beside those of B*S rows of experts; 4*T*S bytes of logits.
void soft_moe(const SoftMoeArgs& args);

/// What soft_moe() needs as its Execution::workspace for so many tokens: 0 on a CPU; on CUDA device
/// memory from a multiple of 256 bytes on, with whatever it holds, and of no use behind the call.
/// @throws Error{kInvalidArgument} as soft_moe().
[[nodiscard]] std::int64_t soft_moe_workspace_bytes(const ExpertWeights& weights,
                                                    const SoftMoeConfig& config,
                                                    std::int64_t num_tokens);

/// What is empty is not wanted.
struct SoftMoeBackwardArgs {
  SavedSoftMoe* saved = nullptr;           ///< Of a soft_moe(); used up.
  ConstRawMatrix phi{};                    ///< The forward's.
  const ExpertWeights* weights = nullptr;  ///< The forward's; exact ones.
  ConstRawMatrix dout{};                   ///< [T, H] f32, bf16 or f16.
  RawMatrix dx{};                          ///< out [T, H] f32, bf16 or f16.
  RawMatrix dphi{};                        ///< out [E*p, H] f32, bf16 or f16.
  float* dscale = nullptr;                 ///< out; where the experts are.
  ExpertGradients experts{};               ///< out.
  bool accumulate = false;                 ///< Of all but dx.
  Execution execution{};
};

/// The way back through both softmaxes, with G = dL/dC = dy Y~^T and F = dL/dD = x dX~^T:
///   dl = C (G - rows' sums of C G) + D (F - columns' sums of D F),  dscale = sum of dl u
///   dx = lengths' way back of (scale dl phi^) + D dX~,  dphi alike of scale dl^T x^
/// and dX~ by experts_backward() of dY~ = C^T dy, rounded to the compute type.
/// Reports "soft_combine_backward", "experts_backward" and "soft_dispatch_backward".
/// @throws as soft_moe(); {kInvalidArgument} also where nothing was saved, it was used already, or
///         lies on another backend.
/// Cost: 14*T*S*H operations beside those of experts_backward().
void soft_moe_backward(const SoftMoeBackwardArgs& args);

/// As soft_moe_workspace_bytes().
[[nodiscard]] std::int64_t soft_moe_backward_workspace_bytes(const ExpertWeights& weights,
                                                             const SoftMoeConfig& config,
                                                             std::int64_t num_tokens);

}  // namespace switchyard

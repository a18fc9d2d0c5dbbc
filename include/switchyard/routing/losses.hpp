#pragma once

#include <cstdint>

#include "switchyard/assignments.hpp"
#include "switchyard/execution.hpp"
#include "switchyard/route.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

// Auxiliary losses of a router, in three steps. routing_sums() adds up over the tokens what a
// router said of them. router_losses() makes the values of the losses of these sums, and prices:
// dL/dp of each score. route_backward() pays them: it adds the gradient at the logits to that of
// the choice in the same pass. Who chooses is a constant for all of them, so counts pass no
// gradient.
//
// Letters besides those of tensor.hpp: S groups of T/S neighbouring tokens each, which are
// sequences, or one, the batch; n counts of assignments before any is dropped; p the scores of a
// token over all experts, normalised to sum to 1: softmax, or the sigmoids by their sum; D groups
// of E/D neighbouring experts, which are devices.

/// Of what share the balance losses' f_e is. All are equal for K = 1.
enum class BalanceShare : std::uint8_t {
  kAssignments,  ///< n_e / sum of n: the loss is 1 where all is even, for every K. Switch,
                 ///< DeepSeek, Megatron, OLMo-core.
  kTokens,       ///< K times that, n_e / T. Mixtral, OLMoE and Qwen of transformers.
  kFirstChoice,  ///< First choices alone, by their sum. GShard, Tutel, V-MoE.
};

/// Over which tokens f_e and P_e are taken.
enum class LossScope : std::uint8_t {
  kBatch,     ///< All tokens of the call.
  kSequence,  ///< Each sequence by itself; the loss is the mean over sequences. DeepSeek-V3.
  kGlobal,    ///< f of counts that the caller has summed over ranks and accumulation steps
              ///< (arXiv:2501.11873); all else of the tokens of the call.
};

/// "assignments", "tokens", "first-choice"; "batch", "sequence", "global".
[[nodiscard]] const char* to_string(BalanceShare share) noexcept;
[[nodiscard]] const char* to_string(LossScope scope) noexcept;

/// Which auxiliary losses a router has: coefficients, 0 for those it has not. With f_e by `share`,
/// P_e = mean of p_te over the tokens of a group:
///   balance        E sum_e f_e P_e. Shazeer et al.; Fedus et al. 2021 (arXiv:2101.03961)
///   section 2.2 z              mean_t (logsumexp of the logits)^2. ST-MoE (arXiv:2202.08906)
///   equation 5 importance     CV^2 = var / (mean^2 + 1e-10) of I_e = sum_t p_te, var that of all
///   E. Shazeer et
///                  al. 2017 (arXiv:1701.06538) section 4, of scores before the selection as V-MoE
///                  (arXiv:2106.05974) appendix A
///   device         D sum_d (sum f_e of d) (sum P_e of d). DeepSeek-V2 (arXiv:2405.04434) 2.1.3
///   communication  sum_d (D/M times the share of tokens with an expert on d) (sum P_e of d), M
///                  devices_per_token. DeepSeek-V2, likewise
///   entropy        mean_t of -sum_e p_te ln p_te. Dynamic routing (arXiv:2403.07652) section 3.3
/// balance, device (by assignments) and communication are 1 where all is even, importance is 0.
/// With `zero_computation` experts balance is E sum_e eta_e f_e P_e, eta_e = tau of these and 1 of
/// the others: the heterogeneous loss of MoE++ (arXiv:2410.07348) section 3.3, times E / K.
struct LossConfig {
  double balance = 0;
  double z = 0;
  double importance = 0;
  double device = 0;
  double communication = 0;
  double entropy = 0;
  LossScope scope = LossScope::kBatch;              ///< Of balance, device and communication.
  BalanceShare share = BalanceShare::kAssignments;  ///< Likewise.
  std::int64_t sequence_length = 0;  ///< Tokens of a sequence, for kSequence; T is a multiple.
  std::int32_t devices = 1;          ///< D; divides E.
  std::int32_t devices_per_token =
      1;  ///< M, the most devices that a token is sent to; 1 <= M <= D.
  /// How many of the E, the last ones, count `tau` in `balance`, in (0, 1]. A layer takes them from
  /// RouterConfig::zero_computation, where that has a tau. CPU.
  std::int32_t zero_computation = 0;
  double tau = 1;

  /// Whether there is any.
  [[nodiscard]] bool any() const {
    return balance != 0 || z != 0 || importance != 0 || device != 0 || communication != 0 ||
           entropy != 0;
  }
};

/// @throws Error{kInvalidArgument} that names the value which breaks a rule above.
void check(const LossConfig& config, std::int32_t num_experts);

/// S for so many tokens. @throws Error{kInvalidArgument}: T is no multiple of sequence_length.
[[nodiscard]] std::int64_t loss_groups(const LossConfig& config, std::int64_t num_tokens);

/// Values without coefficients, and what they come to with them. As memory: kLossValues doubles in
/// this order.
struct LossValues {
  double balance = 0;
  double z = 0;
  double importance = 0;
  double device = 0;
  double communication = 0;
  double entropy = 0;
  double total = 0;  ///< Each times its coefficient.
  bool operator==(const LossValues&) const = default;
};
inline constexpr std::int64_t kLossValues = sizeof(LossValues) / sizeof(double);

/// What a router said of its tokens, added up. Memory of the caller, on the backend.
struct RoutingSums {
  Matrix<std::int64_t> counts{};         ///< [S, E] assignments, before any is dropped.
  Matrix<std::int64_t> first_choices{};  ///< [S, E] of them the tokens' first ones.
  Matrix<std::int64_t> device_tokens{};  ///< [S, D] tokens with an expert on a device.
  Matrix<double> scores{};               ///< [S, E] sum over tokens of p.
  Vector<double> tokens{};               ///< [kTokenSums], over all.
};
/// Rows of RoutingSums::tokens: sums over the tokens of logsumexp^2, and of the entropy of p
/// (nats).
inline constexpr std::int64_t kTokenSums = 2;

struct RoutingSumsArgs {
  Matrix<const float> logits{};   ///< [T, E].
  AnyAssignments assignments{};   ///< Of these tokens; -1 where unused.
  Score score = Score::kSoftmax;  ///< kSigmoid: p are sigmoids by their sum; else softmax.
  RoutingSums sums{};             ///< out; all of it is written.
  Execution execution{};
};

/// Adds up in an order that depends on T alone, in double: the same bits for any number of threads.
/// @throws Error{kInvalidArgument}: a shape disagrees, S does not divide T, an id outside of [-1,
/// E);
///         {kUnsupported}: nobody accepts it.
/// Cost: reads 4*T*E + 4*T*K bytes.
void routing_sums(const RoutingSumsArgs& args);

struct RouteAtOnceArgs {
  RouteArgs route{};
  /// route.logits, to which the noise of the router's configuration is added first; empty: none is.
  Matrix<float> noisy_logits{};
  Matrix<const float> noise_logits{};  ///< As of add_noise().
  RoutingSums sums{};  ///< out, of routing_sums() with the router's score; or empty.
};

/// add_noise(), route(), and routing_sums() of what was chosen: on CUDA in one pass over the logits
/// for top-k by logits (no selection bias, no groups) and for GShard's two best, of up to 256
/// experts, 8 of them a token; else one after the other. Noise and choices have the same bits
/// either way. A token with a NaN adds nothing where it is one pass. On CUDA the workspace of
/// `route` is that of routing_sums().
/// @throws Error: as these; {kInvalidArgument}: sums of a router with null experts or without
///         logits, noise of a router that has none on its logits, noisy_logits are others.
/// Cost: reads 4*T*E bytes, writes 8*T*K, with noise 4*T*E more.
void route_at_once(const RouteAtOnceArgs& args);

/// dL/dp for route_backward(). Empty: no losses.
struct LossPrices {
  Matrix<const float> score{};  ///< [S, E] dL/dp_te of the tokens of a group.
  float z = 0;                  ///< Times 2 logsumexp: coefficient / T.
  float entropy = 0;            ///< Times -ln p: coefficient / T.
};

struct RouterLossesArgs {
  RoutingSums sums{};  ///< As routing_sums() has left them.
  std::int64_t num_tokens = 0;
  LossConfig config{};
  /// [E] kGlobal: n (with kFirstChoice of first choices) of all ranks and steps; else empty.
  Vector<const std::int64_t> global_counts{};
  double scale = 1;              ///< Of the gradient: what the main loss is scaled by.
  Vector<double> values{};       ///< out [kLossValues]: LossValues; or empty.
  Matrix<float> score_prices{};  ///< out [S, E].
  Execution execution{};
};

/// @returns what route_backward() takes.
/// @throws Error{kInvalidArgument}: as check(), a shape disagrees, global counts are missing, or
///         are given for another scope.
LossPrices router_losses(const RouterLossesArgs& args);

/// How smoothly a noisy top-k router loads its experts: load_e = sum_t of the probability that e is
/// among the K best of t if its noise alone is drawn anew,
///   Phi((clean_te - threshold_te) / deviation_te),
/// threshold the (K+1)-th largest noisy logit of t where e's is above it, else the K-th largest.
/// Source: Shazeer et al. 2017 (arXiv:1701.06538) appendix A.
struct NoisyLoadArgs {
  Matrix<const float> clean{};      ///< [T, E] logits.
  Matrix<const float> noisy{};      ///< [T, E] logits with their noise, which chose.
  Matrix<const float> deviation{};  ///< [T, E] of the noise, positive.
  std::int32_t top_k = 0;           ///< K < E.
  Vector<double> load{};            ///< out [E].
  Execution execution{};
};
/// @throws Error{kInvalidArgument}: shapes disagree, K is not below E.
void noisy_load(const NoisyLoadArgs& args);

struct NoisyLoadBackwardArgs {
  NoisyLoadArgs forward{};       ///< Its inputs; `load` is not read.
  Vector<const double> dload{};  ///< [E], for example of cv_squared().
  Matrix<float> dclean{};        ///< out [T, E], noisy logits held.
  Matrix<float> dnoisy{};        ///< out [T, E], through the thresholds.
  Matrix<float> ddeviation{};    ///< out [T, E], noisy logits held.
};
/// With noisy = clean + noise * deviation: dL/dclean is dclean + dnoisy, dL/ddeviation is
/// ddeviation
/// + noise * dnoisy.
void noisy_load_backward(const NoisyLoadBackwardArgs& args);

/// CV^2 = var / (mean^2 + 1e-10) of values [E], var that of all; where `gradient` [E] is given, its
/// derivatives times `scale`.
double cv_squared(Vector<const double> values, double scale = 0, Vector<double> gradient = {});

}  // namespace switchyard

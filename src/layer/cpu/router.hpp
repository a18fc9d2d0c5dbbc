#pragma once

#include <optional>

#include "layer/cpu/buffers.hpp"
#include "layer/cpu/network.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {

/// Who works on what: rows of tokens with their experts. On one rank these are the rank's own
/// tokens, across ranks what it has received.
struct Assignments {
  ConstRawMatrix x{};                   ///< [N, H] compute type.
  Matrix<const std::int32_t> expert{};  ///< [N, K].
  Matrix<const float> weight{};         ///< [N, K].
  Matrix<const std::uint8_t> kept{};    ///< [N, K], or empty: all.
};

/// The router of a layer on the CPU: router_gemm, route and apply_capacity for a rank's own tokens,
/// with buffers that are kept from call to call.
class CpuRouter {
 public:
  CpuRouter(const LayerModel& model, const LayerOptions& options);

  /// What the router, or the routing that `args` gives, makes of the tokens [T, H] (compute type),
  /// with zero-computation experts; valid until the next call. Fills the record and the logits that
  /// `args` asks for. Reports "router_gemm", "select" and, where there is anything to count,
  /// "plan".
  Assignments run(const ForwardArgs& args, ConstRawMatrix tokens, const Execution& execution);

  /// [T, E] of the last run that was not given a routing.
  [[nodiscard]] Matrix<const float> logits(std::int64_t num_tokens) const {
    return {logits_.values().data(), {num_tokens, config_.num_logits()}};
  }
  /// Of the last run. @throws Error{kInvalidArgument}: as MoeLayer::stats().
  [[nodiscard]] metrics::Routing stats(int num_ranks) const;
  [[nodiscard]] const RouterConfig& config() const { return config_; }
  /// Whether a call draws noise of this kind.
  [[nodiscard]] bool draws_noise(const RouteRequest& request, RouterNoise::Kind kind) const {
    return request.training && config_.noise.kind == kind;
  }
  /// The tokens as the router sees them: with their jitter where the call has it; valid until the
  /// next call.
  ConstRawMatrix seen(ConstRawMatrix tokens, const RouteRequest& request,
                      const Execution& execution);
  /// Of a chain: its gate and biases from here on.
  void use_iteration(std::int32_t iteration) { iteration_ = iteration; }
  /// [E, H], of a network [E, D].
  [[nodiscard]] ConstRawMatrix gate(std::int64_t hidden) const {
    const std::int64_t cols = config_.network.features(hidden);
    const ConstRawMatrix gates = gate_.matrix(gate_.size() / cols, cols);
    const std::int64_t rows = config_.num_logits();
    return {gates.row(iteration_ * rows), gates.dtype, rows, cols};
  }
  /// router_gemm_backward() through gate() and the network, of `args.tokens` as seen() gives them.
  void logits_backward(RouterGemmBackwardArgs args, Vector<float> dnetwork) {
    args.gate = gate(args.tokens.cols);
    network_.backward(args, dnetwork);
  }
  /// Of a gating residual: what `dlogits` come to of the logits before, `dprevious` [T, E], and of
  /// the matrix, `dresidual` [E * E]; either may be empty.
  void residual_backward(Matrix<const float> previous, Matrix<const float> dlogits,
                         Matrix<float> dprevious, Vector<float> dresidual, bool accumulate,
                         const Execution& execution) const;
  [[nodiscard]] ConstRawMatrix noise_gate(std::int64_t hidden) const {
    return noise_gate_.matrix(config_.num_logits(), hidden);
  }
  /// [T, E] of learned noise: tokens * noise gate^T; valid until the next call.
  Matrix<const float> noise_logits(ConstRawMatrix tokens, const Execution& execution);

 private:
  void compute_logits(ConstRawMatrix tokens, Matrix<float> logits, const Execution& execution);
  void add_residual(Matrix<const float> previous, Matrix<float> logits, const Execution& execution);
  void multiply(ConstRawMatrix tokens, ConstRawMatrix gate, Vector<const float> bias,
                Matrix<float> logits, const Execution& execution) const;
  Routing select(Matrix<const float> logits, std::int64_t num_tokens, const RouteRequest& request,
                 const Execution& execution);
  [[nodiscard]] RouterCapacity capacity(std::int64_t num_tokens) const {
    if (!capacity_factor_) return {};
    return capacity_for(config_, *capacity_factor_, num_tokens);
  }
  Matrix<const std::uint8_t> limit(const Assignments& work, Vector<const float> top_score,
                                   const Execution& execution);
  void fill(RoutingRecord& record, const Assignments& work) const;
  /// That of the iteration, of `size`; or none.
  [[nodiscard]] Vector<const float> bias(const Parameter& biases, std::int64_t size) const {
    if (biases.empty()) return {};
    return {biases.vector().data + iteration_ * size, {size}};
  }

  RouterConfig config_;
  std::int32_t iteration_ = 0;  ///< Of a chain, for which there are as many as it has:
  Parameter gate_;              ///< [E, H].
  CpuNetwork network_;
  Parameter noise_gate_;       ///< [E, H], or none.
  Parameter gating_residual_;  ///< [E, E], or none.
  Parameter bias_;             ///< [E], or none.
  Parameter selection_bias_;   ///< [E], or none.
  std::optional<double> capacity_factor_;
  DropPolicy drop_policy_;

  Assignments own_{};  ///< Of the last run, where it was not given a routing.
  ArrayBuffer<float> logits_, noise_logits_, residual_, weight_, score_, jittered_;
  ArrayBuffer<std::int32_t> expert_;
  ArrayBuffer<std::uint8_t> kept_;
  ArrayBuffer<std::int64_t> counts_, counts_kept_;
};

}  // namespace switchyard

// The smooth load of a noisy top-k router, and the way back through it, on a CPU. Bound by erf and
// exp; a token by itself, sums over tokens in parts of a fixed number, added in order.
#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>
#include <vector>

#include "core/shape_check.hpp"
#include "switchyard/routing/losses.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {
namespace {

constexpr std::int64_t kTokensPerPart = 64;

double normal_below(double x) { return 0.5 * std::erfc(-x / std::numbers::sqrt2); }
double normal_density(double x) {
  return std::exp(-0.5 * x * x) * std::numbers::inv_sqrtpi / std::numbers::sqrt2;
}

/// The two experts of a token whose noisy logits are thresholds; ties to the lower id.
class Thresholds {
 public:
  explicit Thresholds(const NoisyLoadArgs& args)
      : args_(args), order_(static_cast<std::size_t>(args.clean.shape[1])) {}

  void read(std::int64_t token) {
    noisy_ = args_.noisy.row(token);
    std::iota(order_.begin(), order_.end(), 0);
    const auto better = [&](std::int32_t a, std::int32_t b) {
      return noisy_[a] != noisy_[b] ? noisy_[a] > noisy_[b] : a < b;
    };
    std::partial_sort(order_.begin(), order_.begin() + args_.top_k + 1, order_.end(), better);
    last_in_ = order_[static_cast<std::size_t>(args_.top_k) - 1];
    first_out_ = order_[static_cast<std::size_t>(args_.top_k)];
  }
  /// Whose noisy logit is the threshold of this expert.
  [[nodiscard]] std::int32_t of(std::int32_t expert) const {
    return noisy_[expert] > noisy_[first_out_] ? first_out_ : last_in_;
  }
  [[nodiscard]] double distance(std::int64_t token, std::int32_t expert) const {
    return (double{args_.clean.row(token)[expert]} - double{noisy_[of(expert)]}) /
           double{args_.deviation.row(token)[expert]};
  }

 private:
  const NoisyLoadArgs& args_;
  const float* noisy_ = nullptr;
  std::vector<std::int32_t> order_;
  std::int32_t last_in_ = 0;
  std::int32_t first_out_ = 0;
};

void check_inputs(const NoisyLoadArgs& args) {
  const auto [num_tokens, num_experts] = args.clean.shape;
  require_shape("clean logits", args.clean, num_tokens, num_experts);
  require_shape("noisy logits", args.noisy, num_tokens, num_experts);
  require_shape("deviation", args.deviation, num_tokens, num_experts);
  require(args.top_k >= 1 && args.top_k < num_experts,
          "top_k={} of the load's estimator, want 1 to {}: the threshold is the next expert's",
          args.top_k, num_experts - 1);
  if (args.execution.backend != Backend::kCpu) {
    fail(ErrorCode::kUnsupported, "noisy_load runs on the backend cpu, not on {}",
         to_string(args.execution.backend));
  }
}

}  // namespace

void noisy_load(const NoisyLoadArgs& args) {
  check_inputs(args);
  const std::int64_t num_tokens = args.clean.shape[0];
  const std::int64_t num_experts = args.clean.shape[1];
  require_shape("load", args.load, num_experts);
  const std::int64_t parts = (num_tokens + kTokensPerPart - 1) / kTokensPerPart;
  std::vector<double> sums(static_cast<std::size_t>(parts * num_experts));
  parallel_for(args.execution.pool, parts, [&](std::int64_t part, int) {
    Thresholds thresholds(args);
    double* const sum = sums.data() + part * num_experts;
    const std::int64_t end = std::min(num_tokens, (part + 1) * kTokensPerPart);
    for (std::int64_t t = part * kTokensPerPart; t < end; ++t) {
      thresholds.read(t);
      for (std::int32_t e = 0; e < num_experts; ++e) {
        sum[e] += normal_below(thresholds.distance(t, e));
      }
    }
  });
  std::fill_n(args.load.data, num_experts, 0.0);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    args.load[static_cast<std::int64_t>(i) % num_experts] += sums[i];
  }
}

void noisy_load_backward(const NoisyLoadBackwardArgs& args) {
  const NoisyLoadArgs& forward = args.forward;
  check_inputs(forward);
  const std::int64_t num_tokens = forward.clean.shape[0];
  const std::int64_t num_experts = forward.clean.shape[1];
  require_shape("dload", args.dload, num_experts);
  require_shape("dclean", args.dclean, num_tokens, num_experts);
  require_shape("dnoisy", args.dnoisy, num_tokens, num_experts);
  require_shape("ddeviation", args.ddeviation, num_tokens, num_experts);
  parallel_for(forward.execution.pool, num_tokens, [&](std::int64_t t, int) {
    Thresholds thresholds(forward);
    thresholds.read(t);
    std::vector<double> dnoisy(static_cast<std::size_t>(num_experts));
    for (std::int32_t e = 0; e < num_experts; ++e) {
      const double distance = thresholds.distance(t, e);
      const double slope =
          args.dload[e] * normal_density(distance) / double{forward.deviation.row(t)[e]};
      args.dclean.row(t)[e] = static_cast<float>(slope);
      args.ddeviation.row(t)[e] = static_cast<float>(-slope * distance);
      dnoisy[static_cast<std::size_t>(thresholds.of(e))] -= slope;
    }
    for (std::int64_t e = 0; e < num_experts; ++e) {
      args.dnoisy.row(t)[e] = static_cast<float>(dnoisy[static_cast<std::size_t>(e)]);
    }
  });
}

}  // namespace switchyard

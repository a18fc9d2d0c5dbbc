// The router's way back on a CPU: through the weights of the chosen experts to the logits, and from
// these to tokens and gate. Bound by the products, which skip what is exactly zero: where weights
// are renormalised only the chosen experts of a token have a gradient.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/row_ops.hpp"
#include "route/cpu/rule.hpp"
#include "route/cpu/token_scores.hpp"
#include "route/cpu/tokens.hpp"
#include "route/implementations.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {
namespace {

constexpr std::int64_t kColumns = 256;  ///< Of the tokens that stay in a cache for all experts.

/// One token after the other; one per task, for its scratch memory.
class TokenGradient {
 public:
  explicit TokenGradient(const RouteBackwardArgs& args)
      : args_(args),
        router_(args.config.as_top_k()),
        gradient_(static_cast<std::size_t>(router_.top_k)),
        share_(gradient_.size()),
        scores_(args.config.num_experts, router_.score) {}

  void operator()(std::int64_t token) {
    const float* logits = args_.logits.row(token);
    const std::int32_t* expert = args_.expert.row(token);
    const float* dweight = args_.dweight.row(token);
    float* dlogits = args_.dlogits.row(token);
    if (!args_.accumulate) std::fill_n(dlogits, args_.config.num_experts, 0.0F);
    for (std::size_t k = 0; k < gradient_.size(); ++k) {
      gradient_[k] = expert[k] < 0 ? 0.0F : router_.scale * dweight[k];
    }
    if (router_.score == Score::kSigmoid && !router_.renormalize) {
      for (std::size_t k = 0; k < gradient_.size(); ++k) {
        if (expert[k] < 0) continue;
        const float s = sigmoid(logits[expert[k]]);
        dlogits[expert[k]] += gradient_[k] * s * (1.0F - s);
      }
    } else if (router_.score == Score::kSoftmax && !router_.renormalize) {
      over_all(logits, expert, dlogits);
    } else if (router_.score == Score::kSparseMixer) {
      over_near(logits, expert, dlogits);
    } else {
      over_chosen(logits, expert, dlogits);
    }
    if (args_.losses.score.data == nullptr) return;
    scores_.read(logits);
    const std::int64_t per_group = args_.logits.shape[0] / args_.losses.score.shape[0];
    scores_.add_gradient(args_.losses.score.row(token / per_group), args_.losses, dlogits);
  }

 private:
  void over_all(const float* logits, const std::int32_t* expert, float* dlogits) {
    const std::int32_t num_experts = args_.config.num_experts;
    const float largest = *std::max_element(logits, logits + num_experts);
    float sum = 0.0F;
    for (std::int32_t e = 0; e < num_experts; ++e) sum += exp_below(logits[e], largest);
    float mean = 0.0F;
    for (std::size_t k = 0; k < gradient_.size(); ++k) {
      if (expert[k] < 0) continue;
      share_[k] = exp_below(logits[expert[k]], largest) / sum;
      mean = std::fma(gradient_[k], share_[k], mean);
    }
    for (std::int32_t e = 0; e < num_experts; ++e) {
      dlogits[e] -= exp_below(logits[e], largest) / sum * mean;
    }
    for (std::size_t k = 0; k < gradient_.size(); ++k) {
      if (expert[k] >= 0) dlogits[expert[k]] += share_[k] * gradient_[k];
    }
  }

  /// Softmax over the chosen logits, or sigmoids over their sum.
  void over_chosen(const float* logits, const std::int32_t* expert, float* dlogits) {
    const bool sigmoids = router_.score == Score::kSigmoid;
    float largest = -std::numeric_limits<float>::infinity();
    for (std::size_t k = 0; k < share_.size(); ++k) {
      if (expert[k] >= 0) largest = std::max(largest, logits[expert[k]]);
    }
    // Where all sigmoids underflow they are exponentials, as in the forward.
    const bool exponentials = !sigmoids || sigmoid(largest) < std::numeric_limits<float>::min();
    float sum = 0.0F;
    for (std::size_t k = 0; k < share_.size(); ++k) {
      if (expert[k] < 0) continue;
      const float logit = logits[expert[k]];
      share_[k] = exponentials ? exp_below(logit, largest) : sigmoid(logit);
      sum += share_[k];
    }
    float mean = 0.0F;
    for (std::size_t k = 0; k < share_.size(); ++k) {
      if (expert[k] < 0) continue;
      share_[k] /= sum;
      mean = std::fma(gradient_[k], share_[k], mean);
    }
    for (std::size_t k = 0; k < share_.size(); ++k) {
      if (expert[k] < 0) continue;
      const float slope = sigmoids ? 1.0F - sigmoid(logits[expert[k]]) : 1.0F;
      dlogits[expert[k]] += share_[k] * slope * (gradient_[k] - mean);
    }
  }

  /// Each weight is a share of its choice's own sum, over those near it that no larger one took.
  void over_near(const float* logits, const std::int32_t* expert, float* dlogits) {
    for (std::size_t k = 0; k < share_.size(); ++k) {
      if (expert[k] >= 0) share_[k] = 1.0F / (1.0F + near_sum(logits, expert, k));
    }
    if (router_.renormalize && !through_their_sum(expert)) return;
    for (std::size_t k = 0; k < share_.size(); ++k) {
      if (expert[k] < 0) continue;
      const float slope = gradient_[k] * share_[k] * share_[k];
      dlogits[expert[k]] += slope * near_sum(logits, expert, k);
      for_near(logits, expert, k,
               [&](std::int32_t e, float power) { dlogits[e] -= slope * power; });
    }
  }

  [[nodiscard]] float near_sum(const float* logits, const std::int32_t* expert,
                               std::size_t k) const {
    float sum = 0.0F;
    for_near(logits, expert, k, [&](std::int32_t, float power) { sum += power; });
    return sum;
  }

  /// visit(expert, exp(its logit - the choice's)) of all that share with choice k.
  template <typename Visit>
  void for_near(const float* logits, const std::int32_t* expert, std::size_t k,
                const Visit& visit) const {
    const float largest = logits[expert[k]];
    for (std::int32_t e = 0; e < args_.config.num_experts; ++e) {
      if (e == expert[k] || std::find(expert, expert + k, e) != expert + k) continue;
      if (is_near(logits[e], largest)) visit(e, exp_below(logits[e], largest));
    }
  }

  /// From the gradients of shares of the sum of all shares to those of the shares. False: there are
  /// none, for a share among one is 1 for sure.
  bool through_their_sum(const std::int32_t* expert) {
    float sum = 0.0F;
    float mean = 0.0F;
    int used = 0;
    for (std::size_t k = 0; k < share_.size(); ++k) {
      if (expert[k] < 0) continue;
      ++used;
      sum += share_[k];
      mean = std::fma(gradient_[k], share_[k], mean);
    }
    for (float& gradient : gradient_) gradient = (gradient - mean / sum) / sum;
    return used > 1;
  }

  const RouteBackwardArgs& args_;
  const TopKRouter& router_;
  std::vector<float> gradient_;  ///< Of the chosen experts' weights before the scale.
  std::vector<float> share_;     ///< Their weights before the scale.
  TokenScores scores_;           ///< For losses.
};

void run_route(const RouteBackwardArgs& args) {
  routing::for_tokens(args.execution.pool, args.logits.shape[0],
                      [&] { return TokenGradient(args); });
}

void make_dtokens(const RouterGemmBackwardArgs& args) {
  const std::int64_t hidden = args.tokens.cols;
  parallel_for(args.execution.pool, args.tokens.rows, [&](std::int64_t t, int) {
    float* out = args.dtokens.row(t);
    std::fill_n(out, hidden, 0.0F);
    const float* dlogits = args.dlogits.row(t);
    for (std::int64_t e = 0; e < args.gate.rows; ++e) {
      if (dlogits[e] == 0.0F) continue;
      row_ops::accumulate(args.gate.dtype, dlogits[e], args.gate.row(e), out, hidden);
    }
  });
}

void make_dgate(const RouterGemmBackwardArgs& args) {
  const std::int64_t hidden = args.tokens.cols;
  const std::int64_t element = size_of(args.tokens.dtype);
  parallel_for(args.execution.pool, (hidden + kColumns - 1) / kColumns, [&](std::int64_t b, int) {
    const std::int64_t first = b * kColumns;
    const std::int64_t count = std::min(kColumns, hidden - first);
    for (std::int64_t e = 0; e < args.gate.rows; ++e) {
      float sums[kColumns] = {};
      for (std::int64_t t = 0; t < args.tokens.rows; ++t) {
        const float factor = args.dlogits.row(t)[e];
        if (factor == 0.0F) continue;
        row_ops::accumulate(args.tokens.dtype, factor, args.tokens.row(t) + first * element, sums,
                            count);
      }
      row_ops::write_gradient(sums, args.dgate.dtype,
                              args.dgate.row(e) + first * size_of(args.dgate.dtype), count,
                              args.accumulate);
    }
  });
}

void make_dbias(const RouterGemmBackwardArgs& args) {
  const std::int64_t num_experts = args.gate.rows;
  std::vector<float> sums(static_cast<std::size_t>(num_experts));
  for (std::int64_t t = 0; t < args.tokens.rows; ++t) {
    row_ops::add(args.dlogits.row(t), sums.data(), num_experts);
  }
  row_ops::write_gradient(sums.data(), DType::kF32, args.dbias.data, num_experts, args.accumulate);
}

std::optional<std::string> reject_gemm(const RouterGemmBackwardArgs& args) {
  if (args.execution.backend != Backend::kCpu) return "needs the backend cpu";
  return std::nullopt;
}

void run_gemm(const RouterGemmBackwardArgs& args) {
  if (args.dtokens.data != nullptr) make_dtokens(args);
  if (args.dgate.data != nullptr) make_dgate(args);
  if (args.dbias.data != nullptr) make_dbias(args);
}

}  // namespace

const Implementation<RouteBackwardArgs> kRouteBackwardCpu{
    "cpu.scan", reject_but<TopKRouter, RouteBackwardArgs>, run_route};
const Implementation<RouterGemmBackwardArgs> kRouterGemmBackwardCpu{"cpu.fma", reject_gemm,
                                                                    run_gemm};

}  // namespace switchyard

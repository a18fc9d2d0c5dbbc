#include "route/cpu/all_probabilities.hpp"

#include <vector>

#include "route/cpu/token_scores.hpp"
#include "route/cpu/tokens.hpp"

namespace switchyard::routing {
namespace {

class TokenGradient {
 public:
  explicit TokenGradient(const RouteBackwardArgs& args)
      : args_(args),
        num_experts_(args.config.num_experts),
        probability_(static_cast<std::size_t>(num_experts_)) {}

  void operator()(std::int64_t token) {
    const std::int32_t* expert = args_.expert.row(token);
    const float* dweight = args_.dweight.row(token);
    float* dlogits = args_.dlogits.row(token);
    if (!args_.accumulate) std::fill_n(dlogits, num_experts_, 0.0F);
    softmax(args_.logits.row(token), num_experts_, probability_.data());
    const std::int64_t columns = args_.expert.shape[1];
    float mean = 0.0F;
    for (std::int64_t k = 0; k < columns; ++k) {
      if (expert[k] >= 0) mean = std::fma(dweight[k], probability(expert[k]), mean);
    }
    for (std::int32_t e = 0; e < num_experts_; ++e) dlogits[e] -= probability(e) * mean;
    for (std::int64_t k = 0; k < columns; ++k) {
      if (expert[k] >= 0) dlogits[expert[k]] += probability(expert[k]) * dweight[k];
    }
  }

 private:
  [[nodiscard]] float probability(std::int32_t expert) const {
    return probability_[static_cast<std::size_t>(expert)];
  }

  const RouteBackwardArgs& args_;
  std::int32_t num_experts_;
  std::vector<float> probability_;
};

}  // namespace

void all_probabilities_backward(const RouteBackwardArgs& args) {
  for_tokens(args.execution.pool, args.logits.shape[0], [&] { return TokenGradient(args); });
  add_losses(args);
}

void add_losses(const RouteBackwardArgs& args) {
  if (args.losses.score.data == nullptr) return;
  const std::int64_t num_tokens = args.logits.shape[0];
  const std::int64_t per_group = num_tokens / args.losses.score.shape[0];
  for_tokens(args.execution.pool, num_tokens, [&] {
    return [&, scores = TokenScores(args.config.num_experts, Score::kSoftmax)](
               std::int64_t token) mutable {
      scores.read(args.logits.row(token));
      scores.add_gradient(args.losses.score.row(token / per_group), args.losses,
                          args.dlogits.row(token));
    };
  });
}

}  // namespace switchyard::routing

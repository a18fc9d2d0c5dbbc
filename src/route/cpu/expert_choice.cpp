// Expert choice on a CPU: probabilities of all tokens, then a selection per (group, expert), then
// each token's list. Bound by the selections, which read a column of the probabilities each.
#include <vector>

#include "route/cpu/all_probabilities.hpp"
#include "route/cpu/tokens.hpp"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

class ExpertChoice {
 public:
  explicit ExpertChoice(const RouteArgs& args)
      : args_(args),
        num_tokens_(args.logits.shape[0]),
        num_experts_(args.config.num_experts),
        probability_(static_cast<std::size_t>(num_tokens_ * num_experts_)),
        taken_(probability_.size()) {}

  void run() {
    make_probabilities();
    if (num_tokens_ > 0) choose();
    write();
  }

 private:
  [[nodiscard]] std::size_t at(std::int64_t token, std::int64_t expert) const {
    return static_cast<std::size_t>(token * num_experts_ + expert);
  }

  void make_probabilities() {
    routing::LowestNan nan(num_experts_);
    routing::for_tokens(args_.execution.pool, num_tokens_, [&] {
      return [&](std::int64_t token) {
        const float* logits = args_.logits.row(token);
        const std::int32_t e = routing::nan_among(logits, num_experts_);
        if (e >= 0) return nan.report(token, e);
        routing::softmax(logits, num_experts_, &probability_[at(token, 0)]);
      };
    });
    nan.require_none();
  }

  void choose() {
    const auto& router = std::get<ExpertChoiceRouter>(args_.config.kind);
    const std::int64_t group = router.group == 0 ? num_tokens_ : router.group;
    const std::int64_t capacity = tokens_of_expert(router, group, num_experts_);
    const std::int64_t columns = num_tokens_ / group * num_experts_;
    parallel_for(args_.execution.pool, columns, [&](std::int64_t column, int) {
      const std::int64_t first = column / num_experts_ * group;
      const std::int64_t expert = column % num_experts_;
      std::vector<std::int64_t> token(static_cast<std::size_t>(group));
      for (std::int64_t i = 0; i < group; ++i) token[static_cast<std::size_t>(i)] = first + i;
      const auto better = [&](std::int64_t a, std::int64_t b) {
        const float of_a = probability_[at(a, expert)];
        const float of_b = probability_[at(b, expert)];
        return of_a != of_b ? of_a > of_b : a < b;
      };
      std::nth_element(token.begin(), token.begin() + (capacity - 1), token.end(), better);
      for (std::int64_t i = 0; i < capacity; ++i) {
        taken_[at(token[static_cast<std::size_t>(i)], expert)] = 1;
      }
    });
  }

  void write() {
    routing::for_tokens(args_.execution.pool, num_tokens_, [&] {
      return [&](std::int64_t token) {
        std::int32_t* expert = args_.routing.expert.row(token);
        float* weight = args_.routing.weight.row(token);
        std::fill_n(expert, num_experts_, -1);
        std::fill_n(weight, num_experts_, 0.0F);
        std::int32_t count = 0;
        for (std::int32_t e = 0; e < num_experts_; ++e) {
          if (taken_[at(token, e)] == 0) continue;
          expert[count] = e;
          weight[count++] = probability_[at(token, e)];
        }
      };
    });
  }

  const RouteArgs& args_;
  std::int64_t num_tokens_;
  std::int32_t num_experts_;
  std::vector<float> probability_;   ///< [T, E].
  std::vector<std::uint8_t> taken_;  ///< [T, E].
};

void run(const RouteArgs& args) { ExpertChoice(args).run(); }

}  // namespace

const Implementation<RouteArgs> kRouteCpuExpertChoice{
    "cpu.expert-choice", reject_but<ExpertChoiceRouter, RouteArgs>, run};
const Implementation<RouteBackwardArgs> kRouteBackwardCpuExpertChoice{
    "cpu.expert-choice", reject_but<ExpertChoiceRouter, RouteBackwardArgs>,
    routing::all_probabilities_backward};

}  // namespace switchyard

// Top-p on a CPU: experts in descending probability until their sum exceeds a threshold. Bound by
// the exponentials and, where a token takes many experts, by the sort.
#include <numeric>
#include <vector>

#include "route/cpu/all_probabilities.hpp"
#include "route/cpu/tokens.hpp"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

class TopP {
 public:
  TopP(const RouteArgs& args, routing::LowestNan& nan)
      : args_(args),
        nan_(nan),
        num_experts_(args.config.num_experts),
        threshold_(std::get<TopPRouter>(args.config.kind).threshold),
        probability_(static_cast<std::size_t>(num_experts_)),
        order_(probability_.size()) {}

  void operator()(std::int64_t token) {
    const float* logits = args_.logits.row(token);
    if (const std::int32_t e = routing::nan_among(logits, num_experts_); e >= 0) {
      nan_.report(token, e);
      return;
    }
    routing::softmax(logits, num_experts_, probability_.data());
    std::iota(order_.begin(), order_.end(), 0);
    // By logits, which do not tie where probabilities underflow.
    std::stable_sort(order_.begin(), order_.end(),
                     [&](std::int32_t a, std::int32_t b) { return logits[a] > logits[b]; });
    std::int32_t* expert = args_.routing.expert.row(token);
    float* weight = args_.routing.weight.row(token);
    float sum = 0.0F;
    bool enough = false;
    for (std::int32_t k = 0; k < num_experts_; ++k) {
      const std::int32_t e = order_[static_cast<std::size_t>(k)];
      expert[k] = enough ? -1 : e;
      weight[k] = enough ? 0.0F : probability_[static_cast<std::size_t>(e)];
      sum += weight[k];
      enough = enough || (threshold_ < 1.0F && sum > threshold_);
    }
  }

 private:
  const RouteArgs& args_;
  routing::LowestNan& nan_;
  std::int32_t num_experts_;
  float threshold_;
  std::vector<float> probability_;
  std::vector<std::int32_t> order_;
};

void run(const RouteArgs& args) {
  routing::LowestNan nan(args.config.num_experts);
  routing::for_tokens(args.execution.pool, args.logits.shape[0], [&] { return TopP(args, nan); });
  nan.require_none();
}

}  // namespace

const Implementation<RouteArgs> kRouteCpuTopP{"cpu.top-p", reject_but<TopPRouter, RouteArgs>, run};
const Implementation<RouteBackwardArgs> kRouteBackwardCpuTopP{
    "cpu.top-p", reject_but<TopPRouter, RouteBackwardArgs>, routing::all_probabilities_backward};

}  // namespace switchyard

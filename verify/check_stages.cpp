// Routing and capacity, each called by itself with made-up logits, against their definitions: near
// ties are no excuse here, since logits and scores are given exactly.
#include <fmt/core.h>

#include <cmath>

#include "reference/reference.hpp"
#include "switchyard/switchyard.hpp"
#include "testkit/random.hpp"
#include "verify/check_layer.hpp"
#include "verify/stage_checks.hpp"

namespace switchyard::verify {
namespace {

using reference::Bounded;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

class RoutingCheck {
 public:
  RoutingCheck(const Problem& problem, const StageCalls& calls, const Execution& execution)
      : problem_(problem),
        calls_(calls),
        test_(problem.test),
        config_(problem.test.layer.router),
        execution_(execution),
        random_(problem.test.seed, 99),
        num_tokens_(problem.test.num_tokens),
        top_k_(problem.test.layer.router.top_k()) {}

  std::string run(KeptRouting& result) {
    std::string wrong = check_route();
    if (wrong.empty()) wrong = check_capacity();
    result = {.expert = expert_, .weight = weight_, .kept = kept_};
    return wrong;
  }

 private:
  /// A layer that reroutes drops so behind its router.
  [[nodiscard]] DropPolicy policy() const {
    return test_.drop_policy == DropPolicy::kReroute ? DropPolicy::kToken : test_.drop_policy;
  }

  std::vector<float> make_logits() {
    std::vector<float> logits(at(num_tokens_ * config_.num_experts));
    const float size = test_.data == Data::kLarge ? 80.0F : test_.data == Data::kZero ? 0.0F : 3.0F;
    for (float& logit : logits) {
      logit = size * random_.signed_unit();
      if (test_.data == Data::kTies) logit = std::round(logit);
    }
    return logits;
  }

  std::string check_route() {
    const std::vector<float> logits = make_logits();
    const LayerModel& model = problem_.model;
    expert_.assign(at(num_tokens_ * top_k_), -7);
    weight_.assign(at(num_tokens_ * top_k_), std::nanf(""));
    top_score_.assign(at(num_tokens_), std::nanf(""));
    calls_.route({.logits = {logits.data(), {num_tokens_, config_.num_experts}},
                  .selection_bias = model.selection_bias.vector(),
                  .config = config_,
                  .routing = {.expert = {expert_.data(), {num_tokens_, top_k_}},
                              .weight = {weight_.data(), {num_tokens_, top_k_}}},
                  .request = {.top_score = {top_score_.data(), {num_tokens_}}},
                  .execution = execution_});
    for (std::int64_t t = 0; t < num_tokens_; ++t) {
      std::vector<Bounded> row;
      for (std::int64_t e = 0; e < config_.num_experts; ++e) {
        row.push_back({double{logits[at(t * config_.num_experts + e)]}, 0});
      }
      const std::span chosen = std::span(expert_).subspan(at(t * top_k_), at(top_k_));
      const std::span weights = std::span(weight_).subspan(at(t * top_k_), at(top_k_));
      const auto scores = reference::token_scores(config_, row, model.selection_bias.floats());
      const auto ties = reference::tie_classes(row, model.selection_bias.floats());
      std::string wrong = reference::check_choice(config_, scores, ties, chosen);
      if (wrong.empty()) {
        wrong = reference::check_weights(reference::chosen_weights(config_, row, chosen), weights);
      }
      if (wrong.empty() && !reference::admits(reference::top_score(scores), DType::kF32,
                                              double{top_score_[at(t)]})) {
        wrong = fmt::format("top score {}", top_score_[at(t)]);
      }
      if (!wrong.empty()) return fmt::format("route, token {}: {}", t, wrong);
    }
    if (test_.given != Given::kNothing) {
      expert_ = problem_.given_expert;
      weight_ = problem_.given_weight;
    }
    return {};
  }

  std::string check_capacity() {
    const std::int64_t capacity =
        test_.capacity_factor > 0
            ? calls_.capacity_of(test_.capacity_factor, num_tokens_, top_k_, config_.num_experts)
            : 0;
    if (test_.capacity_factor > 0 &&
        capacity !=
            reference::capacity(test_.capacity_factor, num_tokens_, top_k_, config_.num_experts)) {
      return fmt::format("capacity_of gives {}", capacity);
    }
    kept_.assign(expert_.size(), 7);
    std::vector<std::int64_t> counts(at(config_.num_experts), -7);
    std::vector<std::int64_t> counts_kept(at(config_.num_experts), -7);
    // A given routing has no scores: the largest weight counts then.
    const bool scored = test_.given == Given::kNothing;
    calls_.apply_capacity(
        {.assignments = DenseAssignments{.expert = {expert_.data(), {num_tokens_, top_k_}},
                                         .weight = {weight_.data(), {num_tokens_, top_k_}}},
         .top_score = {scored ? top_score_.data() : nullptr, {scored ? num_tokens_ : 0}},
         .num_experts = config_.num_experts,
         .capacity = capacity,
         .policy = policy(),
         .kept = {kept_.data(), {num_tokens_ * top_k_}},
         .counts = {counts.data(), {config_.num_experts}},
         .counts_kept = {counts_kept.data(), {config_.num_experts}},
         .execution = execution_});
    std::vector<Bounded> scores;
    for (std::int64_t t = 0; scored && t < num_tokens_; ++t) {
      scores.push_back({double{top_score_[at(t)]}, 0});
    }
    if (kept_ != reference::kept_mask({.expert = expert_,
                                       .weight = weight_,
                                       .top_score = scores,
                                       .top_k = top_k_,
                                       .capacity = capacity,
                                       .policy = policy()})) {
      return "apply_capacity keeps others";
    }
    for (std::int32_t e = 0; e < config_.num_experts; ++e) {
      std::int64_t wanted = 0;
      std::int64_t kept = 0;
      for (std::size_t i = 0; i < expert_.size(); ++i) {
        if (expert_[i] != e) continue;
        ++wanted;
        kept += kept_[i];
      }
      if (counts[at(e)] != wanted || counts_kept[at(e)] != kept) {
        return fmt::format("apply_capacity counts {} and {} for expert {}, want {} and {}",
                           counts[at(e)], counts_kept[at(e)], e, wanted, kept);
      }
    }
    return {};
  }

  const Problem& problem_;
  const StageCalls& calls_;
  const Case& test_;
  const RouterConfig& config_;
  const Execution& execution_;
  Random random_;
  std::int64_t num_tokens_;
  std::int64_t top_k_;
  std::vector<std::int32_t> expert_;
  std::vector<float> weight_;
  std::vector<float> top_score_;
  std::vector<std::uint8_t> kept_;
};

}  // namespace

std::string check_routing_stages(const Problem& problem, const StageCalls& calls,
                                 const Execution& execution, KeptRouting& routing) {
  return RoutingCheck(problem, calls, execution).run(routing);
}

std::string check_stages(const Problem& problem, const StageCalls& calls) {
  const Case& test = problem.test;
  if (test.data == Data::kNan || test.given == Given::kBadId) return {};
  ThreadPool pool(test.threads);
  const Execution execution{.pool = test.threads > 1 ? &pool : nullptr,
                            .batch_invariant = test.batch_invariant};
  KeptRouting routing;
  std::string wrong = check_routing_stages(problem, calls, execution, routing);
  return wrong.empty() ? check_row_stages(problem, calls, execution, routing) : wrong;
}

}  // namespace switchyard::verify

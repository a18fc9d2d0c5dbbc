#include "reference/router_rules.hpp"

#include <algorithm>
#include <cmath>
#include <set>

#include "reference/draws.hpp"
#include "reference/router.hpp"

namespace switchyard::reference {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

std::string say(const char* what, std::int64_t token, std::int64_t expert) {
  return std::string(what) + ": token " + std::to_string(token) + ", expert " +
         std::to_string(expert);
}

/// One call's tokens under a rule.
class RuleCheck {
 public:
  RuleCheck(const RouterConfig& config, const RouteRequest& request,
            std::span<const Bounded> logits, std::span<const std::int32_t> expert,
            std::span<const float> weight, std::span<const float> selection_bias)
      : config_(config),
        request_(request),
        logits_(logits),
        expert_(expert),
        weight_(weight),
        selection_bias_(selection_bias),
        num_experts_(config.num_experts),
        num_logits_(config.num_logits()),
        columns_(config.top_k()),
        num_tokens_(std::ssize(expert) / columns_) {}

  std::string run() {
    if (std::string wrong = check_places(); !wrong.empty()) return wrong;
    if (config_.has_logits()) {
      const RouterConfig softmax{.num_experts = num_logits_, .kind = TopKRouter{.top_k = 1}};
      for (std::int64_t t = 0; t < num_tokens_; ++t) {
        const auto scores = token_scores(softmax, of_token(t), {}).unbiased;
        probability_.insert(probability_.end(), scores.begin(), scores.end());
      }
    }
    if (const auto* rule = std::get_if<GShardRouter>(&config_.kind)) {
      return each_token([&](std::int64_t t) { return gshard(*rule, t); });
    }
    if (const auto* rule = std::get_if<AdaMoeRouter>(&config_.kind)) {
      return each_token([&](std::int64_t t) { return adamoe(*rule, t); });
    }
    if (const auto* rule = std::get_if<TopPRouter>(&config_.kind)) {
      return each_token([&](std::int64_t t) { return top_p(*rule, t); });
    }
    if (const auto* rule = std::get_if<ExpertChoiceRouter>(&config_.kind)) {
      return expert_choice(*rule);
    }
    if (const auto* rule = std::get_if<HashRouter>(&config_.kind)) {
      return each_token([&](std::int64_t t) { return hash(*rule, t); });
    }
    if (const auto* rule = std::get_if<ForcedRouter>(&config_.kind)) return forced(*rule);
    if (std::holds_alternative<ExpertThresholdRouter>(config_.kind)) {
      return each_token([&](std::int64_t t) { return expert_threshold(t); });
    }
    return each_token([&](std::int64_t t) { return relu(t); });
  }

 private:
  template <typename Body>
  std::string each_token(const Body& body) const {
    for (std::int64_t t = 0; t < num_tokens_; ++t) {
      if (std::string wrong = body(t); !wrong.empty()) return wrong;
    }
    return {};
  }

  [[nodiscard]] std::span<const Bounded> of_token(std::int64_t t) const {
    return logits_.subspan(at(t * num_logits_), at(num_logits_));
  }
  [[nodiscard]] Bounded logit(std::int64_t t, std::int64_t e) const {
    return logits_[at(t * num_logits_ + e)];
  }
  [[nodiscard]] Bounded probability(std::int64_t t, std::int64_t e) const {
    return probability_[at(t * num_logits_ + e)];
  }
  [[nodiscard]] std::int32_t chosen(std::int64_t t, std::int64_t k) const {
    return expert_[at(t * columns_ + k)];
  }
  [[nodiscard]] std::vector<std::int32_t> all_of(std::int64_t t) const {
    std::vector<std::int32_t> used;
    for (std::int64_t k = 0; k < columns_ && chosen(t, k) >= 0; ++k) used.push_back(chosen(t, k));
    return used;
  }
  [[nodiscard]] bool has(std::int64_t t, std::int32_t e) const {
    const auto used = all_of(t);
    return std::find(used.begin(), used.end(), e) != used.end();
  }

  /// Different experts, then unused places without weight.
  std::string check_places() const {
    return each_token([&](std::int64_t t) -> std::string {
      std::set<std::int32_t> seen;
      bool used = true;
      for (std::int64_t k = 0; k < columns_; ++k) {
        const std::int32_t e = chosen(t, k);
        if (e < -1 || e >= num_experts_) return say("no expert", t, e);
        if (e >= 0 && (!used || !seen.insert(e).second)) return say("chosen out of place", t, e);
        used = e >= 0;
        if (!used && weight_[at(t * columns_ + k)] != 0) return say("weight of nobody", t, e);
      }
      return {};
    });
  }

  std::string check_weights(std::int64_t t, const auto& want) const {
    for (std::int64_t k = 0; k < columns_ && chosen(t, k) >= 0; ++k) {
      if (!admits(want(k), DType::kF32, double{weight_[at(t * columns_ + k)]})) {
        return say("weight", t, chosen(t, k)) + " is " +
               std::to_string(weight_[at(t * columns_ + k)]) + ", not " +
               std::to_string(want(k).value);
      }
    }
    return {};
  }

  std::string relu(std::int64_t t) const {
    for (std::int32_t e = 0; e < num_experts_; ++e) {
      const Bounded l = logit(t, e);
      if (has(t, e) ? l.high() <= 0 : l.low() > 0) return say("sign of the logit", t, e);
    }
    return check_weights(t, [&](std::int64_t k) { return logit(t, chosen(t, k)); });
  }

  /// How many null experts have a logit that may be, or is sure to be, above another.
  [[nodiscard]] std::int64_t nulls_above(std::int64_t t, Bounded other, bool surely) const {
    std::int64_t count = 0;
    for (std::int32_t e = num_experts_; e < num_logits_; ++e) {
      const Bounded l = logit(t, e);
      if (surely ? l.low() > other.high() : l.high() >= other.low()) ++count;
    }
    return count;
  }

  /// That no expert behind place k of a token, or not chosen at all, is sure to be better.
  [[nodiscard]] std::string better_behind(const std::vector<std::int32_t>& used, std::size_t k,
                                          std::int64_t t) const {
    for (std::int32_t e = 0; e < num_experts_; ++e) {
      const auto place = std::find(used.begin(), used.end(), e) - used.begin();
      const bool behind = place > static_cast<std::ptrdiff_t>(k);
      if (behind && logit(t, e).low() > logit(t, used[k]).high()) {
        return say("a better expert is behind", t, e);
      }
    }
    return {};
  }

  std::string adamoe(const AdaMoeRouter& rule, std::int64_t t) const {
    const auto used = all_of(t);
    const std::int64_t nulls = rule.top_k - std::ssize(used);
    if (nulls > rule.null_experts) return say("fewer experts than places", t, std::ssize(used));
    for (std::size_t k = 0; k < used.size(); ++k) {
      std::string better = better_behind(used, k, t);
      if (!better.empty()) return better;
      if (nulls_above(t, logit(t, used[k]), true) > nulls) {
        return say("a null expert is better", t, used[k]);
      }
    }
    for (std::int32_t e = 0; e < num_experts_; ++e) {
      if (!has(t, e) && nulls_above(t, logit(t, e), false) < nulls) {
        return say("better than a null expert that was chosen", t, e);
      }
    }
    if (used.empty()) return {};
    const RouterConfig among{.num_experts = num_logits_,
                             .kind = TopKRouter{.top_k = static_cast<std::int32_t>(used.size()),
                                                .score = Score::kTopkSoftmax}};
    const std::vector<Bounded> want = chosen_weights(among, of_token(t), used);
    return check_weights(t, [&](std::int64_t k) { return want[at(k)]; });
  }

  std::string top_p(const TopPRouter& rule, std::int64_t t) const {
    const auto used = all_of(t);
    BoundedSum before;
    BoundedSum sum;
    for (std::size_t k = 0; k < used.size(); ++k) {
      std::string better = better_behind(used, k, t);
      if (!better.empty()) return better;
      if (k + 1 < used.size()) before.add(probability(t, used[k]));
      sum.add(probability(t, used[k]));
    }
    const bool all = std::ssize(used) == num_experts_;
    if (rule.threshold >= 1 && !all) return say("not all experts", t, std::ssize(used));
    if (used.empty() || (rule.threshold < 1 && before.total().low() > double{rule.threshold})) {
      return say("more experts than it takes", t, std::ssize(used));
    }
    if (!all && sum.total().high() <= double{rule.threshold}) {
      return say("fewer experts than it takes", t, std::ssize(used));
    }
    return check_weights(t, [&](std::int64_t k) { return probability(t, chosen(t, k)); });
  }

  std::string expert_choice(const ExpertChoiceRouter& rule) const {
    if (num_tokens_ == 0) return {};
    const std::int64_t group = rule.group == 0 ? num_tokens_ : rule.group;
    const double share =
        rule.capacity_factor * static_cast<double>(group * rule.top_k) / num_experts_;
    const std::int64_t capacity =
        std::min(group, std::max<std::int64_t>(1, std::llround(std::floor(share + 1e-9))));
    for (std::int64_t first = 0; first < num_tokens_; first += group) {
      for (std::int32_t e = 0; e < num_experts_; ++e) {
        std::int64_t taken = 0;
        double least = HUGE_VAL;  // of those taken, at most
        double best = -HUGE_VAL;  // of the others, at least
        for (std::int64_t t = first; t < first + group; ++t) {
          const Bounded p = probability(t, e);
          if (has(t, e)) {
            ++taken;
            least = std::min(least, p.high());
          } else {
            best = std::max(best, p.low());
          }
        }
        if (taken != capacity) return say("not C tokens", first, e);
        if (best > least) return say("a better token is left out", first, e);
      }
    }
    return each_token([&](std::int64_t t) {
      return check_weights(t, [&](std::int64_t k) { return probability(t, chosen(t, k)); });
    });
  }

  std::string expert_threshold(std::int64_t t) const {
    for (std::int32_t e = 0; e < num_experts_; ++e) {
      const float bias = selection_bias_.empty() ? -1.0F / static_cast<float>(num_experts_)
                                                 : selection_bias_[at(e)];
      const Bounded excess = add(probability(t, e), {double{bias}, 0});
      if (has(t, e) ? excess.high() <= 0 : excess.low() > 0) {
        return say("beside its threshold", t, e);
      }
    }
    return check_weights(t, [&](std::int64_t k) { return probability(t, chosen(t, k)); });
  }

  [[nodiscard]] Bounded second_score(const GShardRouter& rule, std::int64_t t,
                                     std::int64_t e) const {
    if (!rule.sampled || !request_.training) return logit(t, e);
    const double u = unit_of(word_of(request_, kSecond, t, e)) + 0x1p-25;
    const double gumbel = -std::log(-std::log(u));
    // -log u is small where u is near 1, and so is its error: it is one of fp32's log.
    return add(logit(t, e), {gumbel, 4 * kFunction * (1 + std::abs(gumbel))});
  }

  /// That `second` may be the second one: what the weight and its being left out must then be.
  std::string second_of(const GShardRouter& rule, std::int64_t t, std::int32_t second) const {
    const std::int32_t first = chosen(t, 0);
    for (std::int32_t e = 0; e < num_experts_; ++e) {
      if (e == first || e == second) continue;
      if (second_score(rule, t, e).low() > second_score(rule, t, second).high()) {
        return say("a better second is left out", t, e);
      }
    }
    const RouterConfig both{.num_experts = num_experts_,
                            .kind = TopKRouter{.top_k = 2, .score = Score::kTopkSoftmax}};
    const std::vector<std::int32_t> pair{first, second};
    const std::vector<Bounded> want = chosen_weights(both, of_token(t), pair);
    double limit = -1;
    if (rule.second == GShardRouter::Second::kThreshold) limit = rule.threshold;
    if (rule.second == GShardRouter::Second::kRandom && request_.training) {
      limit = double{rule.threshold} * unit_of(word_of(request_, kKeepSecond, t, 0));
    }
    const bool kept = chosen(t, 1) >= 0;
    if (kept ? want[1].high() <= limit * (1 - kFunction)
             : want[1].low() > limit * (1 + kFunction)) {
      return say(kept ? "the second is kept" : "the second is left out", t, second);
    }
    return check_weights(t, [&](std::int64_t k) { return want[at(k)]; });
  }

  std::string gshard(const GShardRouter& rule, std::int64_t t) const {
    const std::int32_t first = chosen(t, 0);
    if (first < 0) return say("no first expert", t, first);
    for (std::int32_t e = 0; e < num_experts_; ++e) {
      if (logit(t, e).low() > logit(t, first).high()) return say("a better expert", t, e);
    }
    if (chosen(t, 1) >= 0) return second_of(rule, t, chosen(t, 1));
    std::string wrong = "no second is possible";
    for (std::int32_t e = 0; e < num_experts_; ++e) {
      if (e == first) continue;
      wrong = second_of(rule, t, e);
      if (wrong.empty()) return {};
    }
    return wrong;
  }

  std::string check_exactly(std::int64_t t, const std::vector<std::int32_t>& want) const {
    if (all_of(t) != want) return say("other experts", t, chosen(t, 0));
    return check_weights(t, [&](std::int64_t /*k*/) {
      return Bounded{double{1.0F / static_cast<float>(columns_)}, 0};
    });
  }

  std::string hash(const HashRouter& rule, std::int64_t t) const {
    std::vector<std::int32_t> want;
    const auto id = static_cast<std::uint64_t>(request_.token_ids[t]);
    for (std::uint64_t j = 0; std::ssize(want) < rule.top_k; ++j) {
      std::uint64_t z = ((id << 8U | j) ^ rule.salt << 40U) + 0x9e3779b97f4a7c15ULL;
      z = (z ^ z >> 30U) * 0xbf58476d1ce4e5b9ULL;
      z = (z ^ z >> 27U) * 0x94d049bb133111ebULL;
      z = j < 256 ? (z ^ z >> 31U) % at(num_experts_) : j - 256;
      const auto e = static_cast<std::int32_t>(z);
      if (std::find(want.begin(), want.end(), e) == want.end()) want.push_back(e);
    }
    return check_exactly(t, want);
  }

  std::string forced(const ForcedRouter& rule) const {
    if (rule.load == ForcedRouter::Load::kUniform) {
      return each_token([&](std::int64_t t) {
        std::vector<std::int32_t> left;
        for (std::int32_t e = 0; e < num_experts_; ++e) left.push_back(e);
        std::set<std::int32_t> want;
        for (std::int64_t k = 0; k < columns_; ++k) {
          const std::uint64_t word = word_of(request_, kUniform, t, k);
          const auto place = static_cast<std::ptrdiff_t>(word * left.size() >> 32U);
          want.insert(left[at(place)]);
          left.erase(left.begin() + place);
        }
        return check_exactly(t, {want.begin(), want.end()});
      });
    }
    if (rule.load == ForcedRouter::Load::kRoundRobin) {
      return each_token([&](std::int64_t t) {
        std::vector<std::int32_t> want;
        for (std::int64_t k = 0; k < columns_; ++k) {
          const std::int64_t place = (request_.first_token + t) * columns_ + k;
          want.push_back(static_cast<std::int32_t>(place % num_experts_));
        }
        return check_exactly(t, want);
      });
    }
    return check_shares(rule);
  }

  /// Counts are the shares, rounded to a neighbouring whole number, where no expert is full.
  std::string check_shares(const ForcedRouter& rule) const {
    std::vector<std::int64_t> counts(at(num_experts_));
    for (const std::int32_t e : expert_) {
      if (e < 0) return "a forced routing leaves a place unused";
      ++counts[at(e)];
    }
    if (rule.load == ForcedRouter::Load::kDirichlet) return {};
    std::vector<double> shares;
    double sum = 0;
    for (std::int32_t e = 0; e < num_experts_; ++e) {
      const bool zipf = rule.load == ForcedRouter::Load::kZipf;
      const double rest = (1 - rule.amount) / (num_experts_ - 1);
      shares.push_back(zipf ? std::pow(e + 1, -rule.amount) : e == 0 ? rule.amount : rest);
      sum += shares.back();
    }
    const auto total = static_cast<double>(num_tokens_ * columns_);
    for (const double share : shares) {
      if (share / sum * total > static_cast<double>(num_tokens_)) return {};
    }
    for (std::int32_t e = 0; e < num_experts_; ++e) {
      const double want = shares[at(e)] / sum * total;
      if (std::abs(static_cast<double>(counts[at(e)]) - want) > 1 + 1e-6) {
        return say("count is not its share", counts[at(e)], e);
      }
    }
    return {};
  }

  const RouterConfig& config_;
  const RouteRequest& request_;
  std::span<const Bounded> logits_;
  std::span<const std::int32_t> expert_;
  std::span<const float> weight_;
  std::span<const float> selection_bias_;
  std::int32_t num_experts_;
  std::int32_t num_logits_;
  std::int64_t columns_;
  std::int64_t num_tokens_;
  std::vector<Bounded> probability_;  ///< [T, num_logits].
};

}  // namespace

std::string check_rule(const RouterConfig& config, const RouteRequest& request,
                       std::span<const Bounded> logits, std::span<const std::int32_t> expert,
                       std::span<const float> weight, std::span<const float> selection_bias) {
  return RuleCheck(config, request, logits, expert, weight, selection_bias).run();
}

}  // namespace switchyard::reference

#include "reference/capacity.hpp"

// Capacity by its definition: an assignment's place is the number of those before it. Comparing all
// pairs is quadratic, and plain enough to be right.

#include <algorithm>
#include <cmath>
#include <tuple>

namespace switchyard::reference {
namespace {

struct Assignment {
  std::int64_t token;
  std::int64_t k;
  float weight;
  Bounded score;  ///< Of the token.
};

/// The assignments that want `expert`, in (token, k) order.
std::vector<Assignment> assignments_of(const Wanted& wanted, std::int32_t expert) {
  std::vector<Assignment> result;
  for (std::size_t i = 0; i < wanted.expert.size(); ++i) {
    if (wanted.expert[i] != expert) continue;
    const auto top_k = static_cast<std::size_t>(wanted.top_k);
    const std::size_t token = i / top_k;
    Bounded score;
    if (!wanted.top_score.empty()) {
      score = wanted.top_score[token];
    } else {
      double largest = -HUGE_VAL;
      for (std::size_t k = 0; k < top_k; ++k) {
        if (wanted.expert[token * top_k + k] < 0) continue;
        largest = std::max(largest, double{wanted.weight[token * top_k + k]});
      }
      score = {largest, 0};
    }
    result.push_back({static_cast<std::int64_t>(token), static_cast<std::int64_t>(i % top_k),
                      wanted.weight[i], score});
  }
  return result;
}

/// Whether `a` comes before `b`. Scores that overlap without being equal leave it open: false both
/// ways if `certain`, by value if not.
bool before(DropPolicy policy, const Assignment& a, const Assignment& b, bool certain) {
  switch (policy) {
    case DropPolicy::kReroute:  // in the routing already
    case DropPolicy::kToken: return std::tie(a.token, a.k) < std::tie(b.token, b.k);
    case DropPolicy::kChoice: return std::tie(a.k, a.token) < std::tie(b.k, b.token);
    case DropPolicy::kProbs:
      if (a.weight != b.weight) return a.weight > b.weight;
      return std::tie(a.token, a.k) < std::tie(b.token, b.k);
    case DropPolicy::kBpr:
      if (a.k != b.k) return a.k < b.k;
      if (certain && a.score.error + b.score.error > 0) return a.score.low() > b.score.high();
      if (a.score.value != b.score.value) return a.score.value > b.score.value;
      return a.token < b.token;
  }
  return false;
}

std::int32_t largest_id(std::span<const std::int32_t> expert) {
  return expert.empty() ? -1 : *std::max_element(expert.begin(), expert.end());
}

}  // namespace

std::int64_t capacity(double factor, std::int64_t num_tokens, std::int64_t top_k,
                      std::int64_t num_experts) {
  if (num_tokens == 0) return 0;
  const double slots = std::ceil(factor * static_cast<double>(num_tokens) *
                                     static_cast<double>(top_k) / static_cast<double>(num_experts) -
                                 1e-9);
  return slots < 1 ? 1 : static_cast<std::int64_t>(slots);
}

std::int64_t capacity(const RouterConfig& config, double factor, std::int64_t num_tokens,
                      bool computes) {
  const ZeroComputationExperts& free = config.zero_computation;
  if (free.total() == 0 || free.tau == 0) {
    return computes ? capacity(factor, num_tokens, config.top_k(), config.num_experts) : 0;
  }
  if (num_tokens == 0) return 0;
  const double tau = free.tau;
  const double shares = tau * config.num_computing() + free.total();
  const double slots = std::ceil(factor * (computes ? tau : 1) * static_cast<double>(num_tokens) *
                                     config.top_k() / shares -
                                 1e-9);
  return slots < 1 ? 1 : static_cast<std::int64_t>(slots);
}

std::vector<std::uint8_t> kept_mask(const Wanted& wanted) {
  std::vector<std::uint8_t> kept(wanted.expert.size(), 0);
  for (std::int32_t e = 0; e <= largest_id(wanted.expert); ++e) {
    const std::vector<Assignment> all = assignments_of(wanted, e);
    for (const Assignment& mine : all) {
      const auto ahead = std::count_if(all.begin(), all.end(), [&](const Assignment& other) {
        return before(wanted.policy, other, mine, false);
      });
      if (wanted.slots(e) == 0 || ahead < wanted.slots(e)) {
        kept[static_cast<std::size_t>(mine.token * wanted.top_k + mine.k)] = 1;
      }
    }
  }
  return kept;
}

std::string check_kept(const Wanted& wanted, std::span<const std::uint8_t> kept) {
  if (kept.size() != wanted.expert.size()) return "the mask has the wrong size";
  for (std::size_t i = 0; i < kept.size(); ++i) {
    if (kept[i] > 1 || (kept[i] != 0 && wanted.expert[i] < 0)) {
      return "assignment " + std::to_string(i) + " is kept without an expert";
    }
  }
  for (std::int32_t e = 0; e <= largest_id(wanted.expert); ++e) {
    const std::vector<Assignment> all = assignments_of(wanted, e);
    const auto is_kept = [&](const Assignment& a) {
      return kept[static_cast<std::size_t>(a.token * wanted.top_k + a.k)] != 0;
    };
    const std::int64_t count = std::count_if(all.begin(), all.end(), is_kept);
    const std::int64_t room = wanted.slots(e) == 0 ? std::ssize(all) : wanted.slots(e);
    if (count != std::min(room, std::ssize(all))) {
      return "expert " + std::to_string(e) + " keeps " + std::to_string(count) + " of " +
             std::to_string(all.size()) + " with room for " + std::to_string(room);
    }
    for (const Assignment& lost : all) {
      if (is_kept(lost)) continue;
      for (const Assignment& mine : all) {
        if (is_kept(mine) && before(wanted.policy, lost, mine, true)) {
          return "expert " + std::to_string(e) + " keeps token " + std::to_string(mine.token) +
                 " but not token " + std::to_string(lost.token) + ", which comes before it";
        }
      }
    }
  }
  return {};
}

}  // namespace switchyard::reference

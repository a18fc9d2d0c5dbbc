// Which assignments an expert keeps, on a CPU. Every policy is an order of the assignments; an
// expert keeps the first `capacity` of its own. For kToken, kChoice and kBpr the order is the same
// for all experts, so a stable count gives each assignment's rank; kProbs has an order per expert.
#include <algorithm>
#include <atomic>
#include <limits>
#include <numeric>
#include <vector>

#include "plan/cpu/by_token.hpp"
#include "plan/cpu/counting.hpp"
#include "plan/implementations.hpp"

namespace switchyard {
namespace {

/// Tokens in descending top score, ties in token order.
std::vector<std::int32_t> tokens_by_score(const CapacityArgs& args, const ByToken& assignments) {
  const std::int64_t num_tokens = assignments.num_tokens();
  std::vector<std::uint32_t> key(static_cast<std::size_t>(num_tokens));
  parallel_for(args.execution.pool, (num_tokens + 1023) / 1024, [&](std::int64_t block, int) {
    const std::int64_t end = std::min(num_tokens, (block + 1) * 1024);
    for (std::int64_t t = block * 1024; t < end; ++t) {
      std::uint32_t best = 0;
      if (args.top_score.data != nullptr) {
        best = sort_key(args.top_score[t]);
      } else {
        for (std::int64_t i = assignments.begin(t); i < assignments.begin(t + 1); ++i) {
          if (assignments.expert(i) >= 0) best = std::max(best, sort_key(assignments.weight(i)));
        }
      }
      key[static_cast<std::size_t>(t)] = best;
    }
  });
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(num_tokens));
  std::iota(tokens.begin(), tokens.end(), 0);
  std::stable_sort(tokens.begin(), tokens.end(), [&key](std::int32_t a, std::int32_t b) {
    return key[static_cast<std::size_t>(a)] > key[static_cast<std::size_t>(b)];
  });
  return tokens;
}

/// The assignments by choice: the first ones of all tokens in the order given, all second ones, ...
std::vector<std::int32_t> by_choice(const ByToken& assignments,
                                    const std::vector<std::int32_t>& tokens) {
  std::vector<std::size_t> next{0};  // of each choice, how many come before
  for (const std::int32_t t : tokens) {
    const auto choices = static_cast<std::size_t>(assignments.begin(t + 1) - assignments.begin(t));
    if (next.size() <= choices) next.resize(choices + 1);
    for (std::size_t k = 0; k < choices; ++k) ++next[k + 1];
  }
  std::partial_sum(next.begin(), next.end(), next.begin());
  std::vector<std::int32_t> order(static_cast<std::size_t>(assignments.size()));
  for (const std::int32_t t : tokens) {
    const std::int64_t begin = assignments.begin(t);
    for (std::int64_t i = begin; i < assignments.begin(t + 1); ++i) {
      order[next[static_cast<std::size_t>(i - begin)]++] = static_cast<std::int32_t>(i);
    }
  }
  return order;
}

/// The assignment at each place of the order that all experts share.
class SharedOrder {
 public:
  SharedOrder(const CapacityArgs& args, const ByToken& assignments)
      : num_tokens_(assignments.num_tokens()), policy_(args.policy) {
    if (policy_ == DropPolicy::kToken || policy_ == DropPolicy::kProbs) return;
    if (policy_ == DropPolicy::kBpr) tokens_ = tokens_by_score(args, assignments);
    if (const auto* dense = std::get_if<DenseAssignments>(&args.assignments)) {
      top_k_ = dense->expert.shape[1];
      return;
    }
    if (policy_ == DropPolicy::kChoice) {
      tokens_.resize(static_cast<std::size_t>(num_tokens_));
      std::iota(tokens_.begin(), tokens_.end(), 0);
    }
    order_ = by_choice(assignments, tokens_);
  }

  [[nodiscard]] std::int64_t operator[](std::int64_t place) const {
    if (policy_ == DropPolicy::kToken || policy_ == DropPolicy::kProbs) return place;
    if (!order_.empty()) return order_[static_cast<std::size_t>(place)];
    const std::int64_t k = place / num_tokens_;
    const std::int64_t t = place % num_tokens_;
    return (policy_ == DropPolicy::kBpr ? tokens_[static_cast<std::size_t>(t)] : t) * top_k_ + k;
  }

 private:
  std::int64_t num_tokens_;
  std::int64_t top_k_ = 0;  ///< Of a dense routing.
  DropPolicy policy_;
  std::vector<std::int32_t> tokens_;
  std::vector<std::int32_t> order_;  ///< Of a list.
};

/// Slots of an expert.
class Limits {
 public:
  explicit Limits(const CapacityArgs& args)
      : first_other_(args.num_experts - args.zero_computation),
        limit_(any_if_0(args.capacity)),
        other_(any_if_0(args.zero_computation_capacity)) {}
  [[nodiscard]] std::int64_t operator()(std::int64_t expert) const {
    return expert < first_other_ ? limit_ : other_;
  }

 private:
  static std::int64_t any_if_0(std::int64_t capacity) {
    return capacity == 0 ? std::numeric_limits<std::int64_t>::max() : capacity;
  }
  std::int64_t first_other_, limit_, other_;
};

/// kProbs: of each expert with too many, drop all but the largest weights.
void keep_largest_weights(const CapacityArgs& args, const ByToken& assignments, const Limits& limit,
                          ChunkedCounts& counts) {
  const std::int64_t num_experts = args.num_experts;
  std::vector<std::int64_t> begin(static_cast<std::size_t>(num_experts) + 1);
  std::partial_sum(args.counts.data, args.counts.data + num_experts, begin.begin() + 1);
  std::vector<std::int32_t> member(static_cast<std::size_t>(begin.back()));
  counts.for_each_chunk([&](std::int64_t first, std::int64_t last, std::int32_t* next) {
    for (std::int64_t i = first; i < last; ++i) {
      const std::int32_t e = assignments.expert(i);
      args.kept[i] = e >= 0 ? 1 : 0;
      if (e < 0) continue;
      member[static_cast<std::size_t>(begin[static_cast<std::size_t>(e)] + next[e]++)] =
          static_cast<std::int32_t>(i);
    }
  });
  parallel_for(args.execution.pool, num_experts, [&](std::int64_t e, int) {
    if (args.counts[e] <= limit(e)) return;
    const auto mine = member.begin() + begin[static_cast<std::size_t>(e)];
    const auto end = mine + args.counts[e];
    std::nth_element(mine, mine + limit(e), end, [&assignments](std::int32_t a, std::int32_t b) {
      const std::uint32_t key_a = sort_key(assignments.weight(a));
      const std::uint32_t key_b = sort_key(assignments.weight(b));
      return key_a != key_b ? key_a > key_b : a < b;
    });
    std::for_each(mine + limit(e), end, [&args](std::int32_t i) { args.kept[i] = 0; });
  });
}

std::optional<std::string> reject(const CapacityArgs& args) {
  if (args.execution.backend != Backend::kCpu) return "needs the backend cpu";
  return std::nullopt;
}

void run(const CapacityArgs& args) {
  const ByToken assignments(args.assignments);
  const Limits limit(args);
  const SharedOrder order(args, assignments);
  ChunkedCounts counts(args.execution.pool, assignments.size(), args.num_experts);
  std::atomic<bool> bad_id{false};
  counts.for_each_chunk([&](std::int64_t first, std::int64_t last, std::int32_t* count) {
    for (std::int64_t place = first; place < last; ++place) {
      const std::int32_t e = assignments.expert(order[place]);
      if (e < -1 || e >= args.num_experts) {
        bad_id = true;
      } else if (e >= 0) {
        ++count[e];
      }
    }
  });
  if (bad_id) assignments.fail_with_first_bad_id(args.num_experts);
  counts.scan(args.counts.data);
  for (std::int64_t e = 0; e < args.num_experts; ++e) {
    args.counts_kept[e] = std::min(args.counts[e], limit(e));
  }
  if (args.policy == DropPolicy::kProbs && args.capacity > 0) {
    return keep_largest_weights(args, assignments, limit, counts);
  }
  counts.for_each_chunk([&](std::int64_t first, std::int64_t last, std::int32_t* rank) {
    for (std::int64_t place = first; place < last; ++place) {
      const std::int64_t i = order[place];
      const std::int32_t e = assignments.expert(i);
      args.kept[i] = e >= 0 && rank[e]++ < limit(e) ? 1 : 0;
    }
  });
}

}  // namespace

const Implementation<CapacityArgs> kCapacityCpu{"cpu.counting", reject, run};

}  // namespace switchyard

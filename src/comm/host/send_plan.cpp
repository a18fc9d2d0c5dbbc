// Everything about an exchange that follows from the routing and the counts alone: the same code
// on every rank, no atomics, no order of arrival.
#include "comm/host/send_plan.hpp"

#include <algorithm>
#include <bit>

namespace switchyard {

ExpertMap make_expert_map(ReductionOrder order, std::int32_t num_ranks) {
  ExpertMap map;
  map.rank.resize(static_cast<std::size_t>(order.num_experts));
  map.group.resize(static_cast<std::size_t>(order.num_experts));
  for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
    const Subtree subtree = subtree_of_rank(order, rank, num_ranks);
    for (std::int32_t g = 0; g < subtree.num_groups; ++g) {
      const std::int32_t group = subtree.first_group + g;
      for (auto e = subtree.order.begin(group); e < subtree.order.begin(group + 1); ++e) {
        map.rank[static_cast<std::size_t>(e)] = rank;
        map.group[static_cast<std::size_t>(e)] = g;
      }
    }
  }
  return map;
}

void make_send_plan(Matrix<const std::int32_t> expert, Matrix<const std::uint8_t> kept,
                    const ExpertMap& map, std::int32_t num_ranks, SendPlan& plan) {
  const std::int64_t num_tokens = expert.shape[0];
  const std::int64_t top_k = expert.shape[1];
  // One bit per rank: at most 64 of them.
  const auto destinations = [&](std::int64_t token) {
    std::uint64_t ranks = 0;
    for (std::int64_t k = 0; k < top_k; ++k) {
      const std::int32_t id = expert.row(token)[k];
      if (id < 0 || (kept.data != nullptr && kept.row(token)[k] == 0)) continue;
      ranks |= std::uint64_t{1} << map.rank[static_cast<std::size_t>(id)];
    }
    return ranks;
  };
  plan.begin.assign(static_cast<std::size_t>(num_ranks) + 1, 0);
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    for (std::uint64_t ranks = destinations(token); ranks != 0; ranks &= ranks - 1) {
      ++plan.begin[static_cast<std::size_t>(std::countr_zero(ranks)) + 1];
    }
  }
  for (std::size_t d = 0; d < static_cast<std::size_t>(num_ranks); ++d) {
    plan.begin[d + 1] += plan.begin[d];
  }
  std::vector<std::int64_t> next(plan.begin.begin(), plan.begin.end() - 1);
  plan.token.resize(static_cast<std::size_t>(plan.begin.back()));
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    for (std::uint64_t ranks = destinations(token); ranks != 0; ranks &= ranks - 1) {
      const auto place = next[static_cast<std::size_t>(std::countr_zero(ranks))]++;
      plan.token[static_cast<std::size_t>(place)] = static_cast<std::int32_t>(token);
    }
  }
}

std::int64_t Placement::first_result(std::int32_t s, std::int32_t d) const {
  std::int64_t first = 0;
  for (std::int32_t before = 0; before < d; ++before) first += sent_rows(s, before);
  return first;
}

void make_placement(const std::vector<std::int64_t>& counts, std::int32_t num_ranks,
                    std::int64_t max_rows, Placement& placement) {
  placement.num_ranks = num_ranks;
  placement.sent = counts;
  placement.begin.assign(counts.size(), 0);
  placement.dropped.assign(static_cast<std::size_t>(num_ranks), 0);
  for (std::int32_t d = 0; d < num_ranks; ++d) {
    std::int64_t rows = 0;
    for (std::int32_t s = 0; s < num_ranks; ++s) {
      const std::size_t pair = placement.index(s, d);
      placement.begin[pair] = rows;
      placement.sent[pair] = std::min(counts[pair], max_rows - rows);
      placement.dropped[static_cast<std::size_t>(d)] += counts[pair] - placement.sent[pair];
      rows += placement.sent[pair];
    }
  }
}

}  // namespace switchyard

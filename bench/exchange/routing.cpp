// Who goes where, and how many rows that makes for the rank that has most of them.
#include "bench/exchange/routing.hpp"

#include <algorithm>
#include <numeric>
#include <random>

#include "bench/cases/synthetic.hpp"

namespace switchyard {
namespace {

std::vector<std::int32_t> random_experts(const ExchangeRoutingArgs& args, int rank) {
  std::mt19937 random(static_cast<unsigned>(rank) + 1);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(args.num_experts));
  std::iota(ids.begin(), ids.end(), 0);
  std::vector<std::int32_t> expert;
  for (std::int64_t t = 0; t < args.num_tokens; ++t) {
    std::shuffle(ids.begin(), ids.end(), random);
    expert.insert(expert.end(), ids.begin(), ids.begin() + args.top_k);
  }
  return expert;
}

/// Rows to each rank, one a token.
std::vector<std::int64_t> rows_to_ranks(const std::vector<std::int32_t>& expert,
                                        const ExchangeRoutingArgs& args) {
  const auto top_k = static_cast<std::size_t>(args.top_k);
  std::vector<std::int64_t> rows(static_cast<std::size_t>(args.num_ranks), 0);
  for (std::size_t t = 0; t < expert.size(); t += top_k) {
    std::uint64_t to = 0;
    for (std::size_t k = 0; k < top_k; ++k) {
      to |= std::uint64_t{1} << (((expert[t + k] + 1) * args.num_ranks - 1) / args.num_experts);
    }
    for (int rank = 0; rank < args.num_ranks; ++rank) {
      rows[static_cast<std::size_t>(rank)] += static_cast<std::int64_t>(to >> rank & 1U);
    }
  }
  return rows;
}

}  // namespace

std::int64_t ExchangeRouting::most_sent() const {
  std::int64_t most = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const auto* of_rank = rows.data() + std::ptrdiff_t{rank} * num_ranks;
    most = std::max(most,
                    std::accumulate(of_rank, of_rank + num_ranks, std::int64_t{0}) - of_rank[rank]);
  }
  return most;
}

std::int64_t ExchangeRouting::most_received() const {
  std::int64_t most = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    std::int64_t received = 0;
    for (int from = 0; from < num_ranks; ++from) {
      if (from != rank) received += rows.data()[std::ptrdiff_t{from} * num_ranks + rank];
    }
    most = std::max(most, received);
  }
  return most;
}

std::int64_t ExchangeRouting::most_with_own() const {
  std::int64_t most = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    std::int64_t received = 0;
    for (int from = 0; from < num_ranks; ++from) {
      received += rows.data()[std::ptrdiff_t{from} * num_ranks + rank];
    }
    most = std::max(most, received);
  }
  return most;
}

double expected_rows_of_pair(std::int64_t num_tokens, std::int32_t num_experts, std::int32_t top_k,
                             int num_ranks) {
  const std::int32_t others = num_experts - num_experts / num_ranks;
  double none = 1;  // that all K are among the other ranks' experts
  for (std::int32_t k = 0; k < top_k; ++k) {
    none *= static_cast<double>(std::max(0, others - k)) / static_cast<double>(num_experts - k);
  }
  return static_cast<double>(num_tokens) * (1 - none);
}

ExchangeRouting make_exchange_routing(const ExchangeRoutingArgs& args) {
  ExchangeRouting routing{.num_ranks = args.num_ranks};
  if (args.skew == "uniform") {
    for (int rank = 0; rank < args.num_ranks; ++rank) {
      routing.expert.push_back(random_experts(args, rank));
    }
  } else {
    // One draw for all ranks: what is hot for one is hot for the others.
    const std::vector<std::int32_t> all =
        bench::synthetic_routing(args.num_tokens * args.num_ranks, args.num_experts, args.top_k,
                                 args.skew, 1)
            .expert;
    const std::int64_t of_rank = args.num_tokens * args.top_k;
    for (int rank = 0; rank < args.num_ranks; ++rank) {
      const auto begin = all.begin() + rank * of_rank;
      routing.expert.emplace_back(begin, begin + of_rank);
    }
  }
  for (const std::vector<std::int32_t>& expert : routing.expert) {
    const std::vector<std::int64_t> rows = rows_to_ranks(expert, args);
    routing.rows.insert(routing.rows.end(), rows.begin(), rows.end());
  }
  return routing;
}

}  // namespace switchyard

// Routing by seed and rank as published; what must come out by plain loops.
#include "bench/exchange/transport_data.hpp"

#include <algorithm>
#include <cmath>

#include "core/half.hpp"
#include "switchyard/combine.hpp"
#include "switchyard/thread_pool.hpp"
#include "testkit/random.hpp"

namespace switchyard::bench {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

}  // namespace

TransportData::TransportData(const ExchangeShape& which, int ranks, bool every_token)
    : shape(which), num_ranks(ranks) {
  for (int rank = 0; rank < ranks; ++rank) {
    const std::uint64_t seed = shape.seed + static_cast<std::uint64_t>(rank);
    Random random(seed);
    const auto range = static_cast<std::uint64_t>(std::max<std::int64_t>(1, shape.max_tokens - 1));
    const std::int64_t drawn = 1 + static_cast<std::int64_t>(random.bits() % range);
    num_tokens.push_back(every_token ? shape.max_tokens : drawn);
    routing.push_back(
        synthetic_routing(num_tokens.back(), shape.num_experts, shape.top_k, "uniform", seed));
    for (float& weight : routing.back().weight) weight = static_cast<float>(random.uniform());
  }
}

int TransportData::owner(std::int32_t expert) const {
  int rank = 0;
  while (first_expert_of(shape.num_experts, num_ranks, rank + 1) <= expert) ++rank;
  return rank;
}

std::int64_t TransportData::rows(int source, int target) const {
  const std::vector<std::int32_t>& experts = routing[at(source)].expert;
  std::int64_t rows = 0;
  for (std::size_t t = 0; t < experts.size(); t += at(shape.top_k)) {
    rows += std::any_of(&experts[t], &experts[t] + shape.top_k,
                        [&](std::int32_t expert) { return owner(expert) == target; })
                ? 1
                : 0;
  }
  return rows;
}

std::int64_t TransportData::assignments(int source, int target) const {
  const std::vector<std::int32_t>& experts = routing[at(source)].expert;
  return std::count_if(experts.begin(), experts.end(),
                       [&](std::int32_t expert) { return owner(expert) == target; });
}

std::int64_t TransportData::largest_bucket() const {
  std::vector<std::int64_t> rows(at(shape.num_experts));
  for (const SyntheticRouting& of_rank : routing) {
    for (const std::int32_t expert : of_rank.expert) ++rows[at(expert)];
  }
  return *std::max_element(rows.begin(), rows.end());
}

std::vector<float> expected_rows(const TransportData& data, int rank,
                                 const std::vector<std::byte>& x, ThreadPool* pool) {
  const ExchangeShape& shape = data.shape;
  const SyntheticRouting& routing = data.routing[at(rank)];
  const std::int64_t num_tokens = data.num_tokens[at(rank)];
  std::vector<float> expected(at(num_tokens * shape.hidden));
  parallel_for(pool, num_tokens, [&](std::int64_t token, int) {
    for (std::int64_t h = 0; h < shape.hidden; ++h) {
      const float value = load_float(x.data(), shape.dtype, token * shape.hidden + h);
      double sum = 0;
      for (std::int64_t k = 0; k < shape.top_k; ++k) {
        const std::size_t i = at(token * shape.top_k + k);
        const auto factor = static_cast<float>(1 + data.owner(routing.expert[i]));
        sum += double{routing.weight[i]} * round_to(shape.dtype, value * factor);
      }
      expected[at(token * shape.hidden + h)] = static_cast<float>(sum);
    }
  });
  return expected;
}

double largest_error(const std::vector<float>& expected, const std::byte* out, DType dtype) {
  double largest = 0;
  for (std::int64_t i = 0; i < std::ssize(expected); ++i) {
    const double want = expected[at(i)];
    const double share =
        std::fabs(load_float(out, dtype, i) - want) / (5e-3 + 1e-2 * std::fabs(want));
    if (!(share <= largest)) largest = std::isnan(share) ? HUGE_VAL : share;
  }
  return largest;
}

}  // namespace switchyard::bench

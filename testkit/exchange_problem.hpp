#pragma once

// Random exchanges whose expected outcome every rank can compute by itself, by plain loops over the
// inputs of all ranks: who receives which row, what the traffic is, what comes home.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/fp8.hpp"
#include "core/half.hpp"
#include "switchyard/dispatch.hpp"

namespace switchyard {

struct ExchangeProblem {
  std::string name;
  int num_ranks = 2;
  ExpertParallelConfig config;
  std::vector<std::int64_t> tokens{};  ///< Of rank r: tokens[r % size]; empty: max_tokens.
  enum class Routing { kRandom, kRepeated, kOneExpert, kUnused } routing = Routing::kRandom;
  bool drop_some = false;
  std::uint32_t seed = 1;

  [[nodiscard]] std::int64_t tokens_of(int rank) const {
    return tokens.empty() ? config.max_tokens
                          : tokens[static_cast<std::size_t>(rank) % tokens.size()];
  }
  [[nodiscard]] DType dispatch_wire() const { return config.dispatch_wire.value_or(config.dtype); }
  [[nodiscard]] int rank_of(std::int32_t expert) const {
    int rank = 0;
    while ((rank + 1) * std::int64_t{config.num_experts} / num_ranks <= expert) ++rank;
    return rank;
  }
};

/// What one rank brings to exchange number `epoch`.
struct RankInput {
  std::int64_t num_tokens = 0;
  std::vector<std::byte> x;
  std::vector<std::int32_t> expert;
  std::vector<float> weight;
  std::vector<std::uint8_t> kept;
};

inline RankInput make_input(const ExchangeProblem& problem, int rank, int epoch) {
  const ExpertParallelConfig& config = problem.config;
  std::mt19937 random(problem.seed + 1000U * static_cast<std::uint32_t>(rank) +
                      7919U * static_cast<std::uint32_t>(epoch));
  const auto uniform = [&] { return static_cast<float>(random() % 20001U) * 1e-4F - 1.0F; };
  RankInput input;
  input.num_tokens = problem.tokens_of(rank);
  input.x.resize(
      static_cast<std::size_t>(input.num_tokens * config.hidden * size_of(config.dtype)));
  for (std::int64_t i = 0; i < input.num_tokens * config.hidden; ++i) {
    store_float(input.x.data(), config.dtype, i, uniform());
  }
  std::vector<std::int32_t> ids(static_cast<std::size_t>(config.num_experts));
  for (std::int32_t e = 0; e < config.num_experts; ++e) ids[static_cast<std::size_t>(e)] = e;
  for (std::int64_t t = 0; t < input.num_tokens; ++t) {
    std::shuffle(ids.begin(), ids.end(), random);
    for (std::int32_t k = 0; k < config.top_k; ++k) {
      std::int32_t id = ids[static_cast<std::size_t>(k) % ids.size()];
      switch (problem.routing) {
        case ExchangeProblem::Routing::kRandom: break;
        case ExchangeProblem::Routing::kRepeated:
          id = ids[static_cast<std::size_t>(k / 2) % ids.size()];
          break;
        case ExchangeProblem::Routing::kOneExpert: id = config.num_experts - 1; break;
        case ExchangeProblem::Routing::kUnused: id = random() % 2U == 0 ? -1 : id; break;
      }
      input.expert.push_back(id);
      input.weight.push_back(id < 0 ? std::nanf("") : uniform());
      input.kept.push_back(problem.drop_some ? static_cast<std::uint8_t>(random() % 3U != 0) : 1);
    }
  }
  return input;
}

/// A row of floats after its way over a wire of this type, by the definition of the types.
inline void travel(DType wire, float* row, std::int64_t n) {
  if (wire != DType::kF8E4M3) {
    for (std::int64_t i = 0; i < n; ++i) row[i] = round_to(wire, row[i]);
    return;
  }
  for (std::int64_t begin = 0; begin < n; begin += 128) {
    const std::int64_t end = std::min<std::int64_t>(n, begin + 128);
    float amax = std::ldexp(1.0F, -100);
    for (std::int64_t i = begin; i < end; ++i) amax = std::max(amax, std::fabs(row[i]));
    for (std::int64_t i = begin; i < end; ++i) {
      row[i] = e4m3_to_float(float_to_e4m3(row[i] * (448.0F / amax))) * (amax / 448.0F);
    }
  }
}

/// The rows that rank `to` must receive, and from whom.
struct ExpectedRows {
  std::vector<std::int64_t> token;  ///< At its source.
  std::vector<int> source;
  std::vector<float> x;              ///< [N, H] as received.
  std::vector<std::int32_t> expert;  ///< [N, K].
  std::vector<float> weight;         ///< [N, K].
  std::int64_t dropped = 0;
  [[nodiscard]] std::int64_t rows() const { return std::ssize(token); }
};

inline ExpectedRows expected_rows(const ExchangeProblem& problem,
                                  const std::vector<RankInput>& inputs, int to) {
  const ExpertParallelConfig& config = problem.config;
  ExpectedRows out;
  for (int source = 0; source < problem.num_ranks; ++source) {
    const RankInput& input = inputs[static_cast<std::size_t>(source)];
    for (std::int64_t t = 0; t < input.num_tokens; ++t) {
      std::vector<std::int32_t> ids;
      std::vector<float> weights;
      bool any = false;
      for (std::int32_t k = 0; k < config.top_k; ++k) {
        const auto i = static_cast<std::size_t>(t * config.top_k + k);
        const std::int32_t id = input.expert[i];
        const bool here = id >= 0 && input.kept[i] != 0 && problem.rank_of(id) == to;
        ids.push_back(here ? id : -1);
        weights.push_back(here ? input.weight[i] : 0.0F);
        any = any || here;
      }
      if (!any) continue;
      if (config.max_recv_rows > 0 && out.rows() == config.max_recv_rows) {
        ++out.dropped;
        continue;
      }
      out.token.push_back(t);
      out.source.push_back(source);
      out.expert.insert(out.expert.end(), ids.begin(), ids.end());
      out.weight.insert(out.weight.end(), weights.begin(), weights.end());
      std::vector<float> row;
      for (std::int64_t h = 0; h < config.hidden; ++h) {
        row.push_back(load_float(input.x.data(), config.dtype, t * config.hidden + h));
      }
      travel(problem.dispatch_wire(), row.data(), config.hidden);
      for (const float value : row) out.x.push_back(round_to(config.dtype, value));
    }
  }
  return out;
}

/// Groups of the reduction that one rank holds, and the first expert of group g of rank r.
inline std::int32_t groups_per_rank(const ExchangeProblem& problem) {
  const std::int32_t groups = problem.config.reduction_groups;
  return groups % problem.num_ranks == 0 ? groups / problem.num_ranks : 1;
}
inline std::int32_t group_begin(const ExchangeProblem& problem, std::int64_t global_group) {
  const std::int64_t groups = std::int64_t{groups_per_rank(problem)} * problem.num_ranks;
  return static_cast<std::int32_t>(global_group * problem.config.num_experts / groups);
}

/// Sum of 2^n floats by the tree of neighbours.
inline float tree_sum(std::vector<float> parts) {
  while ((parts.size() & (parts.size() - 1)) != 0) parts.push_back(0.0F);
  while (parts.size() > 1) {
    for (std::size_t i = 0; i < parts.size() / 2; ++i) parts[i] = parts[2 * i] + parts[2 * i + 1];
    parts.resize(parts.size() / 2);
  }
  return parts.front();
}

/// What expert `e` of these tests makes of a value.
inline float expert_of_test(bool identity, std::int32_t e, float value) {
  return identity ? value : value * (1.0F + 0.25F * static_cast<float>(e % 5));
}

/// Partial sums of a row, one per group of the rank: [groups_per_rank, H].
inline std::vector<float> group_sums(const ExchangeProblem& problem, int rank, bool identity,
                                     const float* x, const std::int32_t* ids,
                                     const float* weights) {
  const std::int64_t hidden = problem.config.hidden;
  const std::int32_t groups = groups_per_rank(problem);
  std::vector<float> sums(static_cast<std::size_t>(groups * hidden), 0.0F);
  for (std::int32_t g = 0; g < groups; ++g) {
    const std::int64_t global = std::int64_t{rank} * groups + g;
    for (auto e = group_begin(problem, global); e < group_begin(problem, global + 1); ++e) {
      for (std::int32_t k = 0; k < problem.config.top_k; ++k) {
        if (ids[k] != e) continue;
        for (std::int64_t h = 0; h < hidden; ++h) {
          float& sum = sums[static_cast<std::size_t>(g * hidden + h)];
          sum = std::fma(weights[k], expert_of_test(identity, e, x[h]), sum);
        }
      }
    }
  }
  return sums;
}

/// The rows that a rank gives to combine(): sums over its groups, or one row per group.
inline std::vector<float> partial_rows(const ExchangeProblem& problem, int rank, bool identity,
                                       const float* x, const std::int32_t* ids,
                                       const float* weights) {
  std::vector<float> sums = group_sums(problem, rank, identity, x, ids, weights);
  if (problem.config.rank_invariant) return sums;
  const std::int64_t hidden = problem.config.hidden;
  std::vector<float> row(static_cast<std::size_t>(hidden));
  for (std::int64_t h = 0; h < hidden; ++h) {
    std::vector<float> parts;
    for (std::int32_t g = 0; g < groups_per_rank(problem); ++g) {
      parts.push_back(sums[static_cast<std::size_t>(g * hidden + h)]);
    }
    row[static_cast<std::size_t>(h)] = tree_sum(parts);
  }
  return row;
}

}  // namespace switchyard

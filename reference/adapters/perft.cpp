#include "reference/adapters/perft.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "reference/expert.hpp"

namespace switchyard::reference {
namespace {

struct Choice {
  std::int32_t adapter;
  double weight;
};

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

double dot(const double* a, const double* b, std::int64_t n) {
  return std::inner_product(a, a + n, b, 0.0);
}

/// The K largest logits, ties to the lower adapter, with their softmax over all, or, renormalised,
/// over the chosen.
std::vector<Choice> choose(const PerftProblem& p, std::int64_t t) {
  const TopKRouter& router = p.config.router.as_top_k();
  const std::int64_t hidden = p.config.hidden;
  std::vector<double> scores;
  for (std::int32_t j = 0; j < p.config.num_adapters; ++j) {
    scores.push_back(std::exp(dot(&p.gate[at(j * hidden)], &p.x[at(t * hidden)], hidden)));
  }
  std::vector<std::int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int32_t i, std::int32_t j) { return scores[at(i)] > scores[at(j)]; });
  order.resize(at(router.top_k));
  if (!p.expert.empty()) {
    order.assign(&p.expert[at(t * router.top_k)], &p.expert[at(t * router.top_k)] + router.top_k);
  }
  double sum = std::accumulate(scores.begin(), scores.end(), 0.0);
  if (router.renormalize) {
    sum = 0;
    for (const std::int32_t j : order) sum += scores[at(j)];
  }
  std::vector<Choice> choices;
  for (const std::int32_t j : order) {
    choices.push_back({j, double{router.scale} * scores[at(j)] / sum});
  }
  return choices;
}

std::vector<Choice> choices_of(const PerftProblem& p, std::int64_t t) {
  std::vector<Choice> choices;
  switch (p.config.kind) {
    case PerftKind::kRouted: return choose(p, t);
    case PerftKind::kEmbedded: {
      const std::int64_t columns = std::ssize(p.expert) / p.num_tokens;
      for (std::int64_t i = t * columns; i < (t + 1) * columns; ++i) {
        if (p.expert[at(i)] >= 0) choices.push_back({p.expert[at(i)], p.weight[at(i)]});
      }
      return choices;
    }
    case PerftKind::kDense:
    case PerftKind::kShared:
      for (std::int32_t j = 0; j < p.config.num_adapters; ++j) choices.push_back({j, 1.0});
  }
  return choices;
}

}  // namespace

PerftResult perft(const PerftProblem& p) {
  const std::int64_t hidden = p.config.hidden, rank = p.config.rank;
  const double scale = double{p.config.alpha} / static_cast<double>(rank);
  PerftResult result{.y = p.base, .expert = {}};
  for (std::int64_t t = 0; t < p.num_tokens; ++t) {
    for (const Choice& choice : choices_of(p, t)) {
      if (p.config.kind == PerftKind::kRouted) result.expert.push_back(choice.adapter);
      std::vector<double> inner;
      for (std::int64_t i = 0; i < rank; ++i) {
        const double z =
            dot(&p.a[at((choice.adapter * rank + i) * hidden)], &p.x[at(t * hidden)], hidden);
        inner.push_back(inner_value(p.config.experts(), {z, 0}, {}).value);
      }
      for (std::int64_t h = 0; h < hidden; ++h) {
        const double* const row = &p.b[at((choice.adapter * hidden + h) * rank)];
        result.y[at(t * hidden + h)] += scale * choice.weight * dot(row, inner.data(), rank);
      }
    }
  }
  return result;
}

}  // namespace switchyard::reference

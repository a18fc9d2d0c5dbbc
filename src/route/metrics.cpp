// Statistics of a routing that somebody asks for when a call is over: on one thread, in double.
#include "switchyard/routing/metrics.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/shape_check.hpp"
#include "route/cpu/token_scores.hpp"
#include "route/token_places.hpp"

namespace switchyard::metrics {
namespace {

/// -p ln p.
double surprise(double p) { return p > 0 ? -p * std::log(p) : 0; }

std::int64_t sum_of(const std::int64_t* begin, const std::int64_t* end) {
  return std::accumulate(begin, end, std::int64_t{0});
}

void check_counts(const Vector<const std::int64_t>& counts) {
  require(counts.shape[0] >= 1, "counts are of no expert");
  for (std::int64_t e = 0; e < counts.shape[0]; ++e) {
    require(counts[e] >= 0, "counts[{}] is {}", e, counts[e]);
  }
}

void check_routed(const Routed& a) {
  require(a.num_experts >= 1, "num_experts={}, want at least 1", a.num_experts);
  require_assignments(a.assignments, a.num_experts);
  const TokenPlaces places(a.assignments);
  if (places.weight().data != nullptr) {
    require_shape("weight", places.weight(), places.expert().shape[0]);
  }
  if (a.kept.data != nullptr) require_shape("kept", a.kept, places.expert().shape[0]);
  if (a.logits.data != nullptr) {
    require(a.logits.shape[1] >= a.num_experts,
            "logits have {} columns, want at least {}, num_experts", a.logits.shape[1],
            a.num_experts);
    require_shape("logits", a.logits, places.size(), a.logits.shape[1]);
  }
  if (a.counts.data != nullptr) require_shape("counts", a.counts, a.num_experts);
}

double weight_entropy(const TokenPlaces& places) {
  double all = 0;
  for (std::int64_t t = 0; t < places.size(); ++t) {
    double sum = 0;
    const auto for_used = [&](const auto& visit) {
      for (std::int64_t i = places.begin(t); i < places.begin(t + 1); ++i) {
        if (places.expert()[i] >= 0) visit(double{places.weight()[i]});
      }
    };
    for_used([&](double weight) { sum += weight; });
    if (sum > 0) for_used([&](double weight) { all += surprise(weight / sum); });
  }
  return places.size() == 0 ? 0 : all / static_cast<double>(places.size());
}

double share_gone(double left, double all) { return all > 0 ? 1 - left / all : 0; }

}  // namespace

std::vector<std::int64_t> counts(const Routed& a) {
  check_routed(a);
  if (a.counts.data != nullptr) return {a.counts.data, a.counts.data + a.num_experts};
  std::vector<std::int64_t> found(static_cast<std::size_t>(a.num_experts));
  const TokenPlaces places(a.assignments);
  for (std::int64_t i = 0; i < places.expert().shape[0]; ++i) {
    if (places.expert()[i] >= 0) ++found[static_cast<std::size_t>(places.expert()[i])];
  }
  return found;
}

Load load(Vector<const std::int64_t> counts) {
  check_counts(counts);
  const std::int64_t size = counts.shape[0];
  std::vector<std::int64_t> ascending(counts.data, counts.data + size);
  std::sort(ascending.begin(), ascending.end());
  Load found{.dead_experts =
                 std::upper_bound(ascending.begin(), ascending.end(), 0) - ascending.begin()};
  const auto total = static_cast<double>(sum_of(counts.data, counts.data + size));
  if (total == 0) return found;
  const auto experts = static_cast<double>(size);
  const double mean = total / experts;
  double variance = 0;
  double entropy = 0;
  double ranked = 0;  // sum over pairs of |n_i - n_j| is twice sum_i (2 i - E + 1) n_i
  for (std::int64_t i = 0; i < size; ++i) {
    const auto n = static_cast<double>(ascending[static_cast<std::size_t>(i)]);
    variance += (n - mean) * (n - mean) / experts;
    entropy += surprise(n / total);
    ranked += static_cast<double>(2 * i - size + 1) * n;
  }
  found.cv = std::sqrt(variance) / mean;
  found.cv_floor = std::sqrt((experts - 1) / total);
  found.max_over_mean = static_cast<double>(ascending.back()) / mean;
  found.min_over_mean = static_cast<double>(ascending.front()) / mean;
  found.kl = std::max(0.0, std::log(experts) - entropy);
  found.entropy = size > 1 ? entropy / std::log(experts) : 1;
  found.effective_experts = std::exp(entropy);
  found.gini = ranked / (experts * total);
  return found;
}

double rank_imbalance(Vector<const std::int64_t> counts, std::int32_t ranks) {
  check_counts(counts);
  const std::int64_t size = counts.shape[0];
  require(ranks >= 1 && ranks <= size, "ranks={} of {} experts, want 1 to {}", ranks, size, size);
  std::int64_t most = 0;
  for (std::int64_t r = 0; r < ranks; ++r) {
    most = std::max(most,
                    sum_of(counts.data + r * size / ranks, counts.data + (r + 1) * size / ranks));
  }
  const std::int64_t total = sum_of(counts.data, counts.data + size);
  return total == 0 ? 0 : static_cast<double>(most) * ranks / static_cast<double>(total);
}

Entropies entropies(const Routed& a) {
  check_routed(a);
  require(a.logits.data != nullptr || num_tokens(a.assignments) == 0,
          "entropies are of logits, and there are none");
  const TokenPlaces places(a.assignments);
  const auto tokens = static_cast<double>(std::max<std::int64_t>(1, places.size()));
  const std::int64_t columns = std::max<std::int64_t>(a.num_experts, a.logits.shape[1]);
  TokenScores scores(static_cast<std::int32_t>(columns), a.score);
  std::vector<double> mean(static_cast<std::size_t>(columns));
  Entropies found;
  for (std::int64_t t = 0; t < places.size(); ++t) {
    scores.read(a.logits.row(t));
    found.router += scores.entropy() / tokens;
    for (std::size_t e = 0; e < mean.size(); ++e) mean[e] += scores.share(e) / tokens;
  }
  for (const double p : mean) found.marginal += surprise(p);
  found.information = found.marginal - found.router;
  if (places.weight().data != nullptr) found.weights = weight_entropy(places);
  return found;
}

Drops drops(const Routed& a) {
  check_routed(a);
  const TokenPlaces places(a.assignments);
  require(a.kept.data != nullptr || places.expert().shape[0] == 0,
          "drops are of what is kept, and that is missing");
  struct Sums {
    double used = 0, left = 0;
  };
  Sums assignments;
  Sums mass;
  std::vector<Sums> choices;
  double without = 0;
  for (std::int64_t t = 0; t < places.size(); ++t) {
    const std::int64_t begin = places.begin(t);
    const std::int64_t end = places.begin(t + 1);
    choices.resize(std::max(choices.size(), static_cast<std::size_t>(end - begin)));
    Sums of_token;
    for (std::int64_t i = begin; i < end; ++i) {
      if (places.expert()[i] < 0) continue;
      const double left = a.kept[i] != 0 ? 1 : 0;
      const double weight = places.weight().data == nullptr ? 0 : double{places.weight()[i]};
      Sums& choice = choices[static_cast<std::size_t>(i - begin)];
      ++choice.used, choice.left += left;
      ++of_token.used, of_token.left += left;
      mass.used += weight, mass.left += weight * left;
    }
    if (of_token.used > 0 && of_token.left == 0) ++without;
    assignments.used += of_token.used, assignments.left += of_token.left;
  }
  const auto tokens = static_cast<double>(std::max<std::int64_t>(1, places.size()));
  Drops found{.assignments = share_gone(assignments.left, assignments.used),
              .tokens = without / tokens};
  if (places.weight().data != nullptr) found.mass = share_gone(mass.left, mass.used);
  for (const Sums& choice : choices) {
    found.by_choice.push_back(share_gone(choice.left, choice.used));
  }
  return found;
}

double padding_waste(std::int64_t rows_used, std::int64_t rows_computed) {
  require(rows_used >= 0 && rows_used <= rows_computed, "{} rows are used of {} that are computed",
          rows_used, rows_computed);
  return share_gone(static_cast<double>(rows_used), static_cast<double>(rows_computed));
}

std::vector<double> coactivation(const Routed& a) {
  check_routed(a);
  const TokenPlaces places(a.assignments);
  const auto size = static_cast<std::size_t>(a.num_experts);
  std::vector<double> both(size * size);
  std::vector<std::int32_t> chosen;
  for (std::int64_t t = 0; t < places.size(); ++t) {
    chosen.assign(places.expert().data + places.begin(t),
                  places.expert().data + places.begin(t + 1));
    std::sort(chosen.begin(), chosen.end());
    chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
    if (!chosen.empty() && chosen.front() < 0) chosen.erase(chosen.begin());
    for (const std::int32_t i : chosen) {
      for (const std::int32_t j : chosen) {
        ++both[static_cast<std::size_t>(i) * size + static_cast<std::size_t>(j)];
      }
    }
  }
  for (std::size_t i = 0; i < size; ++i) {
    const double tokens = both[i * size + i];
    for (std::size_t j = 0; j < size && tokens > 0; ++j) both[i * size + j] /= tokens;
  }
  return both;
}

double churn(const AnyAssignments& before, const AnyAssignments& after) {
  const TokenPlaces a(before);
  const TokenPlaces b(after);
  require(a.size() == b.size(), "routings are of {} and {} tokens: want the same ones", a.size(),
          b.size());
  double used = 0;
  double same = 0;
  for (std::int64_t t = 0; t < a.size(); ++t) {
    const std::int32_t* const begin = b.expert().data + b.begin(t);
    const std::int32_t* const end = b.expert().data + b.begin(t + 1);
    for (std::int64_t i = a.begin(t); i < a.begin(t + 1); ++i) {
      if (a.expert()[i] < 0) continue;
      ++used;
      if (std::find(begin, end, a.expert()[i]) != end) ++same;
    }
  }
  return share_gone(same, used);
}

Routing routing(const Routed& a, std::int32_t ranks) {
  Routing all{.counts = counts(a)};
  const Vector<const std::int64_t> view{all.counts.data(), {std::ssize(all.counts)}};
  all.load = load(view);
  if (a.logits.data != nullptr) all.entropies = entropies(a);
  if (a.kept.data != nullptr) all.drops = drops(a);
  if (ranks != 1) all.rank_imbalance = rank_imbalance(view, ranks);
  return all;
}

}  // namespace switchyard::metrics

// What a token's type says of its experts, beside what chance would.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "core/check.hpp"
#include "core/splitmix64.hpp"
#include "route/token_places.hpp"
#include "switchyard/routing/metrics.hpp"

namespace switchyard::metrics {
namespace {

/// Counts of pairs (row, column) and what follows from them.
class Joint {
 public:
  Joint(std::size_t rows, std::size_t cols) : rows_(rows), cols_(cols), counts_(rows * cols) {}

  void clear() { std::fill(counts_.begin(), counts_.end(), 0); }
  void add(std::size_t row, std::size_t col) { ++counts_[row * cols_ + col]; }

  [[nodiscard]] double total() const {
    return std::accumulate(counts_.begin(), counts_.end(), 0.0);
  }
  [[nodiscard]] std::ptrdiff_t pairs() const { return used(counts_); }
  [[nodiscard]] std::vector<double> by_row() const {
    std::vector<double> sums(rows_);
    for (std::size_t i = 0; i < counts_.size(); ++i) sums[i / cols_] += counts_[i];
    return sums;
  }
  [[nodiscard]] std::vector<double> by_col() const {
    std::vector<double> sums(cols_);
    for (std::size_t i = 0; i < counts_.size(); ++i) sums[i % cols_] += counts_[i];
    return sums;
  }
  [[nodiscard]] double information() const {
    return entropy(by_row()) + entropy(by_col()) - entropy(counts_);
  }

  [[nodiscard]] static std::ptrdiff_t used(const std::vector<double>& counts) {
    return std::ssize(counts) - std::count(counts.begin(), counts.end(), 0.0);
  }
  [[nodiscard]] static double entropy(const std::vector<double>& counts) {
    const double all = std::accumulate(counts.begin(), counts.end(), 0.0);
    double sum = 0;
    for (const double n : counts) {
      if (n > 0) sum -= n / all * std::log(n / all);
    }
    return sum;
  }

 private:
  std::size_t rows_, cols_;
  std::vector<double> counts_;
};

/// Types as 0, 1, ... in ascending order.
struct Numbered {
  std::vector<std::size_t> of_token;
  std::size_t kinds = 0;
};

Numbered numbered(Vector<const std::int64_t> types) {
  std::vector<std::int64_t> kinds(types.data, types.data + types.shape[0]);
  std::sort(kinds.begin(), kinds.end());
  kinds.erase(std::unique(kinds.begin(), kinds.end()), kinds.end());
  Numbered found{.of_token = {}, .kinds = kinds.size()};
  for (std::int64_t t = 0; t < types.shape[0]; ++t) {
    const auto place = std::lower_bound(kinds.begin(), kinds.end(), types[t]) - kinds.begin();
    found.of_token.push_back(static_cast<std::size_t>(place));
  }
  return found;
}

/// The same order on every machine, which std::shuffle does not promise.
void shuffle(std::vector<std::size_t>& values, std::uint64_t& state) {
  for (std::size_t left = values.size(); left > 1; --left) {
    const std::uint64_t random = splitmix64_mix(state += kSplitMix64Step);
    std::swap(values[left - 1], values[random % left]);
  }
}

}  // namespace

Information information(Vector<const std::int64_t> types, const Routed& a, int permutations,
                        std::uint64_t seed) {
  require(permutations >= 0, "permutations={} is negative", permutations);
  require(a.num_experts >= 1, "num_experts={}, want at least 1", a.num_experts);
  require_assignments(a.assignments, a.num_experts);
  const TokenPlaces places(a.assignments);
  require(types.shape[0] == places.size(), "types are of {} tokens, the routing of {}",
          types.shape[0], places.size());
  Numbered numbers = numbered(types);
  Joint joint(numbers.kinds, static_cast<std::size_t>(a.num_experts));
  const auto count = [&] {
    joint.clear();
    for (std::int64_t t = 0; t < places.size(); ++t) {
      for (std::int64_t i = places.begin(t); i < places.begin(t + 1); ++i) {
        const std::int32_t e = places.expert()[i];
        if (e >= 0)
          joint.add(numbers.of_token[static_cast<std::size_t>(t)], static_cast<std::size_t>(e));
      }
    }
  };
  count();
  const double total = joint.total();
  require(total > 0, "information of a routing in which no token has an expert");
  const std::vector<double> rows = joint.by_row();
  const std::vector<double> cols = joint.by_col();
  const auto cells = joint.pairs() - Joint::used(rows) - Joint::used(cols) + 1;
  const double smaller = std::min(Joint::entropy(rows), Joint::entropy(cols));
  Information found{.plug_in = joint.information(),
                    .bias = static_cast<double>(cells) / (2 * total)};
  found.corrected = found.plug_in - found.bias;
  found.normalised = smaller > 0 ? found.plug_in / smaller : 0;
  if (permutations == 0) return found;
  double sum = 0;
  int as_much = 1;  // the data itself
  std::uint64_t state = splitmix64_mix(seed);
  for (int i = 0; i < permutations; ++i) {
    shuffle(numbers.of_token, state);
    count();
    const double by_chance = joint.information();
    sum += by_chance;
    if (by_chance >= found.plug_in - 1e-12) ++as_much;
  }
  found.null_mean = sum / permutations;
  found.p = static_cast<double>(as_much) / (1 + permutations);
  return found;
}

}  // namespace switchyard::metrics

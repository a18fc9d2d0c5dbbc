// Chain-of-Experts: each iteration as a layer of its own against the reference, on what the ones
// before have made; then the chain against these, by bits.
#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "verify/check_backward.hpp"
#include "verify/check_layer.hpp"

namespace switchyard::verify {
namespace {

/// An iteration on the tokens `x` [T, H] f32.
Problem iteration(const Problem& problem, std::int32_t number, const std::vector<float>& x) {
  Problem one = problem;
  one.model = iteration_of(problem.model, number);
  one.test.layer = one.model.config;
  one.test.tokens = one.test.output = DType::kF32;
  one.tokens = x;
  return one;
}

/// What goes on: what was made, with an inner residual added to what was given.
void go_on(const ChainConfig& chain, const std::vector<float>& made, std::vector<float>& x) {
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = chain.inner_residual ? x[i] + made[i] : made[i];
  }
}

/// NaNs are alike.
bool same(float a, float b) {
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b) ||
         (std::isnan(a) && std::isnan(b));
}

std::string compare(const std::string& name, DType dtype, std::span<const std::byte> have,
                    std::span<const float> want) {
  const std::vector<float> values = decode(dtype, have);
  if (values.size() != want.size()) {
    return fmt::format("{} of the chain has {} values, want {}", name, values.size(), want.size());
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float rounded = round_to(dtype, want[i]);
    // A sum that begins with +0 is +0 where the other is -0.
    if (same(values[i], rounded) || (values[i] == 0 && rounded == 0)) continue;
    return fmt::format("{} of the chain: value {} is {:.9g}, its iterations make {:.9g}", name, i,
                       values[i], want[i]);
  }
  return {};
}

template <typename T>
bool is_part(const std::vector<T>& whole, const std::vector<T>& part, std::int32_t number) {
  const std::ptrdiff_t begin = number * std::ssize(part);
  return begin + std::ssize(part) <= std::ssize(whole) &&
         std::equal(part.begin(), part.end(), whole.begin() + begin);
}

void add_up(std::vector<std::int64_t>& sum, const std::vector<std::int64_t>& part) {
  sum.resize(std::max(sum.size(), part.size()));
  for (std::size_t i = 0; i < part.size(); ++i) sum[i] += part[i];
}

/// What a rank counts over all iterations.
struct Counted {
  std::vector<std::int64_t> counts{}, counts_kept{}, rows{}, payload{};
  std::int64_t used = 0, executed = 0;

  void add(const RankResult& one) {
    add_up(counts, one.record.counts);
    add_up(counts_kept, one.record.counts_kept);
    add_up(rows, one.traffic.rows);
    add_up(payload, one.traffic.payload_bytes);
    used += one.rows_used;
    executed += one.rows_executed;
  }
  [[nodiscard]] bool is_of(const RankResult& chain) const {
    return counts == chain.record.counts && counts_kept == chain.record.counts_kept &&
           rows == chain.traffic.rows && payload == chain.traffic.payload_bytes &&
           used == chain.rows_used && executed == chain.rows_executed;
  }
};

}  // namespace

std::string check_chain(const Problem& problem, const CheckOptions& options,
                        const RunResult& result) {
  const ChainConfig& chain = problem.test.layer.router.chain;
  std::vector<float> x = problem.tokens;
  std::vector<Counted> counted(result.ranks.size());
  for (std::int32_t c = 0; c < chain.iterations; ++c) {
    std::optional<RunResult> first;
    CheckOptions alone = options;
    alone.group = nullptr;
    alone.run = [&](const Problem& one, const RunArgs& args) {
      RunResult run = options.run(one, args);
      if (!first) first = run;
      return run;
    };
    std::string wrong = check_layer(iteration(problem, c, x), alone);
    std::vector<float> made;
    for (std::size_t rank = 0; rank < result.ranks.size() && wrong.empty(); ++rank) {
      const RankResult& one = first->ranks[rank];
      const RoutingRecord& record = result.ranks[rank].record;
      if (!is_part(record.expert, one.record.expert, c) ||
          !is_part(record.weight, one.record.weight, c) ||
          !is_part(record.kept, one.record.kept, c)) {
        wrong = fmt::format("rank {}: the chain routes otherwise than a layer does", rank);
      }
      counted[rank].add(one);
      const std::vector<float> values = decode(DType::kF32, one.out);
      made.insert(made.end(), values.begin(), values.end());
    }
    if (!wrong.empty()) return fmt::format("iteration {}: {}", c, wrong);
    go_on(chain, made, x);
  }
  std::vector<std::byte> out;
  for (std::size_t rank = 0; rank < result.ranks.size(); ++rank) {
    if (!counted[rank].is_of(result.ranks[rank])) {
      return fmt::format("rank {}: the chain counts otherwise than its iterations do", rank);
    }
    out.insert(out.end(), result.ranks[rank].out.begin(), result.ranks[rank].out.end());
  }
  if (chain.outer_residual) {
    for (std::size_t i = 0; i < x.size(); ++i) x[i] += problem.tokens[i];
  }
  return compare("the output", problem.test.output, out, x);
}

std::string check_chain_gradients(const Problem& problem, const BackwardProblem& backward,
                                  const BackwardResult& result, const BackwardRunner& run,
                                  const BackwardRun& how) {
  const ChainConfig& chain = problem.test.layer.router.chain;
  std::vector<std::vector<float>> given{problem.tokens};  // to each iteration
  for (std::int32_t c = 0; c + 1 < chain.iterations; ++c) {
    // By a forward that is saved: on a GPU it may take another path than one that is not.
    const Problem one = iteration(problem, c, given.back());
    BackwardProblem back{.recompute = backward.recompute,
                         .dout = backward.dout,
                         .gradients = all_gradients(one.test)};
    for (GradientArray& array : back.gradients) array.bytes.clear();
    BackwardRun alone = how;
    alone.group = nullptr;
    const BackwardResult forward = run(one, back, alone);
    if (forward.error) return fmt::format("iteration {} threw: {}", c, forward.error->what());
    given.push_back(given.back());
    go_on(chain, decode(DType::kF32, forward.out), given.back());
  }

  std::vector<float> dx = backward.dout;
  std::vector<std::vector<float>> want(backward.gradients.size());
  for (std::size_t i = 0; i < want.size(); ++i) {
    const GradientArray& array = backward.gradients[i];
    const bool sum = backward.accumulate && array.of_parameter && !array.bytes.empty();
    if (sum) want[i] = decode(array.dtype, array.bytes);
    if (!sum) want[i].resize(static_cast<std::size_t>(array.rows * array.cols));
  }
  for (std::int32_t c = chain.iterations - 1; c >= 0; --c) {
    const Problem one = iteration(problem, c, given[static_cast<std::size_t>(c)]);
    BackwardProblem back{
        .recompute = backward.recompute, .dout = dx, .gradients = all_gradients(one.test)};
    std::optional<BackwardResult> first;
    BackwardRun alone = how;
    alone.group = nullptr;
    const std::string wrong = check_backward(
        one, back,
        [&](const Problem& p, const BackwardProblem& b, const BackwardRun& h) {
          BackwardResult r = run(p, b, h);
          if (!first) first = r;
          return r;
        },
        alone);
    if (!wrong.empty()) return fmt::format("iteration {}: {}", c, wrong);
    for (std::size_t i = 0; i < want.size(); ++i) {
      const std::vector<float> part = decode(DType::kF32, first->gradients[i].bytes);
      const auto which = static_cast<Gradient>(i);
      if (which == Gradient::kWeight) continue;
      if (which == Gradient::kTokens) {
        go_on(chain, part, dx);
        continue;
      }
      const bool each = which == Gradient::kGate || which == Gradient::kRouterBias;
      const std::size_t begin = each ? static_cast<std::size_t>(c) * part.size() : 0;
      for (std::size_t j = 0; j < part.size(); ++j) {
        float& sum = want[i][begin + j];
        sum = round_to(backward.gradients[i].dtype, sum + part[j]);
      }
    }
  }
  if (chain.outer_residual) {
    for (std::size_t i = 0; i < dx.size(); ++i) dx[i] += backward.dout[i];
  }
  want[static_cast<std::size_t>(Gradient::kTokens)] = dx;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const GradientArray& array = result.gradients[i];
    if (array.bytes.empty()) continue;
    if (std::string wrong = compare(array.name, array.dtype, array.bytes, want[i]);
        !wrong.empty()) {
      return wrong;
    }
  }
  return {};
}

}  // namespace switchyard::verify

#pragma once

// PERFT's adapters in memory, forward and back with all gradients.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "reference/adapters/perft.hpp"
#include "switchyard/perft.hpp"
#include "testkit/random.hpp"
#include "testkit/raw_matrices.hpp"

namespace switchyard::test {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;

inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

inline RouterConfig top_k(std::int32_t adapters, std::int32_t k, bool renormalize = false) {
  return {.num_experts = adapters, .kind = TopKRouter{.top_k = k, .renormalize = renormalize}};
}

struct PerftCase {
  PerftConfig config{};
  std::int64_t num_tokens = 0;
  DType compute = DType::kF32;
  Recompute recompute = Recompute::kNone;
  int threads = 1;
  LossConfig losses{};
  bool accumulate = false;

  Floats x{}, base{}, a{}, b{}, gate{}, weight{}, dy{};
  std::vector<std::int32_t> expert{};  ///< Embedded.
  std::vector<std::uint8_t> kept{};    ///< Embedded, or empty.

  [[nodiscard]] std::int64_t columns() const { return config.router.top_k(); }

  void fill(std::uint64_t seed) {
    Random random(seed);
    const auto draw = [&](Floats& values, std::int64_t count, double size) {
      values.resize(at(count));
      for (float& value : values) value = static_cast<float>(size * random.normal());
    };
    const std::int64_t hidden = config.hidden;
    const std::int64_t cells = config.num_adapters * config.rank * hidden;
    draw(x, num_tokens * hidden, 1);
    draw(base, num_tokens * hidden, 1);
    draw(a, cells, 1 / std::sqrt(static_cast<double>(hidden)));
    draw(b, cells, 1 / std::sqrt(static_cast<double>(config.rank)));
    draw(dy, num_tokens * hidden, 1);
    if (config.kind == PerftKind::kRouted) draw(gate, config.num_adapters * hidden, 0.3);
    if (config.kind != PerftKind::kEmbedded) return;
    draw(weight, num_tokens * columns(), 1);
    for (std::int64_t i = 0; i < num_tokens * columns(); ++i) {
      expert.push_back(static_cast<std::int32_t>(random.between(-1, config.num_adapters - 1)));
    }
  }

  [[nodiscard]] PerftModel model() const {
    return {.config = config,
            .gate = Parameter(gate.data(), DType::kF32, std::ssize(gate), Backend::kCpu),
            .adapters = make_memory_source(config.experts(), DType::kF32, a.data(), b.data())};
  }

  [[nodiscard]] reference::PerftProblem in_double() const {
    const auto widen = [](const Floats& values) { return Doubles(values.begin(), values.end()); };
    return {.config = config,
            .num_tokens = num_tokens,
            .x = widen(x),
            .base = widen(base),
            .a = widen(a),
            .b = widen(b),
            .gate = widen(gate),
            .expert = expert,
            .weight = widen(weight)};
  }
};

struct PerftResults {
  Floats y, dx, da, db, dgate, dweight;
  bool operator==(const PerftResults&) const = default;
};

/// The tokens [begin, end) both ways on a rank.
/// @param start  What gradients of parameters hold before.
inline PerftResults run_perft(const PerftCase& c, std::int64_t begin, std::int64_t end,
                              Communicator* ranks = nullptr, float start = 1e30F) {
  const std::int64_t hidden = c.config.hidden, tokens = end - begin;
  const bool embedded = c.config.kind == PerftKind::kEmbedded;
  const std::int64_t columns = embedded ? c.columns() : 0;
  PerftAdapters adapters(
      c.model(), {.compute = c.compute, .num_threads = c.threads, .losses = c.losses}, ranks);
  PerftResults r{.y = Floats(at(tokens * hidden), 1e30F),
                 .dx = Floats(at(tokens * hidden), 1e30F),
                 .da = Floats(c.a.size(), start),
                 .db = Floats(c.b.size(), start),
                 .dgate = Floats(c.gate.size(), start),
                 .dweight = Floats(at(tokens * columns), 1e30F)};
  const auto rows = [&](const Floats& values) -> ConstRawMatrix {
    return {reinterpret_cast<const std::byte*>(values.data() + begin * hidden), DType::kF32, tokens,
            hidden};
  };
  SavedForward saved(c.recompute);
  PerftForwardArgs forward{
      .tokens = rows(c.x), .base = rows(c.base), .out = raw_of(r.y, hidden), .saved = &saved};
  if (embedded) {
    forward.expert = {c.expert.data() + begin * columns, {tokens, columns}};
    forward.weight = {c.weight.data() + begin * columns, {tokens, columns}};
    if (!c.kept.empty()) forward.kept = {c.kept.data() + begin * columns, {tokens * columns}};
  }
  adapters.forward(forward);
  PerftBackwardArgs backward{.saved = &saved,
                             .dout = rows(c.dy),
                             .dtokens = raw_of(r.dx, hidden),
                             .da = raw_of(r.da, hidden),
                             .db = raw_of(r.db, c.config.rank),
                             .accumulate = c.accumulate};
  if (embedded) backward.dweight = {r.dweight.data(), {tokens, columns}};
  if (!c.gate.empty()) backward.dgate = raw_of(r.dgate, hidden);
  adapters.backward(backward);
  return r;
}

inline PerftResults run_perft(const PerftCase& c) { return run_perft(c, 0, c.num_tokens); }

/// d sum(y * dy) / d each of the values, by differences of the reference with the choice held.
inline Doubles differences(const PerftCase& c, Doubles reference::PerftProblem::*values) {
  reference::PerftProblem problem = c.in_double();
  if (c.config.kind == PerftKind::kRouted) problem.expert = reference::perft(problem).expert;
  const auto loss = [&] {
    const Doubles y = reference::perft(problem).y;
    double sum = 0;
    for (std::size_t i = 0; i < y.size(); ++i) sum += y[i] * double{c.dy[i]};
    return sum;
  };
  Doubles result;
  for (double& one : problem.*values) {
    const double middle = one, step = 1e-5;
    one = middle + step;
    const double above = loss();
    one = middle - step;
    result.push_back((above - loss()) / (2 * step));
    one = middle;
  }
  return result;
}

inline void expect_near(const Floats& have, const Doubles& want, double bound, const char* of) {
  ASSERT_EQ(have.size(), want.size()) << of;
  double size = 1e-3;
  for (const double value : want) size = std::max(size, std::abs(value));
  for (std::size_t i = 0; i < have.size(); ++i) {
    ASSERT_NEAR(double{have[i]}, want[i], bound * size) << of << ", number " << i;
  }
}

}  // namespace switchyard::test

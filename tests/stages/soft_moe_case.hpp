#pragma once

// A Soft-MoE problem in memory, and its forward and backward with all gradients.

#include <cmath>
#include <vector>

#include "reference/soft_moe.hpp"
#include "switchyard/routing/soft_moe.hpp"
#include "switchyard/thread_pool.hpp"
#include "testkit/random.hpp"
#include "testkit/raw_matrices.hpp"

namespace switchyard::test {

struct SoftMoeCase {
  SoftMoeConfig config{};
  std::int64_t num_tokens = 0;
  ExpertConfig experts{.num_experts = 3, .hidden = 10, .inner = 6};
  Recompute recompute = Recompute::kNone;
  ThreadPool* pool = nullptr;

  std::vector<float> x{}, phi{}, w13{}, w2{}, dy{};

  [[nodiscard]] std::int64_t num_slots() const { return experts.num_experts * config.slots; }

  void fill(std::uint64_t seed) {
    Random random(seed);
    const auto draw = [&](std::vector<float>& values, std::int64_t count, double size) {
      values.resize(static_cast<std::size_t>(count));
      for (float& value : values) value = static_cast<float>(size * random.normal());
    };
    const std::int64_t width = (experts.gated ? 2 : 1) * experts.inner;
    const std::int64_t hidden = experts.hidden;
    const double of_first = 1 / std::sqrt(static_cast<double>(hidden));
    draw(x, num_tokens * hidden, 1);
    draw(phi, num_slots() * hidden, 0.5);
    draw(w13, experts.num_experts * width * hidden, of_first);
    draw(w2, experts.num_experts * hidden * experts.inner, 1);
    draw(dy, num_tokens * hidden, 1);
  }

  [[nodiscard]] reference::SoftMoeProblem in_double() const {
    const auto widen = [](const std::vector<float>& values) {
      return std::vector<double>(values.begin(), values.end());
    };
    return {.config = config,
            .scale = double{config.scale},
            .experts = experts,
            .num_tokens = num_tokens,
            .x = widen(x),
            .phi = widen(phi),
            .w13 = widen(w13),
            .w2 = widen(w2)};
  }
};

struct SoftMoeResults {
  std::vector<float> y, dispatch, combine;
  std::vector<float> dx, dphi, dscale, dw13, dw2;
  bool operator==(const SoftMoeResults&) const = default;
};

inline std::unique_ptr<ExpertWeights> weights_of(const SoftMoeCase& c) {
  const auto source = make_memory_source(c.experts, DType::kF32, c.w13.data(), c.w2.data());
  return load_experts(
      {.config = c.experts, .source = source.get(), .num_local = c.experts.num_experts});
}

/// Both ways. @param start  What gradients hold before: added to where `accumulate`.
inline SoftMoeResults run_soft_moe(const SoftMoeCase& c, bool accumulate = false,
                                   float start = 1e30F) {
  const auto weights = weights_of(c);
  const std::int64_t hidden = c.experts.hidden;
  const auto room = [](const std::vector<float>& like, float value) {
    return std::vector<float>(like.size(), value);
  };
  const auto pairs = static_cast<std::size_t>(c.num_tokens * c.num_slots());
  SoftMoeResults r{.y = room(c.x, 1e30F),
                   .dispatch = std::vector<float>(pairs, 1e30F),
                   .combine = std::vector<float>(pairs, 1e30F),
                   .dx = room(c.x, 1e30F),
                   .dphi = room(c.phi, start),
                   .dscale = {start},
                   .dw13 = room(c.w13, start),
                   .dw2 = room(c.w2, start)};
  SavedSoftMoe saved(c.recompute);
  soft_moe({.x = raw_of(c.x, hidden),
            .phi = raw_of(c.phi, hidden),
            .weights = weights.get(),
            .config = c.config,
            .out = raw_of(r.y, hidden),
            .dispatch = {r.dispatch.data(), {c.num_tokens, c.num_slots()}},
            .combine = {r.combine.data(), {c.num_tokens, c.num_slots()}},
            .saved = &saved,
            .execution = {.pool = c.pool}});
  soft_moe_backward(
      {.saved = &saved,
       .phi = raw_of(c.phi, hidden),
       .weights = weights.get(),
       .dout = raw_of(c.dy, hidden),
       .dx = raw_of(r.dx, hidden),
       .dphi = raw_of(r.dphi, hidden),
       .dscale = r.dscale.data(),
       .experts = {.w13 = raw_of(r.dw13, hidden), .w2 = raw_of(r.dw2, c.experts.inner)},
       .accumulate = accumulate,
       .execution = {.pool = c.pool}});
  return r;
}

/// The forward alone: what inference runs.
inline std::vector<float> soft_moe_output(const SoftMoeCase& c) {
  const auto weights = weights_of(c);
  std::vector<float> y(c.x.size());
  soft_moe({.x = raw_of(c.x, c.experts.hidden),
            .phi = raw_of(c.phi, c.experts.hidden),
            .weights = weights.get(),
            .config = c.config,
            .out = raw_of(y, c.experts.hidden),
            .execution = {.pool = c.pool}});
  return y;
}

}  // namespace switchyard::test

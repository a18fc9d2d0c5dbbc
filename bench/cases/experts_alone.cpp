#include "bench/cases/experts_alone.hpp"

#include <cmath>
#include <set>

#include "core/half.hpp"
#include "testkit/random.hpp"

namespace switchyard::bench {

PoolSource::PoolSource(const ExpertConfig& config, DType dtype, std::uint64_t seed)
    : config_(config), dtype_(dtype), values_(kPool) {
  Random random(seed);
  const double scale = 1 / std::sqrt(static_cast<double>(config.hidden));
  for (float& value : values_) {
    value = round_to(dtype, static_cast<float>(random.normal() * scale));
  }
}

void PoolSource::read(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                      std::int64_t num_rows, DType dtype, void* out) const {
  const std::int64_t cols = part == ExpertPart::kDown ? config_.inner : config_.hidden;
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const std::int64_t place = (first_row + row) * 7919 + expert * std::int64_t{104729} +
                               static_cast<std::int64_t>(part) * 31;
    const float* from = values_.data() + place % (kPool - cols);
    for (std::int64_t i = 0; i < cols; ++i) store_float(out, dtype, row * cols + i, from[i]);
  }
}

ExpertsAlone::ExpertsAlone(const LayerCase& c, const ExpertSource& source, WeightFormat weights,
                           ThreadPool& pool)
    : config_(c.config.experts), pool_(pool) {
  const std::int64_t top_k = c.config.router.top_k();
  tokens_ = synthetic_tokens(c.num_tokens, config_.hidden, c.dtype, c.seed);
  routing_ =
      synthetic_routing(c.num_tokens, config_.num_experts, c.config.router.top_k(), c.skew, c.seed);
  weights_ = load_experts({.config = config_,
                           .source = &source,
                           .dtype = c.dtype,
                           .num_local = config_.num_experts,
                           .format = weights,
                           .execution = {.pool = &pool}});
  x_ = {tokens_.data(), c.dtype, c.num_tokens, config_.hidden};
  view_ = plan_.reserve(c.num_tokens, top_k, config_.num_experts, c.num_tokens * top_k);
  plan({.assignments = DenseAssignments{.expert = expert(), .weight = weight()},
        .plan = view_,
        .execution = {.pool = &pool}});
  out_.resize(static_cast<std::size_t>(c.num_tokens * config_.hidden));
}

std::int64_t ExpertsAlone::hit() const {
  return static_cast<std::int64_t>(
      std::set<std::int32_t>(routing_.expert.begin(), routing_.expert.end()).size());
}

void ExpertsAlone::run(StageRecorder* recorder) {
  experts({.x = x_,
           .plan = view_,
           .weights = weights_.get(),
           .reduced = {.sums = {reinterpret_cast<std::byte*>(out_.data()), DType::kF32, x_.rows,
                                config_.hidden},
                       .subtree = {.order = {.num_experts = config_.num_experts}}},
           .execution = {.pool = &pool_, .recorder = recorder}});
}

}  // namespace switchyard::bench

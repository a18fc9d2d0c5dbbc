// The naive loop over the experts. Bound by memory: every row reads its expert's weights.
#include "bench/cases/naive_experts.hpp"

#include <algorithm>
#include <cmath>
#include <set>

namespace switchyard::bench {
namespace {

/// Sixteen partial sums, so that a compiler may use vectors.
float dot(const float* a, const float* b, std::int64_t size) {
  constexpr std::int64_t kLanes = 16;
  float sums[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  float sum = 0;
  for (const float partial : sums) sum += partial;
  for (; i < size; ++i) sum += a[i] * b[i];
  return sum;
}

/// f(i) for all i below `size`, 64 a task.
template <class F>
void for_each(ThreadPool& pool, std::int64_t size, const F& f) {
  pool.parallel_for((size + 63) / 64, [&](std::int64_t block, int) {
    for (std::int64_t i = block * 64; i < std::min(size, block * 64 + 64); ++i) f(i);
  });
}

void read_expert(const ExpertConfig& config, const ExpertSource& source, std::int32_t expert,
                 std::vector<float>& out) {
  const auto matrix = static_cast<std::size_t>(config.hidden * config.inner);
  out.resize(3 * matrix);
  source.read(expert, ExpertPart::kGate, 0, config.inner, DType::kF32, out.data());
  source.read(expert, ExpertPart::kUp, 0, config.inner, DType::kF32, out.data() + matrix);
  source.read(expert, ExpertPart::kDown, 0, config.hidden, DType::kF32, out.data() + 2 * matrix);
}

}  // namespace

NaiveExperts::NaiveExperts(const ExpertConfig& config, const ExpertSource& source, bool resident)
    : config_(config), source_(source), middle_(static_cast<std::size_t>(config.inner)) {
  if (!resident) return;
  resident_.resize(static_cast<std::size_t>(config.num_experts));
  for (std::int32_t e = 0; e < config.num_experts; ++e) {
    read_expert(config_, source_, e, resident_[static_cast<std::size_t>(e)]);
  }
}

void NaiveExperts::run(const float* tokens, std::int64_t num_tokens,
                       const SyntheticRouting& routing, ThreadPool& pool, std::vector<float>& out) {
  const auto top_k = std::ssize(routing.expert) / std::max<std::int64_t>(num_tokens, 1);
  out.assign(static_cast<std::size_t>(num_tokens * config_.hidden), 0.0F);
  for (std::int32_t e = 0; e < config_.num_experts; ++e) {
    const float* weights = nullptr;
    for (std::size_t i = 0; i < routing.expert.size(); ++i) {
      if (routing.expert[i] != e) continue;
      if (weights == nullptr) weights = weights_of(e);
      const std::int64_t token = static_cast<std::int64_t>(i) / top_k;
      run_row(weights, tokens + token * config_.hidden, routing.weight[i], pool,
              out.data() + token * config_.hidden);
    }
  }
}

const float* NaiveExperts::weights_of(std::int32_t expert) {
  if (!resident_.empty()) return resident_[static_cast<std::size_t>(expert)].data();
  read_expert(config_, source_, expert, one_);
  return one_.data();
}

void NaiveExperts::run_row(const float* weights, const float* x, float weight, ThreadPool& pool,
                           float* y) {
  const std::int64_t hidden = config_.hidden;
  const std::int64_t inner = config_.inner;
  const float* gate = weights;
  const float* up = gate + inner * hidden;
  const float* down = up + inner * hidden;
  for_each(pool, inner, [&](std::int64_t j) {
    const float g = dot(gate + j * hidden, x, hidden);
    middle_[static_cast<std::size_t>(j)] =
        g / (1.0F + std::exp(-g)) * dot(up + j * hidden, x, hidden);
  });
  for_each(pool, hidden,
           [&](std::int64_t h) { y[h] += weight * dot(down + h * inner, middle_.data(), inner); });
}

double NaiveExperts::hit_bytes(const SyntheticRouting& routing) const {
  const std::set<std::int32_t> hit(routing.expert.begin(), routing.expert.end());
  return static_cast<double>(hit.size()) * expert_bytes();
}

std::int64_t count_outside(const std::vector<float>& want, const float* have) {
  std::int64_t outside = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const bool close = std::abs(have[i] - want[i]) <= 1e-5F + 1e-3F * std::abs(want[i]);
    outside += close ? 0 : 1;  // a NaN is not close
  }
  return outside;
}

}  // namespace switchyard::bench

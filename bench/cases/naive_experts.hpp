#pragma once

#include <vector>

#include "bench/cases/synthetic.hpp"
#include "switchyard/experts.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard::bench {

/// One expert after the other, one of its tokens after the other: gated silu in f32 on the CPU, as
/// plain as it can be said.
class NaiveExperts {
 public:
  /// @param resident  Keep all experts' weights in memory, so that run() has a time worth taking;
  ///                  else each is read when its turn comes. `source` must outlive the object.
  NaiveExperts(const ExpertConfig& config, const ExpertSource& source, bool resident);

  /// out [T, H] = the weighted sum of each token's experts.
  void run(const float* tokens, std::int64_t num_tokens, const SyntheticRouting& routing,
           ThreadPool& pool, std::vector<float>& out);

  /// Of the experts that `routing` hits.
  [[nodiscard]] double hit_bytes(const SyntheticRouting& routing) const;
  [[nodiscard]] double bytes() const { return config_.num_experts * expert_bytes(); }

 private:
  /// gate [I, H], up [I, H], down [H, I].
  const float* weights_of(std::int32_t expert);
  [[nodiscard]] double expert_bytes() const {
    return 3.0 * 4.0 * static_cast<double>(config_.hidden * config_.inner);
  }
  void run_row(const float* weights, const float* x, float weight, ThreadPool& pool, float* y);

  ExpertConfig config_;
  const ExpertSource& source_;
  std::vector<std::vector<float>> resident_;
  std::vector<float> one_, middle_;
};

/// Elements outside of atol 1e-5 + rtol 1e-3 * |want|.
[[nodiscard]] std::int64_t count_outside(const std::vector<float>& want, const float* have);

}  // namespace switchyard::bench

#pragma once

// What the rules of a CPU share: the loop over tokens, and softmax over a token's experts.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/check.hpp"
#include "route/cpu/rule.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard::routing {

/// The lowest expert whose logit is NaN, or -1.
inline std::int32_t nan_among(const float* logits, std::int32_t num_experts) {
  for (std::int32_t e = 0; e < num_experts; ++e) {
    if (std::isnan(logits[e])) return e;
  }
  return -1;
}

/// Softmax of a token's logits over all experts.
inline void softmax(const float* logits, std::int32_t num_experts, float* out) {
  const float largest = *std::max_element(logits, logits + num_experts);
  float sum = 0.0F;
  for (std::int32_t e = 0; e < num_experts; ++e) sum += out[e] = exp_below(logits[e], largest);
  for (std::int32_t e = 0; e < num_experts; ++e) out[e] /= sum;
}

/// Tokens split over the threads. `make_body()` once a task gives what is called with each of its
/// tokens, for its scratch memory.
inline void for_tokens(ThreadPool* pool, std::int64_t num_tokens, const auto& make_body) {
  constexpr std::int64_t kTokensPerTask = 16;
  const std::int64_t tasks = (num_tokens + kTokensPerTask - 1) / kTokensPerTask;
  parallel_for(pool, tasks, [&](std::int64_t task, int) {
    auto body = make_body();
    const std::int64_t end = std::min(num_tokens, (task + 1) * kTokensPerTask);
    for (std::int64_t token = task * kTokensPerTask; token < end; ++token) body(token);
  });
}

/// Remembers the lowest (token, expert) of those reported, from any thread.
class LowestNan {
 public:
  explicit LowestNan(std::int64_t num_experts) : num_experts_(num_experts) {}

  void report(std::int64_t token, std::int32_t expert) {
    const std::int64_t place = token * num_experts_ + expert;
    std::int64_t seen = lowest_.load();
    while (place < seen && !lowest_.compare_exchange_weak(seen, place)) {
    }
  }
  /// @throws Error{kInvalidArgument} that names it.
  void require_none() const {
    const std::int64_t nan = lowest_.load();
    require(nan == kNone, "the logit of token {} for expert {} is NaN", nan / num_experts_,
            nan % num_experts_);
  }

 private:
  static constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();
  std::int64_t num_experts_;
  std::atomic<std::int64_t> lowest_{kNone};
};

}  // namespace switchyard::routing

// The penalty of a ReLU router on a CPU. Bound by memory; sums over tokens in parts of a fixed
// number, added in order.
#include "switchyard/routing/relu_l1.hpp"

#include <algorithm>
#include <vector>

#include "core/shape_check.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {
namespace {

constexpr std::int64_t kTokensPerPart = 256;

struct Sums {
  std::vector<double> weight;        ///< [E] of the positive logits.
  std::vector<std::int64_t> active;  ///< [E] how many there are.

  explicit Sums(std::size_t num_experts) : weight(num_experts), active(num_experts) {}
  void add(std::size_t expert, float logit) {
    if (!(logit > 0.0F)) return;
    weight[expert] += double{logit};
    ++active[expert];
  }
};

Sums sums_of(const ReluL1Args& args) {
  const std::int64_t num_tokens = args.logits.shape[0];
  const auto experts = static_cast<std::size_t>(args.logits.shape[1]);
  const std::int64_t count = (num_tokens + kTokensPerPart - 1) / kTokensPerPart;
  std::vector<Sums> parts(static_cast<std::size_t>(count), Sums(experts));
  parallel_for(args.execution.pool, count, [&](std::int64_t part, int) {
    const std::int64_t end = std::min(num_tokens, (part + 1) * kTokensPerPart);
    for (std::int64_t t = part * kTokensPerPart; t < end; ++t) {
      for (std::size_t e = 0; e < experts; ++e) {
        parts[static_cast<std::size_t>(part)].add(e, args.logits.row(t)[e]);
      }
    }
  });
  Sums all(experts);
  for (const Sums& part : parts) {
    for (std::size_t e = 0; e < experts; ++e) {
      all.weight[e] += part.weight[e];
      all.active[e] += part.active[e];
    }
  }
  return all;
}

void check_inputs(const ReluL1Args& args) {
  const auto [num_tokens, num_experts] = args.logits.shape;
  require_shape("logits", args.logits, num_tokens, num_experts);
  require(args.top_k >= 0 && args.top_k <= num_experts, "top_k={} of {} experts, want 0 to {}",
          args.top_k, num_experts, num_experts);
  if (args.dlogits.data != nullptr) {
    require_shape("dlogits", args.dlogits, num_tokens, num_experts);
  }
  if (args.execution.backend != Backend::kCpu) {
    fail(ErrorCode::kUnsupported, "relu_l1 runs on the backend cpu, not on {}",
         to_string(args.execution.backend));
  }
}

}  // namespace

ReluL1 relu_l1(const ReluL1Args& args) {
  check_inputs(args);
  const auto [num_tokens, num_experts] = args.logits.shape;
  if (num_tokens == 0) return {};
  const Sums sums = sums_of(args);
  const auto tokens = static_cast<double>(num_tokens);
  std::vector<double> price(sums.weight.size(), 1 / tokens);  // E f_e / T
  ReluL1 found;
  for (std::size_t e = 0; e < price.size(); ++e) {
    const auto active = static_cast<double>(sums.active[e]);
    if (args.top_k > 0) {
      price[e] *= static_cast<double>(num_experts) * active / (tokens * args.top_k);
    }
    found.value += price[e] * sums.weight[e];
    found.active += active / tokens;
  }
  if (args.dlogits.data == nullptr) return found;
  parallel_for(args.execution.pool, num_tokens, [&](std::int64_t t, int) {
    for (std::size_t e = 0; e < price.size(); ++e) {
      if (args.logits.row(t)[e] > 0.0F) {
        args.dlogits.row(t)[e] += static_cast<float>(args.scale * price[e]);
      }
    }
  });
  return found;
}

}  // namespace switchyard

#pragma once

// What the auxiliary losses are made of, for the host and for kernels: the formulas of
// switchyard/routing/losses.hpp on sums.

#include "core/gpu/host_device.hpp"
#include "switchyard/routing/losses.hpp"

namespace switchyard::losses {

/// Added to the square of a mean that is divided by.
inline constexpr double kCvEpsilon = 1e-10;

/// RouterLossesArgs as loops read it.
struct Shape {
  std::int64_t groups;            // S
  std::int64_t tokens_per_group;  // T / S
  std::int32_t num_experts;       // E
  std::int32_t devices;           // D
  std::int32_t devices_per_token;
  bool by_tokens;                     // BalanceShare::kTokens
  const std::int64_t* counts;         // [S, E]
  const std::int64_t* counted;        // [S, E] what makes shares, or [E] of all ranks and steps
  bool counted_once;                  // The latter.
  const std::int64_t* device_tokens;  // [S, D]
  const double* scores;               // [S, E]
  const double* token_sums;           // [kTokenSums]
  double balance, device, communication, importance;  // coefficients, times the gradient's scale
  std::int32_t first_zero_computation;                // from here on experts count
  double tau;                                         // this in `balance`
};

[[nodiscard]] inline Shape shape_of(const RouterLossesArgs& args) {
  const RoutingSums& sums = args.sums;
  const auto [groups, num_experts] = sums.counts.shape;
  const bool global = args.config.scope == LossScope::kGlobal;
  const bool first = args.config.share == BalanceShare::kFirstChoice;
  return {.groups = groups,
          .tokens_per_group = groups == 0 ? 0 : args.num_tokens / groups,
          .num_experts = static_cast<std::int32_t>(num_experts),
          .devices = static_cast<std::int32_t>(sums.device_tokens.shape[1]),
          .devices_per_token = args.config.devices_per_token,
          .by_tokens = args.config.share == BalanceShare::kTokens,
          .counts = sums.counts.data,
          .counted = global  ? args.global_counts.data
                     : first ? sums.first_choices.data
                             : sums.counts.data,
          .counted_once = global,
          .device_tokens = sums.device_tokens.data,
          .scores = sums.scores.data,
          .token_sums = sums.tokens.data,
          .balance = args.config.balance * args.scale,
          .device = args.config.device * args.scale,
          .communication = args.config.communication * args.scale,
          .importance = args.config.importance * args.scale,
          .first_zero_computation =
              static_cast<std::int32_t>(num_experts) - args.config.zero_computation,
          .tau = args.config.tau};
}

[[nodiscard]] SWITCHYARD_HOST_DEVICE const std::int64_t* counted(const Shape& shape,
                                                                 std::int64_t group) {
  return shape.counted + (shape.counted_once ? 0 : group * shape.num_experts);
}

/// What a count is multiplied by to be f. @param all  Sum of what is counted.
/// @param assigned  Sum of the group's own counts.
[[nodiscard]] SWITCHYARD_HOST_DEVICE double share_factor(const Shape& shape, std::int64_t all,
                                                         std::int64_t assigned) {
  if (all == 0) return 0;
  const double factor = 1 / static_cast<double>(all);
  if (!shape.by_tokens) return factor;
  return factor * static_cast<double>(assigned) / static_cast<double>(shape.tokens_per_group);
}

/// f of an expert as `balance` counts it. On a CPU.
[[nodiscard]] inline double balanced_share(const Shape& shape, std::int32_t expert, double share) {
  return expert < shape.first_zero_computation ? share : shape.tau * share;
}

/// D/M times the share of a group's tokens that are sent to a device.
[[nodiscard]] SWITCHYARD_HOST_DEVICE double sent_share(const Shape& shape, std::int64_t group,
                                                       std::int32_t device) {
  const auto sent = static_cast<double>(shape.device_tokens[group * shape.devices + device]);
  return sent * shape.devices /
         (static_cast<double>(shape.devices_per_token) *
          static_cast<double>(shape.tokens_per_group));
}

/// dL/dp of all but importance. @param share  f of the expert, as `balance` counts it. @param
/// device_share  The sum of its device's.
[[nodiscard]] SWITCHYARD_HOST_DEVICE double score_price(const Shape& shape, double share,
                                                        double device_share, double sent) {
  const double sum = shape.balance * shape.num_experts * share +
                     shape.device * shape.devices * device_share + shape.communication * sent;
  return sum / (static_cast<double>(shape.tokens_per_group) * static_cast<double>(shape.groups));
}

/// d CV^2 / d value. @param deviation  value - mean.
[[nodiscard]] SWITCHYARD_HOST_DEVICE double cv_slope(double deviation, double mean, double variance,
                                                     std::int64_t size) {
  const double square = mean * mean + kCvEpsilon;
  return 2 / (static_cast<double>(size) * square) * (deviation - variance * mean / square);
}

/// @param sums  Of balance, device and communication the sums of f P over all groups, P as sums
/// over tokens; importance as it is.
[[nodiscard]] SWITCHYARD_HOST_DEVICE LossValues finish(const Shape& shape, const LossConfig& config,
                                                       LossValues sums) {
  const double tokens =
      static_cast<double>(shape.tokens_per_group) * static_cast<double>(shape.groups);
  if (tokens == 0) return {};
  LossValues values{.balance = shape.num_experts * sums.balance / tokens,
                    .z = shape.token_sums[0] / tokens,
                    .importance = sums.importance,
                    .device = shape.devices * sums.device / tokens,
                    .communication = sums.communication / tokens,
                    .entropy = shape.token_sums[1] / tokens};
  values.total = config.balance * values.balance + config.z * values.z +
                 config.importance * values.importance + config.device * values.device +
                 config.communication * values.communication + config.entropy * values.entropy;
  return values;
}

}  // namespace switchyard::losses

// Contract checks of auxiliary losses, and which implementation runs each of their steps.
#include "switchyard/routing/losses.hpp"

#include <cmath>

#include "core/shape_check.hpp"
#include "route/implementations.hpp"
#include "route/loss_formulas.hpp"
#include "route/token_places.hpp"

namespace switchyard {
namespace {

constexpr const Implementation<RoutingSumsArgs>* kSums[] = {
#ifdef SWITCHYARD_WITH_CUDA
    &kRoutingSumsCuda,
#endif
    &kRoutingSumsCpu};
constexpr const Implementation<RouterLossesArgs>* kLosses[] = {
#ifdef SWITCHYARD_WITH_CUDA
    &kRouterLossesCuda,
#endif
    &kRouterLossesCpu};

std::string sizes_of(const RoutingSumsArgs& args) {
  return fmt::format("{} tokens, {} experts, {} groups of tokens", args.logits.shape[0],
                     args.logits.shape[1], args.sums.counts.shape[0]);
}

std::string sizes_of(const RouterLossesArgs& args) {
  return fmt::format("{} tokens, {} experts, {} groups of tokens", args.num_tokens,
                     args.sums.counts.shape[1], args.sums.counts.shape[0]);
}

void check_coefficient(const char* name, double value) {
  require(std::isfinite(value), "the coefficient of the loss {} is {}, want a finite number", name,
          value);
}

}  // namespace

void check_sums(const RoutingSums& sums, std::int64_t num_tokens) {
  const auto [groups, num_experts] = sums.counts.shape;
  const std::int64_t devices = sums.device_tokens.shape[1];
  require(groups >= 1 && num_tokens % groups == 0, "{} groups do not divide {} tokens", groups,
          num_tokens);
  require(devices >= 1 && num_experts % devices == 0, "{} devices do not divide {} experts",
          devices, num_experts);
  require_shape("counts", sums.counts, groups, num_experts);
  require_shape("first_choices", sums.first_choices, groups, num_experts);
  require_shape("device_tokens", sums.device_tokens, groups, devices);
  require_shape("scores", sums.scores, groups, num_experts);
  require_shape("token sums", sums.tokens, kTokenSums);
}

void check(const LossConfig& config, std::int32_t num_experts) {
  check_coefficient("balance", config.balance);
  check_coefficient("z", config.z);
  check_coefficient("importance", config.importance);
  check_coefficient("device", config.device);
  check_coefficient("communication", config.communication);
  check_coefficient("entropy", config.entropy);
  require(
      (config.scope == LossScope::kSequence) == (config.sequence_length != 0),
      "losses have scope={} and sequence_length={}: a length goes with scope sequence, and only "
      "with it",
      to_string(config.scope), config.sequence_length);
  require(config.sequence_length >= 0, "sequence_length={} is negative", config.sequence_length);
  require(config.devices >= 1 && num_experts % config.devices == 0,
          "devices={} of the losses do not divide {} experts", config.devices, num_experts);
  require(config.devices_per_token >= 1 && config.devices_per_token <= config.devices,
          "devices_per_token={} of the losses, want 1 to {}", config.devices_per_token,
          config.devices);
  require(config.zero_computation >= 0 && config.zero_computation <= num_experts,
          "zero_computation={} experts of the losses, want 0 to {}", config.zero_computation,
          num_experts);
  require(config.tau > 0 && config.tau <= 1, "tau={} of the losses is not in (0, 1]", config.tau);
}

std::int64_t loss_groups(const LossConfig& config, std::int64_t num_tokens) {
  if (config.scope != LossScope::kSequence || num_tokens == 0) return 1;
  require(num_tokens % config.sequence_length == 0,
          "{} tokens are no multiple of sequence_length={} of the losses", num_tokens,
          config.sequence_length);
  return num_tokens / config.sequence_length;
}

void routing_sums(const RoutingSumsArgs& args) {
  const auto [num_tokens, num_experts] = args.logits.shape;
  require(num_experts >= 1, "logits have {} experts", num_experts);
  require_shape("logits", args.logits, num_tokens, num_experts);
  const std::int64_t assigned = switchyard::num_tokens(args.assignments);
  require(assigned == num_tokens, "assignments are of {} tokens, logits of {}", assigned,
          num_tokens);
  require(args.sums.counts.shape[1] == num_experts, "counts are of {} experts, logits of {}",
          args.sums.counts.shape[1], num_experts);
  check_sums(args.sums, num_tokens);
  if (args.execution.backend == Backend::kCpu) {
    require_assignments(args.assignments, static_cast<std::int32_t>(num_experts));
  }
  select<RoutingSumsArgs>("routing_sums", kSums, args, sizes_of).run(args);
}

LossPrices router_losses(const RouterLossesArgs& args) {
  const auto [groups, num_experts] = args.sums.counts.shape;
  const LossConfig& config = args.config;
  check(config, static_cast<std::int32_t>(num_experts));
  check_sums(args.sums, args.num_tokens);
  require(groups == loss_groups(config, args.num_tokens),
          "sums are of {} groups of tokens, want {} with scope {}", groups,
          loss_groups(config, args.num_tokens), to_string(config.scope));
  require(args.sums.device_tokens.shape[1] == config.devices, "sums are of {} devices, want {}",
          args.sums.device_tokens.shape[1], config.devices);
  const bool global = config.scope == LossScope::kGlobal;
  require(global == (args.global_counts.data != nullptr),
          "losses of scope {} {} global counts: they go with scope global, and only with it",
          to_string(config.scope), global ? "without" : "with");
  if (global) require_shape("global counts", args.global_counts, num_experts);
  if (args.values.data != nullptr) require_shape("values", args.values, kLossValues);
  require_shape("score_prices", args.score_prices, groups, num_experts);
  if (args.execution.backend == Backend::kCuda && config.zero_computation > 0 && config.tau != 1) {
    fail(ErrorCode::kUnsupported,
         "the balance loss with tau={} for zero-computation experts on CUDA: it is on a CPU only",
         config.tau);
  }
  require(std::isfinite(args.scale), "the scale of losses' gradients is {}", args.scale);
  select<RouterLossesArgs>("router_losses", kLosses, args, sizes_of).run(args);
  if (args.num_tokens == 0) return {};
  const double each = args.scale / static_cast<double>(args.num_tokens);
  return {.score = args.score_prices,
          .z = static_cast<float>(config.z * each),
          .entropy = static_cast<float>(config.entropy * each)};
}

double cv_squared(Vector<const double> values, double scale, Vector<double> gradient) {
  const std::int64_t size = values.shape[0];
  double mean = 0;
  for (std::int64_t i = 0; i < size; ++i) mean += values[i];
  mean /= static_cast<double>(size);
  double variance = 0;
  for (std::int64_t i = 0; i < size; ++i) variance += (values[i] - mean) * (values[i] - mean);
  variance /= static_cast<double>(size);
  for (std::int64_t i = 0; i < gradient.shape[0]; ++i) {
    gradient[i] = scale * losses::cv_slope(values[i] - mean, mean, variance, size);
  }
  return variance / (mean * mean + losses::kCvEpsilon);
}

}  // namespace switchyard

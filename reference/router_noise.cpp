// The noise of routers by its definitions, in double.
#include <cmath>
#include <numbers>

#include "reference/draws.hpp"
#include "reference/router_rules.hpp"

namespace switchyard::reference {
namespace {

/// The normal number of a logit.
Bounded normal_of(const RouteRequest& request, std::int64_t token, std::int64_t expert) {
  const std::int64_t pair = expert / 2 * 2;
  const double u = unit_of(word_of(request, kLogitNoise, token, pair)) + 0x1p-24;
  const double angle =
      2 * std::numbers::pi * unit_of(word_of(request, kLogitNoise, token, pair + 1));
  const double radius = std::sqrt(-2 * std::log(u));
  return {radius * (expert % 2 == 0 ? std::cos(angle) : std::sin(angle)),
          (1 + radius) * 2 * kFunction};
}

/// softplus(x) + floor: its slope is at most 1.
Bounded deviation_of(Bounded x, double floor) {
  const double softplus = std::max(x.value, 0.0) + std::log1p(std::exp(-std::abs(x.value)));
  return add({softplus, x.error + kFunction * (1 + softplus)}, {floor, 0});
}

/// 1 / (1 + exp(-x)): its slope is at most 1/4.
Bounded sigmoid(Bounded x) { return {1 / (1 + std::exp(-x.value)), x.error / 4 + kFunction}; }

}  // namespace

std::vector<double> seen_tokens(const RouterConfig& config, const RouteRequest& request,
                                std::span<const double> tokens, std::int64_t hidden) {
  std::vector<double> seen(tokens.begin(), tokens.end());
  if (!request.training || config.noise.kind != RouterNoise::Kind::kInputJitter) return seen;
  for (std::size_t i = 0; i < seen.size(); ++i) {
    const auto place = static_cast<std::int64_t>(i);
    const double u = unit_of(word_of(request, kJitter, place / hidden, place % hidden));
    const double factor = round_value(DType::kF32, double{config.noise.size} * (2 * u - 1) + 1);
    seen[i] = round_value(DType::kF32, seen[i] * factor);
  }
  return seen;
}

void add_noise(const RouterConfig& config, const RouteRequest& request,
               std::vector<Bounded>& logits, std::span<const Bounded> noise_logits) {
  if (!request.training || !config.noise.is_on_logits()) return;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const auto t = static_cast<std::int64_t>(i) / config.num_experts;
    const auto e = static_cast<std::int64_t>(i) % config.num_experts;
    const Bounded normal = normal_of(request, t, e);
    const Bounded size = config.noise.kind == RouterNoise::Kind::kLearned
                             ? deviation_of(noise_logits[i], double{config.noise.size})
                             : Bounded{double{config.noise.size}, 0};
    logits[i] = add(logits[i], multiply(size, normal));
  }
}

std::vector<Bounded> noise_slopes(const RouterConfig& config, const RouteRequest& request,
                                  std::span<const Bounded> noise_logits) {
  std::vector<Bounded> slopes(noise_logits.size());
  for (std::size_t i = 0; request.training && i < slopes.size(); ++i) {
    const auto t = static_cast<std::int64_t>(i) / config.num_experts;
    const auto e = static_cast<std::int64_t>(i) % config.num_experts;
    slopes[i] = multiply(normal_of(request, t, e), sigmoid(noise_logits[i]));
  }
  return slopes;
}

}  // namespace switchyard::reference

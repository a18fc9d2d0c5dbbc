#include "models/released/rope.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace switchyard::models {
namespace {

/// The pair (not whole) that turns so often within the original positions.
double pair_of_turns(const RopeConfig& config, double turns) {
  return static_cast<double>(config.dim) *
         std::log(config.original / (turns * 2 * std::numbers::pi)) / (2 * std::log(config.theta));
}

/// Share of the stretched frequency in each pair's.
std::vector<float> stretched_shares(const RopeConfig& config) {
  double low = pair_of_turns(config, config.fast);
  double high = pair_of_turns(config, config.slow);
  if (config.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(config.dim - 1));
  if (low == high) high += 0.001;
  std::vector<float> shares;
  for (std::int64_t i = 0; i < config.dim / 2; ++i) {
    const float at =
        static_cast<float>(static_cast<double>(i) - low) / static_cast<float>(high - low);
    shares.push_back(std::clamp(at, 0.0F, 1.0F));
  }
  return shares;
}

}  // namespace

std::vector<float> rope_frequencies(const RopeConfig& config) {
  std::vector<float> frequencies;
  std::vector<float> shares;
  if (config.kind == RopeConfig::Kind::kYarn) shares = stretched_shares(config);
  const auto factor = static_cast<float>(config.factor);
  for (std::int64_t i = 0; i < config.dim / 2; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(config.dim);
    const auto wavelength = static_cast<float>(std::pow(config.theta, double{exponent}));
    float frequency = 1.0F / wavelength;
    if (config.kind == RopeConfig::Kind::kLinear) frequency /= factor;
    if (config.kind == RopeConfig::Kind::kYarn) {
      const float share = shares[static_cast<std::size_t>(i)];
      const float stretched = 1.0F / (factor * wavelength);
      frequency = stretched * share + frequency * (1.0F - share);
    }
    frequencies.push_back(frequency);
  }
  return frequencies;
}

RopeAngles rope_angles(const RopeConfig& config, const std::vector<float>& frequencies,
                       std::int64_t first, std::int64_t positions) {
  RopeAngles angles{.pairs = std::ssize(frequencies)};
  const auto magnitude = static_cast<float>(config.magnitude);
  for (std::int64_t position = first; position < first + positions; ++position) {
    for (const float frequency : frequencies) {
      const double angle{static_cast<float>(position) * frequency};
      angles.cosine.push_back(static_cast<float>(std::cos(angle)) * magnitude);
      angles.sine.push_back(static_cast<float>(std::sin(angle)) * magnitude);
    }
  }
  return angles;
}

void turn(const RopeConfig& config, const RopeAngles& angles, std::int64_t position, float* x) {
  const float* const cosine = angles.cosine.data() + position * angles.pairs;
  const float* const sine = angles.sine.data() + position * angles.pairs;
  const std::int64_t step = config.interleaved ? 2 : 1;
  const std::int64_t other = config.interleaved ? 1 : angles.pairs;
  for (std::int64_t i = 0; i < angles.pairs; ++i) {
    float& a = x[i * step];
    float& b = x[i * step + other];
    const float turned = a * cosine[i] - b * sine[i];
    b = b * cosine[i] + a * sine[i];
    a = turned;
  }
}

double yarn_magnitude(double factor, double mscale) {
  return factor <= 1 ? 1 : 0.1 * mscale * std::log(factor) + 1;
}

}  // namespace switchyard::models

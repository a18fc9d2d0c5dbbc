// One token from logits.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/check.hpp"
#include "core/philox.hpp"
#include "switchyard/models/generate.hpp"

namespace switchyard::models {
namespace {

/// In [0, 1), of 53 bits.
double uniform(std::uint64_t seed, std::int64_t row, std::int64_t position) {
  const auto r = static_cast<std::uint64_t>(row);
  const auto p = static_cast<std::uint64_t>(position);
  const PhiloxWords words = philox4x32({{low_word(r), high_word(r), low_word(p), high_word(p)}},
                                       {low_word(seed), high_word(seed)});
  const std::uint64_t bits = std::uint64_t{words.word[0]} << 32 | words.word[1];
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

}  // namespace

void check(const SampleConfig& config) {
  require(std::isfinite(config.temperature) && config.temperature >= 0,
          "temperature={} is not a finite number of at least 0", config.temperature);
  require(config.top_k >= 0, "top_k={} is negative", config.top_k);
  require(config.top_p > 0 && config.top_p <= 1, "top_p={} is not in (0, 1]", config.top_p);
}

std::int32_t sample(std::span<const float> logits, const SampleConfig& config, std::int64_t row,
                    std::int64_t position) {
  check(config);
  require(!logits.empty() &&
              std::none_of(logits.begin(), logits.end(), [](float x) { return std::isnan(x); }),
          "the logits behind position {} of sequence {} are not all numbers", position, row);
  const auto before = [&](std::int32_t a, std::int32_t b) {
    const float x = logits[static_cast<std::size_t>(a)];
    const float y = logits[static_cast<std::size_t>(b)];
    return x != y ? x > y : a < b;
  };
  std::vector<std::int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  if (config.temperature == 0) return *std::min_element(ids.begin(), ids.end(), before);
  std::sort(ids.begin(), ids.end(), before);
  if (config.top_k > 0) ids.resize(std::min(ids.size(), static_cast<std::size_t>(config.top_k)));

  const auto largest = static_cast<double>(logits[static_cast<std::size_t>(ids.front())]);
  std::vector<double> sums;
  double sum = 0;
  for (const std::int32_t id : ids) {
    const auto logit = static_cast<double>(logits[static_cast<std::size_t>(id)]);
    // Equal to the largest also where both are infinite.
    sum += logit == largest ? 1.0 : std::exp((logit - largest) / config.temperature);
    sums.push_back(sum);
  }
  // The first place with which the sum reaches the share is the last that stays.
  const auto last = std::lower_bound(sums.begin(), sums.end() - 1, config.top_p * sum);
  const double at = uniform(config.seed, row, position) * *last;
  return ids[static_cast<std::size_t>(std::upper_bound(sums.begin(), last, at) - sums.begin())];
}

}  // namespace switchyard::models

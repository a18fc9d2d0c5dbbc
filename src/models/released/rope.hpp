#pragma once

// Angles of rotary positions as transformers computes them: in f32, so that they are the same far
// from the beginning too, where an angle's rounding is no longer small.
// Su et al. 2021 (arXiv:2104.09864); YaRN: Peng et al. 2023 (arXiv:2309.00071), section 3.

#include <cstdint>
#include <vector>

namespace switchyard::models {

struct RopeConfig {
  enum class Kind : std::uint8_t { kDefault, kLinear, kYarn };
  Kind kind = Kind::kDefault;
  std::int64_t dim = 0;      ///< Numbers of a head that are turned, even.
  double theta = 10000;      ///< > 1.
  bool interleaved = false;  ///< Numbers 2i and 2i + 1 are a pair; else i and i + dim / 2.
  // Linear and YaRN.
  double factor = 1;     ///< >= 1: positions are divided by it.
  double original = 0;   ///< YaRN: positions before they were stretched.
  double fast = 32;      ///< YaRN: pairs that turn at least so often in `original` are left alone,
  double slow = 1;       ///< those that turn at most so often are stretched, between is a ramp,
  bool truncate = true;  ///< whose ends are whole pairs.
  double magnitude = 1;  ///< Times cosine and sine.
};

/// Angle of each pair at position 1, [dim / 2].
[[nodiscard]] std::vector<float> rope_frequencies(const RopeConfig& config);

/// Cosines and sines of positions one after another, times the magnitude.
struct RopeAngles {
  std::int64_t pairs = 0;
  std::vector<float> cosine{}, sine{};  ///< [positions, pairs].
};
[[nodiscard]] RopeAngles rope_angles(const RopeConfig& config,
                                     const std::vector<float>& frequencies, std::int64_t first,
                                     std::int64_t positions);

/// Turns a head's numbers x [dim] by the angles of a position of `angles`.
void turn(const RopeConfig& config, const RopeAngles& angles, std::int64_t position, float* x);

/// 0.1 mscale ln(factor) + 1, or 1 where nothing is stretched. YaRN, section 3.4, and as DeepSeek
/// has it with a coefficient.
[[nodiscard]] double yarn_magnitude(double factor, double mscale);

}  // namespace switchyard::models

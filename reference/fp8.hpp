#pragma once

// Products of numbers in e4m3 as Hopper's tensor cores make them, with their error bound.
//
// A `wgmma` adds 32 products and what was summed before as whole numbers: all are shifted to the
// largest exponent among them, and what lies more than 13 bits below it is cut off; of the sum 13
// bits behind the first are kept ("14 bits", DeepSeek-V3, arXiv 2412.19437, 3.3.2; FP22, e8m13).
// The exponent of a product is the sum of its factors' (that of a code below 2^-6 is -6, its first
// bit is 0), so its power of two is no more than the product of `Fp8Row::power`. Nobody says
// whether the 32 are added at once or in halves, so both are admitted: each product is cut once, a
// sum twice as it comes in and twice as it goes out, each by less than a unit of 2^-13 of the
// largest power: (32 + 2 + 2) * 2^-13 * max(largest power of a product, largest sum). Every 128
// products the sum goes, times both scales, into fp32, where the next 128 start from zero.

#include <cstdint>
#include <span>
#include <vector>

#include "reference/bounded.hpp"
#include "switchyard/experts.hpp"

namespace switchyard::reference {

/// Codes times scales along one sum, or of a matrix row after row.
struct Fp8Row {
  std::vector<double> value{};
  std::vector<double> error{};  ///< Empty: none.
  std::vector<double> power{};  ///< What the code's exponent stands for, times the scale.
};

/// Of codes as they are: a scale for each 128.
Fp8Row fp8_row(std::span<const std::uint8_t> codes, std::span<const float> scales);

/// Numbers that become e4m3: for each 128 a scale, the largest magnitude (2^-100 at least) / 448,
/// and the nearest codes to x * (448 / largest), each rounded to fp32. Exact ones give exact codes;
/// of others all codes and scales count that they may become.
Fp8Row quantised(std::span<const Bounded> values);

/// A part of an expert that is stored in e4m3, [rows, cols].
Fp8Row read_fp8(const ExpertSource& source, std::int32_t expert, ExpertPart part, std::int64_t rows,
                std::int64_t cols);

/// Row i of `matrix` [., x] times x, + bias[i] (empty: none).
Bounded fp8_dot(const Fp8Row& matrix, std::int64_t i, const Fp8Row& x, std::span<const float> bias);

/// What a sum of w[k] * x[k] may lose that is made so of numbers w in e5m2 and x of bf16, each the
/// sum of two in e4m3 (src/experts/gpu/grouped/coded/split.hpp): what x is short of, 2^-17 of its
/// largest value each, and what 2 x 32 products at a time cut off, as above. Of 64 values the first
/// 32 are those of k % 16 < 8 (where there are but 32: all), their halves the even and the odd
/// ones. `x_error`: what x is uncertain by, or empty.
double loss_of_split(std::span<const double> w, std::span<const double> x,
                     std::span<const double> x_error);

/// One expert.
struct Fp8Expert {
  Fp8Row gate{}, up{}, down{};
  std::vector<float> gate_bias{}, up_bias{}, down_bias{};
};

Fp8Expert read_fp8_expert(const ExpertConfig& config, const ExpertSource& source,
                          std::int32_t expert);

/// y [H] of gated experts, the intermediate in e4m3 as quantised() has it, of activations right to
/// kFp8FactorError.
std::vector<Bounded> fp8_expert_row(const ExpertConfig& config, const Fp8Expert& expert,
                                    const Fp8Row& x);

}  // namespace switchyard::reference

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "reference/bounded.hpp"
#include "switchyard/experts.hpp"

namespace switchyard::reference {

/// What the experts are computed with.
struct Precision {
  DType compute = DType::kF32;  ///< Tokens, weights and the intermediate.
  bool quantize_q8 = false;     ///< CPU: int8 weights, a scale for each 32 along the sum.
  /// CUDA, way back: the activation's gradient may be rounded to `compute` before the activation's
  /// slopes meet it (Hopper's kernels), or not (the portable ones).
  bool may_round_inner_gradient = false;
  /// CUDA, weights with scales of blocks: a weight is its code times its scale, or that rounded to
  /// `compute`, as the kernels like it that run.
  bool may_scale_sums = false;
  /// CUDA, f32, the forward: factors may be split into their upper 11 bits and the rest, the
  /// product of the rests left out, and sums of products cut off where tensor cores add.
  bool may_split_products = false;
  /// CUDA, weights in MXFP4: sums of 128 products may keep 14 bits, as loss_of_split() of fp8.hpp
  /// has it.
  bool may_split_rows = false;
  /// The share of a product's magnitude that may_split_products loses at most (about 2^-21 in the
  /// mean): a rest is less than 2^-10 of its number, so 2^-20 by the product that is left out;
  /// 2^-20 by each rest, of which tensor cores take 11 bits of 13; 2^-22 by sums cut off.
  [[nodiscard]] double product_loss() const {
    return may_split_products && compute == DType::kF32 ? 3.25 * 0x1p-20 : 0;
  }
};

/// sum over j of matrix[i, j] * x[j] + bias[i], of fp32 operations in any order: n products, n sums
/// and a bias are at most n + 1 roundings deep (n + 3 where a weight is int8 times a scale),
/// gamma_{n+3} times the sum of magnitudes. Where x itself is uncertain its errors add, each with
/// its weight; `matrix_error` is what a weight may be off by, as a share of it.
Bounded dot(std::span<const double> matrix, std::int64_t i, std::span<const double> x,
            std::span<const double> x_error, std::span<const float> bias, double matrix_error = 0);

/// Values as an implementation computes with them: rounded to `compute`.
std::vector<double> as_computed(std::span<const float> values, DType compute);

/// A bias of one expert, [size].
std::vector<float> read_bias(const ExpertSource& source, std::int32_t expert, ExpertPart part,
                             std::int64_t size);

/// The matrices of one expert, as computed with.
struct ExpertMatrices {
  std::vector<double> gate;  ///< W1 [I, H].
  std::vector<double> up;    ///< W3 [I, H]; empty where plain.
  std::vector<double> down;  ///< W2 [H, I].
  std::vector<float> gate_bias;
  std::vector<float> up_bias;
  std::vector<float> down_bias;
};

ExpertMatrices read_expert(const ExpertConfig& config, const ExpertSource& source,
                           std::int32_t expert, const Precision& precision);

/// What the factor in [0, 1] of a smooth activation, sigmoid or (1 + erf) / 2, may be off by, and
/// so the product by that of |gate|: exp, erf, tanh and division in fp32 are right to a few units
/// in the last place (1 + erf cancels for negative gates: relative to the result it would not
/// hold).
inline constexpr double kFp32FactorError = 8 * kUnit;
/// The same of sigmoids by `tanh.approx.f32`, where the intermediate becomes e4m3 (Hopper).
inline constexpr double kFp8FactorError = 0x1p-17 + kFp32FactorError;

/// act(gate) [* up], what one of the I inner values is before it is rounded to the compute type; of
/// fp32 operations. `up` counts where the experts are gated.
Bounded inner_value(const ExpertConfig& config, Bounded gate, Bounded up,
                    double factor_error = kFp32FactorError);

/// y [H] = W2 act(W1 x + b1 [, W3 x + b3]) + b2 with its error bound; x [H] as computed with.
std::vector<Bounded> expert_row(const ExpertConfig& config, const ExpertMatrices& matrices,
                                std::span<const double> x, const Precision& precision);

}  // namespace switchyard::reference

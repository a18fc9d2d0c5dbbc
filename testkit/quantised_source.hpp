#pragma once

// Experts whose weights are codes and scales, made up, and what these mean by the formats'
// definitions: nothing here is shared with the library's decode().

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/half.hpp"
#include "reference/bounded.hpp"
#include "switchyard/experts.hpp"
#include "testkit/random.hpp"

namespace switchyard {

/// e4m3: a sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity, 0x7f and 0xff are NaN.
inline double value_of_e4m3(std::uint8_t code) {
  const int exponent = (code >> 3) & 15;
  const int mantissa = code & 7;
  const double size =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<double>::quiet_NaN();
  return (code & 0x80) != 0 ? -size : size;
}

/// e2m1: a sign, 2 bits of exponent (bias 1), 1 of mantissa.
inline double value_of_e2m1(std::uint8_t code) {
  const int exponent = (code >> 1) & 3;
  const int mantissa = code & 1;
  const double size = exponent == 0 ? 0.5 * mantissa : std::ldexp(2 + mantissa, exponent - 2);
  return (code & 8) != 0 ? -size : size;
}

/// e8m0: a power of two; 255 is NaN.
inline double value_of_e8m0(std::uint8_t code) {
  return code == 255 ? std::numeric_limits<double>::quiet_NaN() : std::ldexp(1.0, code - 127);
}

/// f16 or bf16: a sign, 5 or 8 bits of exponent, 10 or 7 of mantissa; no infinity or NaN here.
inline double value_of_16_bits(std::uint16_t bits, DType dtype) {
  const int fraction = dtype == DType::kF16 ? 10 : 7;
  const int bias = dtype == DType::kF16 ? 15 : 127;
  const int exponent = (bits & 0x7fff) >> fraction;
  const int mantissa = bits & ((1 << fraction) - 1);
  const double size = exponent == 0
                          ? std::ldexp(mantissa, 1 - bias - fraction)
                          : std::ldexp((1 << fraction) + mantissa, exponent - bias - fraction);
  return (bits & 0x8000) != 0 ? -size : size;
}

/// One part of all experts, row-major as StoredLayout has it, expert after expert.
struct QuantisedPart {
  std::vector<std::uint8_t> codes{};   ///< A byte a value of e4m3, else a byte for two.
  std::vector<float> block_scales{};   ///< e4m3.
  std::vector<std::uint8_t> scales{};  ///< Rows of the others', in bytes.
  std::vector<float> factors{};        ///< NVFP4: one for each expert.
};

class QuantisedSource final : public ExpertSource {
 public:
  /// Any codes but NaN, with scales that make rows of about `size` times 1 / sqrt(row).
  QuantisedSource(const ExpertConfig& config, WeightFormat format, std::uint64_t seed,
                  float size = 1.0F, const Int4Form& form = {})
      : config_(config), format_(format), int4_(form) {
    for (int code = 0; code < 256; ++code) {
      const auto bits = static_cast<std::uint8_t>(code);
      const auto at = static_cast<std::size_t>(code);
      values_[at] = static_cast<float>(format == WeightFormat::kE4M3 ? value_of_e4m3(bits)
                                                                     : value_of_e2m1(bits));
      powers_[at] = value_of_e8m0(bits);
    }
    Random random(seed);
    for (const ExpertPart part : {ExpertPart::kGate, ExpertPart::kUp, ExpertPart::kDown}) {
      if (part != ExpertPart::kUp || config.gated) make(part, random, size);
    }
    for (auto* bias : {&gate_bias_, &up_bias_, &down_bias_}) {
      const std::int64_t rows = bias == &down_bias_ ? config.hidden : config.inner;
      for (std::int64_t i = 0; config.bias && i < config.num_experts * rows; ++i) {
        bias->push_back(0.5F * size * random.signed_unit());
      }
    }
  }

  [[nodiscard]] QuantisedPart& part(ExpertPart part) {
    return parts_[static_cast<std::size_t>(part)];
  }
  [[nodiscard]] DType dtype() const override { return DType::kBF16; }
  [[nodiscard]] WeightFormat stored_format() const override { return format_; }
  [[nodiscard]] Int4Form int4_form() const override { return int4_; }
  [[nodiscard]] float stored_factor(std::int32_t expert, ExpertPart part) const override {
    if (format_ != WeightFormat::kNvfp4) return 1;
    return parts_[static_cast<std::size_t>(part)].factors[static_cast<std::size_t>(expert)];
  }

  void read(std::int32_t expert, ExpertPart part, std::int64_t first_row, std::int64_t num_rows,
            DType dtype, void* out) const override {
    const auto [rows, cols] = shape(part);
    for (std::int64_t row = 0; row < num_rows; ++row) {
      for (std::int64_t col = 0; col < cols; ++col) {
        const float product = value(expert, part, first_row + row, col);
        // Rounded by the reference's definition where it is finite.
        const double rounded = dtype != DType::kF32 && std::isfinite(product)
                                   ? reference::round_value(dtype, double{product})
                                   : product;
        store_float(out, dtype, row * cols + col, static_cast<float>(rounded));
      }
    }
  }

  void read_stored(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                   std::int64_t num_rows, const StoredRows& out) const override {
    const auto [rows, cols] = shape(part);
    const QuantisedPart& from = parts_[static_cast<std::size_t>(part)];
    const StoredLayout before = layout(first_row, cols);
    const StoredLayout all = layout(rows, cols);
    const StoredLayout these = layout(num_rows, cols);
    std::memcpy(out.values, from.codes.data() + expert * all.value_bytes() + before.value_bytes(),
                static_cast<std::size_t>(these.value_bytes()));
    if (format_ == WeightFormat::kE4M3) {
      const std::int64_t row_of_blocks = all.scale_rows() * expert + first_row / kE4M3Block;
      std::memcpy(out.scales,
                  from.block_scales.data() + row_of_blocks * (all.scale_row_bytes() / 4),
                  static_cast<std::size_t>(these.scale_bytes()));
    } else {
      std::memcpy(out.scales,
                  from.scales.data() + expert * all.scale_bytes() + before.scale_bytes(),
                  static_cast<std::size_t>(these.scale_bytes()));
    }
  }

  void read_bias(std::int32_t expert, ExpertPart part, float* out) const override {
    const std::vector<float>& bias = part == ExpertPart::kDown ? down_bias_
                                     : part == ExpertPart::kUp ? up_bias_
                                                               : gate_bias_;
    const std::int64_t rows = shape(part)[0];
    std::copy_n(bias.begin() + expert * rows, rows, out);
  }

 private:
  [[nodiscard]] std::array<std::int64_t, 2> shape(ExpertPart part) const {
    if (part == ExpertPart::kDown) return {config_.hidden, config_.inner};
    return {config_.inner, config_.hidden};
  }

  [[nodiscard]] StoredLayout layout(std::int64_t rows, std::int64_t cols) const {
    return {.format = format_, .rows = rows, .cols = cols, .int4 = int4_};
  }

  /// What a code means, in f32.
  [[nodiscard]] float value(std::int32_t expert, ExpertPart part, std::int64_t row,
                            std::int64_t col) const {
    const auto [rows, cols] = shape(part);
    const QuantisedPart& from = parts_[static_cast<std::size_t>(part)];
    const std::int64_t at = (expert * rows + row) * cols + col;
    if (format_ == WeightFormat::kE4M3) {
      const std::int64_t blocks = (cols + 127) / 128;
      const std::int64_t block = (expert * ((rows + 127) / 128) + row / 128) * blocks + col / 128;
      const std::uint8_t code = from.codes[static_cast<std::size_t>(at)];
      return values_[code] * from.block_scales[static_cast<std::size_t>(block)];
    }
    const std::uint8_t pair = from.codes[static_cast<std::size_t>(at / 2)];
    const auto code = static_cast<std::uint8_t>(col % 2 == 0 ? pair & 15 : pair >> 4);
    if (format_ == WeightFormat::kMxfp4) {
      const std::uint8_t scale = from.scales[static_cast<std::size_t>(at / 32)];
      return static_cast<float>(values_[code] * powers_[scale]);
    }
    if (format_ == WeightFormat::kNvfp4) {
      const double scale = value_of_e4m3(from.scales[static_cast<std::size_t>(at / 16)]);
      const auto of_block =
          static_cast<float>(scale * from.factors[static_cast<std::size_t>(expert)]);
      return static_cast<float>(double{values_[code]} * of_block);
    }
    const std::int64_t groups = cols / int4_.group;
    const std::int64_t row_bytes = 2 * groups + (int4_.zero_points ? (groups + 1) / 2 : 0);
    const std::uint8_t* scales = from.scales.data() + (expert * rows + row) * row_bytes;
    const std::int64_t group = col / int4_.group;
    const double scale = value_of_16_bits(
        static_cast<std::uint16_t>(scales[2 * group] + 256 * scales[2 * group + 1]), int4_.scale);
    int zero = 8;
    if (int4_.zero_points) zero = scales[2 * groups + group / 2] >> (group % 2 * 4) & 15;
    return static_cast<float>((code - zero) * scale);
  }

  /// Rows of scales of int4, some negative, and one in sixteen 0.
  void make_int4_scales(std::int64_t rows, std::int64_t cols, double per_term, Random& random,
                        std::vector<std::uint8_t>& out) const {
    const std::int64_t groups = cols / int4_.group;
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t i = 0; i < groups; ++i) {
        // Codes of any bits are 6 in the root of their mean square, about their zero point.
        const double sign = random.one_in(8) ? -1 : 1;
        const double wanted =
            random.one_in(16) ? 0 : sign * per_term / 6 * std::exp2(random.signed_unit());
        const auto scale = static_cast<float>(wanted);
        const std::uint16_t bits =
            int4_.scale == DType::kF16 ? float_to_f16(scale) : float_to_bf16(scale);
        out.push_back(static_cast<std::uint8_t>(bits & 255));
        out.push_back(static_cast<std::uint8_t>(bits >> 8));
      }
      for (std::int64_t i = 0; int4_.zero_points && i < (groups + 1) / 2; ++i) {
        out.push_back(static_cast<std::uint8_t>(random.bits() >> 56));
      }
    }
  }

  /// Scales of NVFP4 of 1/2 to 2, some negative, one in sixteen 0, and factors for the rest.
  void make_nvfp4_scales(std::int64_t count, double per_term, Random& random,
                         QuantisedPart& part) const {
    for (std::int64_t i = 0; i < count; ++i) {
      const auto scale = static_cast<std::uint8_t>(random.between(0x30, 0x40));
      const int sign = random.one_in(8) ? 0x80 : 0;
      part.scales.push_back(random.one_in(16) ? 0 : static_cast<std::uint8_t>(scale | sign));
    }
    for (std::int32_t expert = 0; expert < config_.num_experts; ++expert) {
      part.factors.push_back(static_cast<float>(per_term / 2.9 * std::exp2(random.signed_unit())));
    }
  }

  void make(ExpertPart which, Random& random, float size) {
    const auto [rows, cols] = shape(which);
    const StoredLayout whole = layout(rows, cols);
    const bool e4m3 = format_ == WeightFormat::kE4M3;
    QuantisedPart& part = parts_[static_cast<std::size_t>(which)];
    const auto wanted = static_cast<std::size_t>(config_.num_experts * whole.value_bytes());
    while (part.codes.size() < wanted) {
      const auto code = static_cast<std::uint8_t>(random.bits() >> 56);
      if (!e4m3 || (code & 0x7f) != 0x7f) part.codes.push_back(code);
    }
    // Codes of any bits are 157 (e4m3) or 2.9 (e2m1) in the root of their mean square.
    const double per_term = size / std::sqrt(static_cast<double>(cols));
    const std::int64_t scales =
        config_.num_experts * whole.scale_bytes() / (e4m3 ? std::int64_t{sizeof(float)} : 1);
    if (format_ == WeightFormat::kInt4) {
      return make_int4_scales(config_.num_experts * rows, cols, per_term, random, part.scales);
    }
    if (format_ == WeightFormat::kNvfp4) {
      return make_nvfp4_scales(scales, per_term, random, part);
    }
    const int power = static_cast<int>(std::lround(std::log2(per_term / 2.9)));
    for (std::int64_t i = 0; i < scales; ++i) {
      if (e4m3) {
        part.block_scales.push_back(
            static_cast<float>(per_term / 157 * std::exp2(random.signed_unit())));
      } else {
        part.scales.push_back(
            static_cast<std::uint8_t>(127 + power + static_cast<int>(random.between(-2, 1))));
      }
    }
  }

  ExpertConfig config_;
  WeightFormat format_;
  Int4Form int4_;
  std::array<float, 256> values_{};   ///< Of the codes, but of int4.
  std::array<double, 256> powers_{};  ///< Of MXFP4's scales.
  std::array<QuantisedPart, 3> parts_{};
  std::vector<float> gate_bias_, up_bias_, down_bias_;
};

}  // namespace switchyard

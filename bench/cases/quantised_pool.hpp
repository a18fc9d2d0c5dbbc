#pragma once

// Experts whose weights are stored as codes and scales, made up while they are read.

#include <vector>

#include "switchyard/experts.hpp"

namespace switchyard::bench {

/// The groups of kInt4 in such a pool: the largest that divides both sizes, or 32.
[[nodiscard]] inline Int4Form pool_form(const ExpertConfig& config) {
  Int4Form form;
  while (form.group > 32 && (config.hidden % form.group != 0 || config.inner % form.group != 0)) {
    form.group /= 2;
  }
  return form;
}

/// Rows of codes cut from a pool of random ones, with scales that make weights of a deviation of
/// about 1/sqrt(fan-in); biases of up to 0.1.
class QuantisedPool final : public ExpertSource {
 public:
  /// @param format  One with codes; kInt4 in the form of pool_form().
  QuantisedPool(const ExpertConfig& config, WeightFormat format, std::uint64_t seed);

  [[nodiscard]] DType dtype() const override { return DType::kBF16; }
  [[nodiscard]] WeightFormat stored_format() const override { return format_; }
  [[nodiscard]] Int4Form int4_form() const override { return pool_form(config_); }
  [[nodiscard]] float stored_factor(std::int32_t expert, ExpertPart part) const override;
  void read(std::int32_t expert, ExpertPart part, std::int64_t first_row, std::int64_t num_rows,
            DType dtype, void* out) const override;
  void read_stored(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                   std::int64_t num_rows, const StoredRows& out) const override;
  void read_bias(std::int32_t expert, ExpertPart part, float* out) const override;

 private:
  [[nodiscard]] std::int64_t cols(ExpertPart part) const {
    return part == ExpertPart::kDown ? config_.inner : config_.hidden;
  }

  ExpertConfig config_;
  WeightFormat format_;
  std::vector<std::byte> codes_;
};

}  // namespace switchyard::bench

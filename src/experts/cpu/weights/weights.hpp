#pragma once

#include <memory>
#include <vector>

#include "core/cpu/memory.hpp"
#include "experts/cpu/kernels/kernels.hpp"
#include "switchyard/experts.hpp"

namespace switchyard::cpu {

/// How one matrix of an expert lies in panels.
struct PanelShape {
  std::int64_t depth = 0;   ///< The reduction as rows are packed; stored weights may go beyond.
  std::int64_t panels = 0;  ///< Of panel_cols columns each; columns beyond the matrix are 0.
  std::int64_t panel_bytes = 0;

  [[nodiscard]] std::int64_t bytes() const { return panels * panel_bytes; }
};

/// A matrix of [cols of the product, depth], `panel_cols` of its columns to a panel.
PanelShape panel_shape(const Kernels& kernels, std::int64_t depth, std::int64_t cols);

/// Packed weights: per expert the panels of the first product (gate and up columns in the two
/// halves of a panel, so that the activation needs one panel only), then those of the second.
class CpuExpertWeights final : public ExpertWeights {
 public:
  CpuExpertWeights(const LoadExpertsArgs& args, const Kernels& kernels);

  [[nodiscard]] double bytes_per_expert() const override {
    return static_cast<double>(first_.bytes() + second_.bytes());
  }
  void read(std::int32_t expert, ExpertPart part, std::int64_t first_row, std::int64_t num_rows,
            DType dtype, void* out) const override;
  void read_bias(std::int32_t expert, ExpertPart part, float* out) const override;
  [[nodiscard]] const Kernels& kernels() const { return kernels_; }
  [[nodiscard]] const PanelShape& first() const { return first_; }
  [[nodiscard]] const PanelShape& second() const { return second_; }
  /// Columns of the intermediate in a panel of the first product.
  [[nodiscard]] std::int64_t first_cols() const {
    return config().gated ? kernels_.panel_cols / 2 : kernels_.panel_cols;
  }
  [[nodiscard]] std::byte* first_panel(std::int64_t expert, std::int64_t panel) const {
    return memory_.data() + expert * (first_.bytes() + second_.bytes()) +
           panel * first_.panel_bytes;
  }
  [[nodiscard]] std::byte* second_panel(std::int64_t expert, std::int64_t panel) const {
    return first_panel(expert, first_.panels) + panel * second_.panel_bytes;
  }
  /// Biases in the order of the panels' columns; null without.
  [[nodiscard]] float* first_bias(std::int64_t expert, std::int64_t panel) {
    return bias_at(first_bias_, expert * first_.panels + panel);
  }
  [[nodiscard]] float* second_bias(std::int64_t expert, std::int64_t panel) {
    return bias_at(second_bias_, expert * second_.panels + panel);
  }
  [[nodiscard]] const float* first_bias(std::int64_t expert, std::int64_t panel) const {
    return const_cast<CpuExpertWeights*>(this)->first_bias(expert, panel);
  }
  [[nodiscard]] const float* second_bias(std::int64_t expert, std::int64_t panel) const {
    return const_cast<CpuExpertWeights*>(this)->second_bias(expert, panel);
  }

 private:
  [[nodiscard]] float* bias_at(std::vector<float>& bias, std::int64_t panel) const {
    return bias.empty() ? nullptr : bias.data() + panel * kernels_.panel_cols;
  }

  const Kernels& kernels_;
  PanelShape first_;
  PanelShape second_;
  HugeBuffer memory_;
  std::vector<float> first_bias_;
  std::vector<float> second_bias_;
};

/// Rows of a matrix [columns of the product][depth] into one panel.
struct PackPanelArgs {
  const void* rows[2];    ///< The panel's two halves: `count[i]` rows of `depth` elements each.
  std::int64_t count[2];  ///< Up to panel_cols / 2; missing columns become 0.
  std::int64_t depth;     ///< Elements of a row: f32 for kF32 and kQ8, else the compute type.
  PanelShape shape;
  const Kernels* kernels;
  std::byte* out;
};
void pack_panel(const PackPanelArgs& args);

/// The same of stored weights: rows as ExpertSource::read_stored() gives them, those of a half
/// within one block of e4m3. StoredPanel says where they go.
struct PackStoredArgs {
  ConstStoredRows rows[2];
  std::int64_t count[2];
  std::int64_t depth;  ///< Of the rows.
  PanelShape shape;
  const Kernels* kernels;
  std::byte* out;
};
/// @throws Error{kInvalidArgument}: a code or scale that is not a number.
void pack_stored(const PackStoredArgs& args);

/// Column `col` of a panel of stored weights as a row of its matrix: `depth` values in f32.
void unpack_stored(const Kernels& kernels, const std::byte* panel, std::int64_t col,
                   std::int64_t depth, float* out);

}  // namespace switchyard::cpu

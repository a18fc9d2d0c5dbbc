#pragma once

// What the sources of quantised matrices, a set of tensors for each, have in common.

#include <memory>
#include <string>

#include "checkpoint/sources/expert_source.hpp"

namespace switchyard {

/// Matrices without biases of which read() gives what read_stored() means.
class QuantisedMatrices : public ExpertSource {
 public:
  [[nodiscard]] DType dtype() const override { return DType::kBF16; }
  void read(std::int32_t expert, ExpertPart part, std::int64_t first_row, std::int64_t num_rows,
            DType dtype, void* out) const final;
  void read_bias(std::int32_t expert, ExpertPart part, float* out) const final;

 protected:
  QuantisedMatrices(std::shared_ptr<const TensorSet> tensors, const ExpertConfig& config)
      : tensors_(std::move(tensors)), config_(config) {}

  [[nodiscard]] StoredLayout layout_of(ExpertPart part, std::int64_t rows) const {
    return {.format = stored_format(),
            .rows = rows,
            .cols = part_shape(config_, part)[1],
            .int4 = int4_form()};
  }
  /// @throws Error{kBadFile}: missing, of another shape or type.
  [[nodiscard]] const StoredTensor& at(const std::string& name,
                                       const std::vector<std::int64_t>& shape,
                                       StoredType type) const;
  /// One f32, [] or [1]: finite and above 0.
  [[nodiscard]] float positive(const std::string& name) const;

  std::shared_ptr<const TensorSet> tensors_;
  ExpertConfig config_;
};

/// "a.b.weight" without its last part.
[[nodiscard]] std::string module_of(const std::string& name);

}  // namespace switchyard

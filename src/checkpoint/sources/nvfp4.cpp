// NVFP4: two codes a byte, an e4m3 scale for each 16, an f32 factor for the matrix.
#include <algorithm>
#include <utility>

#include "checkpoint/files/file_error.hpp"
#include "checkpoint/files/mapped_file.hpp"
#include "checkpoint/sources/quantised.hpp"

namespace switchyard {
namespace {

class Nvfp4Source final : public QuantisedMatrices {
 public:
  Nvfp4Source(std::shared_ptr<const TensorSet> tensors, const ExpertConfig& config,
              const std::vector<ExpertTensorNames>& names)
      : QuantisedMatrices(std::move(tensors), config) {
    for (const ExpertTensorNames& expert : names) {
      auto& matrices = experts_.emplace_back();
      for (std::size_t part = 0; part < expert.size(); ++part) {
        matrices[part] = find(expert[part], static_cast<ExpertPart>(part));
      }
    }
  }

  [[nodiscard]] WeightFormat stored_format() const override { return WeightFormat::kNvfp4; }
  [[nodiscard]] float stored_factor(std::int32_t expert, ExpertPart part) const override {
    return matrix_of(expert, part).factor;
  }

  void read_stored(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                   std::int64_t num_rows, const StoredRows& out) const override {
    const auto [values, scales] = stored(expert, part, first_row, num_rows);
    const Matrix& matrix = matrix_of(expert, part);
    std::copy(values.begin(), values.end(), out.values);
    std::copy(scales.begin(), scales.end(), out.scales);
    const auto nan = std::find_if(scales.begin(), scales.end(), [](std::byte scale) {
      return (scale & std::byte{0x7f}) == std::byte{0x7f};
    });
    const std::int64_t blocks = layout_of(part, 1).scale_row_bytes();
    require_file(nan == scales.end(), tensors_->name(),
                 "tensor '{}': row {}, column {} is NaN, which stored weights cannot have",
                 matrix.scales->spec.name, first_row + (nan - scales.begin()) / blocks,
                 (nan - scales.begin()) % blocks);
  }

  void will_read(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                 std::int64_t num_rows) const override {
    for (const auto& bytes : stored(expert, part, first_row, num_rows)) read_ahead(bytes);
  }
  void done_with(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                 std::int64_t num_rows) const override {
    for (const auto& bytes : stored(expert, part, first_row, num_rows)) give_back(bytes);
  }

 private:
  struct Matrix {
    const StoredTensor* values = nullptr;
    const StoredTensor* scales = nullptr;
    float factor = 1;
  };

  [[nodiscard]] const Matrix& matrix_of(std::int32_t expert, ExpertPart part) const {
    return experts_[static_cast<std::size_t>(expert)][static_cast<std::size_t>(part)];
  }

  /// Where rows are stored: values, scales.
  [[nodiscard]] std::array<std::span<const std::byte>, 2> stored(std::int32_t expert,
                                                                 ExpertPart part,
                                                                 std::int64_t first_row,
                                                                 std::int64_t num_rows) const {
    check_read(config_, expert, part, first_row, num_rows, DType::kF32);
    const Matrix& matrix = matrix_of(expert, part);
    const StoredLayout before = layout_of(part, first_row);
    const StoredLayout these = layout_of(part, num_rows);
    const auto cut = [](const StoredTensor& tensor, std::int64_t first, std::int64_t count) {
      return tensor.bytes.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
    };
    return {cut(*matrix.values, before.value_bytes(), these.value_bytes()),
            cut(*matrix.scales, before.scale_bytes(), these.scale_bytes())};
  }

  [[nodiscard]] Matrix find(const std::string& name, ExpertPart part) const {
    const auto [rows, cols] = part_shape(config_, part);
    const std::string module = module_of(name);
    const bool is_packed = tensors_->find(module + ".weight_packed") != nullptr;
    const std::string values = is_packed ? module + ".weight_packed" : name;
    require_file(cols % kNvfp4Block == 0, tensors_->name(),
                 "tensor '{}': {} columns are not a multiple of {}", values, cols, kNvfp4Block);
    Matrix matrix;
    matrix.values = &at(values, {rows, cols / 2}, StoredType::kU8);
    matrix.scales = &at(module + ".weight_scale", {rows, cols / kNvfp4Block}, StoredType::kF8E4M3);
    if (is_packed) {
      matrix.factor = 1 / positive(module + ".weight_global_scale");
    } else {
      matrix.factor = positive(module + ".weight_scale_2");
    }
    const std::string zeros = module + ".weight_zero_point";
    require_file(tensors_->find(zeros) == nullptr, tensors_->name(),
                 "has a tensor '{}': NVFP4 with zero points is not supported here", zeros);
    // Rows are not quantised here: their scale is not used, but a broken one is a broken file.
    for (const char* input : {".input_global_scale", ".input_scale"}) {
      if (tensors_->find(module + input) != nullptr) (void)positive(module + input);
    }
    return matrix;
  }

  std::vector<std::array<Matrix, 3>> experts_;
};

}  // namespace

std::unique_ptr<ExpertSource> make_nvfp4_source(std::shared_ptr<const TensorSet> tensors,
                                                const ExpertConfig& config,
                                                const std::vector<ExpertTensorNames>& names) {
  return std::make_unique<Nvfp4Source>(std::move(tensors), config, names);
}

}  // namespace switchyard

// gpt-oss: all experts of a layer in one tensor, in MXFP4.
#include <algorithm>
#include <utility>

#include "checkpoint/files/file_error.hpp"
#include "checkpoint/files/mapped_file.hpp"
#include "checkpoint/sources/expert_source.hpp"
#include "core/check.hpp"
#include "core/mxfp4.hpp"
#include "core/row_ops.hpp"

namespace switchyard {
namespace {

/// Gate and up rows take turns: the stored row, or column, of a part's row.
struct Interleave {
  std::int64_t first;
  std::int64_t step;
};
Interleave interleave_of(ExpertPart part) {
  if (part == ExpertPart::kDown) return {0, 1};
  return {part == ExpertPart::kGate ? 0 : 1, 2};
}

class Mxfp4Source final : public ExpertSource {
 public:
  Mxfp4Source(std::shared_ptr<const TensorSet> tensors, const ExpertConfig& config,
              const std::string& prefix)
      : tensors_(std::move(tensors)),
        config_(config),
        gate_up_bias_(
            tensors_->floats(prefix + "gate_up_proj_bias", {config.num_experts, 2 * config.inner})),
        down_bias_(
            tensors_->floats(prefix + "down_proj_bias", {config.num_experts, config.hidden})),
        gate_up_name_(prefix + "gate_up_proj"),
        down_name_(prefix + "down_proj"),
        gate_up_(find(gate_up_name_, 2 * config.inner, config.hidden)),
        down_(find(down_name_, config.hidden, config.inner)) {}

  [[nodiscard]] DType dtype() const override { return DType::kBF16; }

  void read(std::int32_t expert, ExpertPart part, std::int64_t first_row, std::int64_t num_rows,
            DType dtype, void* out) const override {
    check_read(config_, expert, part, first_row, num_rows, dtype);
    const StoredLayout row = layout_of(part, 1);
    auto* to = static_cast<std::byte*>(out);
    for (std::int64_t i = 0; i < num_rows; ++i) {
      decode(row, row_at(expert, part, first_row + i), dtype, to);
      to += row.cols * size_of(dtype);
    }
  }

  [[nodiscard]] WeightFormat stored_format() const override { return WeightFormat::kMxfp4; }

  void read_stored(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                   std::int64_t num_rows, const StoredRows& out) const override {
    check_read(config_, expert, part, first_row, num_rows, DType::kF32);
    const StoredLayout row = layout_of(part, 1);
    for (std::int64_t i = 0; i < num_rows; ++i) {
      const ConstStoredRows from = row_at(expert, part, first_row + i);
      std::copy_n(from.values, row.value_bytes(), out.values + i * row.value_bytes());
      std::copy_n(from.scales, row.scale_bytes(), out.scales + i * row.scale_bytes());
      const auto scales = std::span(from.scales, static_cast<std::size_t>(row.scale_bytes()));
      const auto nan = std::find(scales.begin(), scales.end(), std::byte{0xff});
      require_file(nan == scales.end(), tensors_->name(),
                   "tensor '{}_scales': block {} of row {} of expert {} is 255, NaN, which stored "
                   "weights cannot have",
                   part == ExpertPart::kDown ? down_name_ : gate_up_name_, nan - scales.begin(),
                   (first_row + i) * interleave_of(part).step + interleave_of(part).first, expert);
    }
  }

  void read_bias(std::int32_t expert, ExpertPart part, float* out) const override {
    const std::int64_t rows = part_shape(config_, part)[0];
    check_read(config_, expert, part, 0, rows, DType::kF32);
    const auto [first, step] = interleave_of(part);
    const std::vector<float>& bias = part == ExpertPart::kDown ? down_bias_ : gate_up_bias_;
    const float* from = bias.data() + expert * rows * step + first;
    for (std::int64_t row = 0; row < rows; ++row) out[row] = from[row * step];
  }

  void will_read(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                 std::int64_t num_rows) const override {
    check_read(config_, expert, part, first_row, num_rows, DType::kF32);
    for (const auto& bytes : stored(expert, part, first_row, num_rows)) read_ahead(bytes);
  }
  void done_with(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                 std::int64_t num_rows) const override {
    check_read(config_, expert, part, first_row, num_rows, DType::kF32);
    for (const auto& bytes : stored(expert, part, first_row, num_rows)) give_back(bytes);
  }

 private:
  [[nodiscard]] StoredLayout layout_of(ExpertPart part, std::int64_t rows) const {
    return {.format = WeightFormat::kMxfp4, .rows = rows, .cols = part_shape(config_, part)[1]};
  }
  [[nodiscard]] const ConstStoredRows& matrix_of(ExpertPart part) const {
    return part == ExpertPart::kDown ? down_ : gate_up_;
  }
  /// Row `row` of a part.
  [[nodiscard]] ConstStoredRows row_at(std::int32_t expert, ExpertPart part,
                                       std::int64_t row) const {
    const auto [first, step] = interleave_of(part);
    const StoredLayout before =
        layout_of(part, (expert * part_shape(config_, part)[0] + row) * step + first);
    const ConstStoredRows& matrix = matrix_of(part);
    return {matrix.values + before.value_bytes(), matrix.scales + before.scale_bytes()};
  }

  /// Where rows are stored: values, scales.
  [[nodiscard]] std::array<std::span<const std::byte>, 2> stored(std::int32_t expert,
                                                                 ExpertPart part,
                                                                 std::int64_t first_row,
                                                                 std::int64_t num_rows) const {
    const std::int64_t step = interleave_of(part).step;
    const StoredLayout before =
        layout_of(part, (expert * part_shape(config_, part)[0] + first_row) * step);
    const StoredLayout these = layout_of(part, num_rows * step);
    const ConstStoredRows& matrix = matrix_of(part);
    return {std::span(matrix.values + before.value_bytes(),
                      static_cast<std::size_t>(these.value_bytes())),
            std::span(matrix.scales + before.scale_bytes(),
                      static_cast<std::size_t>(these.scale_bytes()))};
  }

  [[nodiscard]] ConstStoredRows find(const std::string& name, std::int64_t rows,
                                     std::int64_t cols) const {
    require_file(cols % kMxfp4Block == 0, tensors_->name(),
                 "tensor '{}_blocks': {} columns are not a multiple of {}", name, cols,
                 kMxfp4Block);
    const std::int64_t blocks = cols / kMxfp4Block;
    const auto& values =
        tensors_->at(name + "_blocks", {config_.num_experts, rows, blocks, kMxfp4BlockBytes});
    const auto& scales = tensors_->at(name + "_scales", {config_.num_experts, rows, blocks});
    for (const StoredTensor* tensor : {&values, &scales}) {
      require_file(tensor->spec.type == StoredType::kU8 || tensor->spec.type == StoredType::kF8E8M0,
                   tensors_->name(), "tensor '{}' is {}, expected U8", tensor->spec.name,
                   to_string(tensor->spec.type));
    }
    return {values.bytes.data(), scales.bytes.data()};
  }

  std::shared_ptr<const TensorSet> tensors_;
  ExpertConfig config_;
  std::vector<float> gate_up_bias_;
  std::vector<float> down_bias_;
  std::string gate_up_name_;
  std::string down_name_;
  ConstStoredRows gate_up_;
  ConstStoredRows down_;
};

}  // namespace

std::unique_ptr<ExpertSource> make_mxfp4_source(std::shared_ptr<const TensorSet> tensors,
                                                const ExpertConfig& config,
                                                const std::string& prefix) {
  return std::make_unique<Mxfp4Source>(std::move(tensors), config, prefix);
}

}  // namespace switchyard

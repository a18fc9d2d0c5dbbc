// All experts of a part in one tensor, plain numbers: rows as they are, or transposed. Bound by the
// page cache; a transposed row is gathered some columns at a time.
#include <algorithm>
#include <utility>

#include "checkpoint/files/file_error.hpp"
#include "checkpoint/files/mapped_file.hpp"
#include "checkpoint/sources/expert_source.hpp"
#include "core/check.hpp"
#include "core/row_ops.hpp"

namespace switchyard {
namespace {

/// Where a part's element [expert, row, col] lies, counted in elements. Either stride is 1, or, of
/// transposed rows that take turns, the stride of rows is 2.
struct PartView {
  const StoredTensor* tensor = nullptr;
  std::int64_t expert_stride = 0;
  std::int64_t first = 0;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 0;

  [[nodiscard]] DType dtype() const { return *dtype_of(tensor->spec.type); }
  [[nodiscard]] std::span<const std::byte> from(std::int64_t expert, std::int64_t row,
                                                std::int64_t col, std::int64_t count) const {
    const std::int64_t at = expert * expert_stride + first + row * row_stride + col * col_stride;
    const std::int64_t size = size_of(dtype());
    return tensor->bytes.subspan(static_cast<std::size_t>(at * size),
                                 static_cast<std::size_t>(count * size));
  }
};

class StackedSource final : public ExpertSource {
 public:
  StackedSource(std::shared_ptr<const TensorSet> tensors, const ExpertConfig& config,
                const StackedNames& names)
      : tensors_(std::move(tensors)),
        config_(config),
        interleaved_(names.interleaved),
        weightless_(names.weightless) {
    const bool is_split = !names.up.empty();
    const StoredTensor& gate = at(names.gate);
    const StoredTensor& down = at(names.down);
    const std::int64_t rows = is_split ? config.inner : 2 * config.inner;
    const bool down_turned = is_transposed(names.down_form, down, config.hidden, config.inner);
    const bool turned = names.form == StackedForm::kByShape && config.inner != config.hidden
                            ? down_turned  // where gate and up together are square, this one tells
                            : is_transposed(names.form, gate, rows, config.hidden);
    views_[0] = view_of(gate, rows, config.hidden, turned);
    views_[1] = is_split ? view_of(at(names.up), rows, config.hidden, turned) : views_[0];
    views_[2] = view_of(down, config.hidden, config.inner, down_turned);
    if (!is_split) place_up();
    if (config.bias) read_biases(names);
  }

  [[nodiscard]] DType dtype() const override { return views_[0].dtype(); }

  void read(std::int32_t expert, ExpertPart part, std::int64_t first_row, std::int64_t num_rows,
            DType dtype, void* out) const override {
    check_read(config_, expert, part, first_row, num_rows, dtype);
    const PartView& view = views_[static_cast<std::size_t>(part)];
    const std::int64_t cols = part_shape(config_, part)[1];
    if (view.col_stride == 1) {
      read_rows(view, expert, first_row, num_rows, cols, dtype, static_cast<std::byte*>(out));
    } else {
      read_columns(view, expert, first_row, num_rows, cols, dtype, static_cast<std::byte*>(out));
    }
  }

  void read_bias(std::int32_t expert, ExpertPart part, float* out) const override {
    const std::int64_t rows = part_shape(config_, part)[0];
    check_read(config_, expert, part, 0, rows, DType::kF32);
    require(config_.bias, "{}: these experts have no biases", tensors_->name());
    if (part == ExpertPart::kDown) {
      // One for all experts, or one each.
      const std::int64_t begin = std::ssize(down_bias_) == rows ? 0 : expert * rows;
      std::copy_n(down_bias_.data() + begin, rows, out);
    } else if (gate_up_bias_.empty()) {
      std::fill_n(out, rows, 0.0F);
    } else {
      const std::int64_t step = interleaved_ ? 2 : 1;
      const std::int64_t up = interleaved_ ? 1 : rows;
      const float* from =
          gate_up_bias_.data() + 2 * rows * expert + (part == ExpertPart::kUp ? up : 0);
      for (std::int64_t row = 0; row < rows; ++row) out[row] = from[row * step];
    }
  }

  void will_read(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                 std::int64_t num_rows) const override {
    check_read(config_, expert, part, first_row, num_rows, DType::kF32);
    if (num_rows > 0) read_ahead(stored(expert, part, first_row, num_rows, first_row));
  }
  void done_with(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                 std::int64_t num_rows) const override {
    check_read(config_, expert, part, first_row, num_rows, DType::kF32);
    const std::int64_t left = part_shape(config_, part)[0] - first_row - num_rows;
    if (num_rows > 0) give_back(stored(expert, part, first_row, num_rows, left));
  }

 private:
  static constexpr std::int64_t kRun = 32;

  [[nodiscard]] const StoredTensor& at(const std::string& name) const {
    const StoredTensor* found = tensors_->find(name);
    require_file(found != nullptr, tensors_->name(), "has no tensor '{}'", name);
    require_file(is_float(found->spec.type), tensors_->name(),
                 "tensor '{}' is {}, expected F32, BF16 or F16", name, to_string(found->spec.type));
    return *found;
  }

  /// [E, rows, cols], or the same in two dimensions.
  [[nodiscard]] bool has_shape(const StoredTensor& tensor, std::int64_t rows,
                               std::int64_t cols) const {
    const std::int64_t num = config_.num_experts;
    return tensor.spec.shape == std::vector{num, rows, cols} ||
           tensor.spec.shape == std::vector{num * rows, cols} ||
           tensor.spec.shape == std::vector{num + weightless_, rows, cols};
  }

  [[nodiscard]] bool is_transposed(StackedForm form, const StoredTensor& tensor, std::int64_t rows,
                                   std::int64_t cols) const {
    if (form != StackedForm::kByShape) return form == StackedForm::kTransposed;
    return !has_shape(tensor, rows, cols) && has_shape(tensor, cols, rows);
  }

  /// A part that fills its tensor.
  [[nodiscard]] PartView view_of(const StoredTensor& tensor, std::int64_t rows, std::int64_t cols,
                                 bool transposed) const {
    const std::int64_t stored_rows = transposed ? cols : rows;
    const std::int64_t stored_cols = transposed ? rows : cols;
    require_file(has_shape(tensor, stored_rows, stored_cols), tensors_->name(),
                 "tensor '{}' has shape {}, expected {}", tensor.spec.name,
                 shape_text(tensor.spec.shape),
                 shape_text({config_.num_experts, stored_rows, stored_cols}));
    return {.tensor = &tensor,
            .expert_stride = rows * cols,
            .row_stride = transposed ? 1 : cols,
            .col_stride = transposed ? rows : 1};
  }

  /// Gate and up rows share a tensor: halves of it, or by turns.
  void place_up() {
    PartView& gate = views_[0];
    PartView& up = views_[1];
    up.first = gate.row_stride * (interleaved_ ? 1 : config_.inner);
    if (interleaved_) gate.row_stride = up.row_stride = 2 * gate.row_stride;
  }

  void read_biases(const StackedNames& names) {
    const std::int64_t num = config_.num_experts;
    if (!names.gate_up_bias.empty()) {
      gate_up_bias_ = tensors_->floats(names.gate_up_bias, {num, 2 * config_.inner});
      down_bias_ = tensors_->floats(names.down_bias, {num, config_.hidden});
    } else {
      down_bias_ = tensors_->floats(names.down_bias, {config_.hidden});
    }
  }

  void read_rows(const PartView& view, std::int32_t expert, std::int64_t first_row,
                 std::int64_t num_rows, std::int64_t cols, DType dtype, std::byte* out) const {
    const bool is_run = view.row_stride == cols;  // one after the other
    const std::int64_t step = is_run ? num_rows : 1;
    for (std::int64_t row = 0; row < num_rows; row += step) {
      const auto from = view.from(expert, first_row + row, 0, step * cols);
      if (dtype == view.dtype()) {
        tensors_->file_of(*view.tensor).copy(from, out);
      } else {
        row_ops::convert(view.dtype(), from.data(), dtype, out, step * cols);
      }
      out += step * cols * size_of(dtype);
    }
  }

  /// A stored row is a column of ours. Some of them at a time, so that what is written is not one
  /// element per row but a run.
  static void read_columns(const PartView& view, std::int32_t expert, std::int64_t first_row,
                           std::int64_t num_rows, std::int64_t cols, DType dtype, std::byte* out) {
    const std::int64_t width = num_rows == 0 ? 0 : (num_rows - 1) * view.row_stride + 1;
    std::vector<float> lines(static_cast<std::size_t>(kRun * width));
    std::array<float, kRun> run{};
    for (std::int64_t col = 0; col < cols; col += kRun) {
      const std::int64_t count = std::min(kRun, cols - col);
      for (std::int64_t i = 0; i < count && width > 0; ++i) {
        row_ops::widen(view.dtype(), view.from(expert, first_row, col + i, width).data(),
                       lines.data() + i * width, width);
      }
      for (std::int64_t row = 0; row < num_rows; ++row) {
        const float* from = lines.data() + row * view.row_stride;
        for (std::int64_t i = 0; i < count; ++i) run[static_cast<std::size_t>(i)] = from[i * width];
        row_ops::narrow(dtype, run.data(), out + (row * cols + col) * size_of(dtype), count);
      }
    }
  }

  /// What is to be read for rows. Transposed rows are spread over all of an expert: that is said
  /// once, where `others`, the rows before or after these, is 0.
  [[nodiscard]] std::span<const std::byte> stored(std::int32_t expert, ExpertPart part,
                                                  std::int64_t first_row, std::int64_t num_rows,
                                                  std::int64_t others) const {
    const PartView& view = views_[static_cast<std::size_t>(part)];
    if (view.col_stride == 1) {
      const std::int64_t cols = part_shape(config_, part)[1];
      return view.from(expert, first_row, 0, (num_rows - 1) * view.row_stride + cols);
    }
    if (others != 0) return {};
    return view.tensor->bytes.subspan(
        static_cast<std::size_t>(expert * view.expert_stride * size_of(view.dtype())),
        static_cast<std::size_t>(view.expert_stride * size_of(view.dtype())));
  }

  std::shared_ptr<const TensorSet> tensors_;
  ExpertConfig config_;
  bool interleaved_;
  std::int64_t weightless_;
  std::array<PartView, 3> views_{};  ///< By ExpertPart.
  std::vector<float> gate_up_bias_;
  std::vector<float> down_bias_;
};

}  // namespace

std::unique_ptr<ExpertSource> make_stacked_source(std::shared_ptr<const TensorSet> tensors,
                                                  const ExpertConfig& config,
                                                  const StackedNames& names) {
  return std::make_unique<StackedSource>(std::move(tensors), config, names);
}

}  // namespace switchyard

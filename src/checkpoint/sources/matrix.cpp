// One tensor per matrix, as most families store experts. Bound by the page cache: a row is read,
// converted, or multiplied by the factor of its blocks once.
#include <algorithm>
#include <cmath>
#include <utility>

#include "checkpoint/files/file_error.hpp"
#include "checkpoint/files/mapped_file.hpp"
#include "checkpoint/sources/expert_source.hpp"
#include "core/check.hpp"
#include "core/row_ops.hpp"

namespace switchyard {
namespace {

constexpr std::int64_t num_blocks(std::int64_t extent) {
  return (extent + kE4M3Block - 1) / kE4M3Block;
}

struct SourceMatrix {
  const std::byte* data = nullptr;
  StoredType type = StoredType::kF32;
  const MappedFile* file = nullptr;
  std::vector<float> scales;  ///< F8 only: a factor per block, row-major.
  std::string name{};

  /// From row `row` on, which begins a block or stands alone.
  [[nodiscard]] ConstStoredRows scaled_from(std::int64_t row, std::int64_t cols) const {
    return {data + row * cols, reinterpret_cast<const std::byte*>(
                                   scales.data() + row / kE4M3Block * num_blocks(cols))};
  }
};

class MatrixSource : public ExpertSource {
 public:
  MatrixSource(std::shared_ptr<const TensorSet> tensors, const ExpertConfig& config,
               const std::vector<ExpertTensorNames>& names)
      : tensors_(std::move(tensors)), config_(config) {
    for (const ExpertTensorNames& expert : names) {
      auto& matrices = experts_.emplace_back();
      for (std::size_t part = 0; part < expert.size(); ++part) {
        matrices[part] = find(expert[part], static_cast<ExpertPart>(part));
        // Where only some are quantised, all are read as numbers.
        if (matrices[part].type != StoredType::kF8E4M3) format_ = WeightFormat::kExact;
      }
    }
  }

  [[nodiscard]] DType dtype() const override {
    const StoredType type = experts_.front().front().type;
    return type == StoredType::kF8E4M3 ? DType::kBF16 : *dtype_of(type);
  }

  void read(std::int32_t expert, ExpertPart part, std::int64_t first_row, std::int64_t num_rows,
            DType dtype, void* out) const override {
    check_read(config_, expert, part, first_row, num_rows, dtype);
    const SourceMatrix& matrix = matrix_of(expert, part);
    const std::int64_t cols = part_shape(config_, part)[1];
    if (matrix.type == StoredType::kF8E4M3) {
      auto* to = static_cast<std::byte*>(out);
      for (std::int64_t i = 0; i < num_rows; ++i) {
        decode(e4m3_layout(1, cols), matrix.scaled_from(first_row + i, cols), dtype, to);
        to += cols * size_of(dtype);
      }
    } else if (dtype == dtype_of(matrix.type)) {
      matrix.file->copy(stored_rows(expert, part, first_row, num_rows), out);
    } else {
      row_ops::convert(*dtype_of(matrix.type),
                       matrix.data + first_row * cols * size_of(matrix.type), dtype, out,
                       num_rows * cols);
    }
  }

  [[nodiscard]] WeightFormat stored_format() const override { return format_; }

  void read_stored(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                   std::int64_t num_rows, const StoredRows& out) const override {
    if (format_ == WeightFormat::kExact) {
      read(expert, part, first_row, num_rows, dtype(), out.values);
      return;
    }
    const auto bytes = stored_rows(expert, part, first_row, num_rows);
    require(first_row % kE4M3Block == 0 || first_row % kE4M3Block + num_rows <= kE4M3Block,
            "rows from {}, {} of them: the scales of e4m3 weights belong to {} rows each, want the "
            "first to be a multiple of it, or all of them to share one",
            first_row, num_rows, kE4M3Block);
    const SourceMatrix& matrix = matrix_of(expert, part);
    const std::int64_t cols = part_shape(config_, part)[1];
    matrix.file->copy(bytes, out.values);
    const auto nan = std::find_if(bytes.begin(), bytes.end(), [](std::byte code) {
      return (code & std::byte{0x7f}) == std::byte{0x7f};
    });
    require_file(nan == bytes.end(), tensors_->name(),
                 "tensor '{}': row {}, column {} is NaN, which stored weights cannot have",
                 matrix.name, first_row + (nan - bytes.begin()) / cols,
                 (nan - bytes.begin()) % cols);
    std::copy_n(matrix.scaled_from(first_row, cols).scales,
                e4m3_layout(num_rows, cols).scale_bytes(), out.scales);
    for (std::int64_t i = 0; i < e4m3_layout(num_rows, cols).scale_bytes() / 4; ++i) {
      const std::int64_t block = first_row / kE4M3Block * num_blocks(cols) + i;
      const float scale = matrix.scales[static_cast<std::size_t>(block)];
      require_file(std::isfinite(scale), tensors_->name(),
                   "tensor '{}_scale_inv': row {}, column {} is {}, which stored weights cannot "
                   "have",
                   matrix.name, block / num_blocks(cols), block % num_blocks(cols), scale);
    }
  }

  void read_bias(std::int32_t /*expert*/, ExpertPart /*part*/, float* /*out*/) const override {
    fail(ErrorCode::kInvalidArgument, "{}: these experts have no biases", tensors_->name());
  }

  void will_read(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                 std::int64_t num_rows) const override {
    read_ahead(stored_rows(expert, part, first_row, num_rows));
  }
  void done_with(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                 std::int64_t num_rows) const override {
    give_back(stored_rows(expert, part, first_row, num_rows));
  }

 private:
  static StoredLayout e4m3_layout(std::int64_t rows, std::int64_t cols) {
    return {.format = WeightFormat::kE4M3, .rows = rows, .cols = cols};
  }
  [[nodiscard]] const SourceMatrix& matrix_of(std::int32_t expert, ExpertPart part) const {
    return experts_[static_cast<std::size_t>(expert)][static_cast<std::size_t>(part)];
  }

  [[nodiscard]] std::span<const std::byte> stored_rows(std::int32_t expert, ExpertPart part,
                                                       std::int64_t first_row,
                                                       std::int64_t num_rows) const {
    check_read(config_, expert, part, first_row, num_rows, DType::kF32);
    const SourceMatrix& matrix = matrix_of(expert, part);
    const std::int64_t row = part_shape(config_, part)[1] * size_of(matrix.type);
    return {matrix.data + first_row * row, static_cast<std::size_t>(num_rows * row)};
  }

  [[nodiscard]] SourceMatrix find(const std::string& name, ExpertPart part) const {
    const auto [rows, cols] = part_shape(config_, part);
    const StoredTensor& tensor = tensors_->at(name, {rows, cols});
    SourceMatrix matrix{
        tensor.bytes.data(), tensor.spec.type, &tensors_->file_of(tensor), {}, name};
    if (matrix.type == StoredType::kF8E4M3) {
      const std::string input = name.substr(0, name.rfind('.')) + ".input_scale";
      require_file(tensors_->find(input) == nullptr, tensors_->name(),
                   "has a tensor '{}': rows that are quantised by a scale of the checkpoint's are "
                   "not supported here",
                   input);
      matrix.scales = tensors_->floats(name + "_scale_inv", {num_blocks(rows), num_blocks(cols)});
    } else {
      require_file(is_float(matrix.type), tensors_->name(),
                   "tensor '{}' is {}, expected F32, BF16, F16 or F8_E4M3", name,
                   to_string(matrix.type));
    }
    return matrix;
  }

  std::shared_ptr<const TensorSet> tensors_;
  ExpertConfig config_;
  WeightFormat format_ = WeightFormat::kE4M3;
  std::vector<std::array<SourceMatrix, 3>> experts_;
};

}  // namespace

std::array<std::int64_t, 2> part_shape(const ExpertConfig& config, ExpertPart part) {
  if (part == ExpertPart::kDown) return {config.hidden, config.inner};
  return {config.inner, config.hidden};
}

void check_read(const ExpertConfig& config, std::int32_t expert, ExpertPart part,
                std::int64_t first_row, std::int64_t num_rows, DType dtype) {
  require(0 <= expert && expert < config.num_experts, "expert {} of {} experts", expert,
          config.num_experts);
  const std::int64_t rows = part_shape(config, part)[0];
  require(0 <= first_row && 0 <= num_rows && num_rows <= rows && first_row <= rows - num_rows,
          "rows from {}, {} of them, of a matrix of {} rows", first_row, num_rows, rows);
  require(is_float(stored_type(dtype)), "weights are read as f32, bf16 or f16, not as {}",
          to_string(dtype));
}

std::unique_ptr<ExpertSource> make_matrix_source(std::shared_ptr<const TensorSet> tensors,
                                                 const ExpertConfig& config,
                                                 const std::vector<ExpertTensorNames>& names) {
  return std::make_unique<MatrixSource>(std::move(tensors), config, names);
}

}  // namespace switchyard

// Weights of four bits in groups, as GPTQ, AWQ and compressed-tensors pack them into words. Bound
// by the page cache where a row lies together; else by the steps from word to word.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "checkpoint/files/file_error.hpp"
#include "checkpoint/files/mapped_file.hpp"
#include "checkpoint/sources/quantised.hpp"
#include "core/formats/int4.hpp"

namespace switchyard {
namespace {

/// Codes of a word of 32 bits.
constexpr std::int64_t kCodes = 8;

enum class Packing : std::uint8_t {
  kGptq,    ///< [K/8, N], 8 neighbours of a row a word; zero points [K/group, N/8].
  kAwq,     ///< [K, N/8], 8 rows a word, in an order of their own; zero points the same.
  kPacked,  ///< [N, K/8], 8 neighbours of a row a word; zero points [ceil(N/8), K/group].
};

std::uint32_t word_at(const StoredTensor& tensor, std::int64_t index) {
  std::uint32_t word = 0;
  std::memcpy(&word, tensor.bytes.data() + index * std::int64_t{sizeof word}, sizeof word);
  return word;
}

/// Code `i` of a word, of AWQ in its order: the even ones first.
std::uint32_t code_of(std::uint32_t word, std::int64_t i, Packing packing) {
  const std::int64_t place = packing == Packing::kAwq ? i % 2 * 4 + i / 2 : i;
  return word >> (4 * place) & 15U;
}

class Int4Source final : public QuantisedMatrices {
 public:
  Int4Source(std::shared_ptr<const TensorSet> tensors, const ExpertConfig& config,
             const std::vector<ExpertTensorNames>& names, GptqZeros zeros)
      : QuantisedMatrices(std::move(tensors), config),
        zero_offset_(zeros == GptqZeros::kLessOne ? 1 : 0) {
    for (const ExpertTensorNames& expert : names) {
      auto& matrices = experts_.emplace_back();
      for (std::size_t part = 0; part < expert.size(); ++part) {
        matrices[part] = find(module_of(expert[part]), static_cast<ExpertPart>(part));
      }
    }
  }

  [[nodiscard]] DType dtype() const override { return form_.scale; }
  [[nodiscard]] WeightFormat stored_format() const override { return WeightFormat::kInt4; }
  [[nodiscard]] Int4Form int4_form() const override { return form_; }

  void read_stored(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                   std::int64_t num_rows, const StoredRows& out) const override {
    check_read(config_, expert, part, first_row, num_rows, DType::kF32);
    const Matrix& matrix = matrix_of(expert, part);
    const Rows rows{part_shape(config_, part)[0], layout_of(part, num_rows), first_row};
    switch (matrix.packing) {
      case Packing::kGptq: read_gptq(matrix, rows, out.values); break;
      case Packing::kAwq: read_awq(matrix, rows, out.values); break;
      case Packing::kPacked: {
        const auto from = values_of(matrix, part, first_row, num_rows);
        std::copy(from.begin(), from.end(), out.values);
      }
    }
    read_scales(matrix, rows, out.scales);
  }

  void will_read(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                 std::int64_t num_rows) const override {
    check_read(config_, expert, part, first_row, num_rows, DType::kF32);
    read_ahead(advised(matrix_of(expert, part), part, first_row, num_rows, first_row));
  }
  void done_with(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                 std::int64_t num_rows) const override {
    check_read(config_, expert, part, first_row, num_rows, DType::kF32);
    const std::int64_t left = part_shape(config_, part)[0] - first_row - num_rows;
    give_back(advised(matrix_of(expert, part), part, first_row, num_rows, left));
  }

 private:
  struct Matrix {
    Packing packing = Packing::kGptq;
    const StoredTensor* values = nullptr;
    const StoredTensor* scales = nullptr;
    const StoredTensor* zeros = nullptr;  ///< Null: symmetric.
  };
  /// `layout.rows` rows from `first` on of a matrix of `all`.
  struct Rows {
    std::int64_t all;
    StoredLayout layout;
    std::int64_t first;
  };

  [[nodiscard]] const Matrix& matrix_of(std::int32_t expert, ExpertPart part) const {
    return experts_[static_cast<std::size_t>(expert)][static_cast<std::size_t>(part)];
  }

  [[nodiscard]] std::span<const std::byte> values_of(const Matrix& matrix, ExpertPart part,
                                                     std::int64_t first_row,
                                                     std::int64_t num_rows) const {
    return matrix.values->bytes.subspan(
        static_cast<std::size_t>(layout_of(part, first_row).value_bytes()),
        static_cast<std::size_t>(layout_of(part, num_rows).value_bytes()));
  }
  /// What advice is about. Rows of GPTQ and AWQ are spread over the matrix: that is said once,
  /// where `others`, the rows before or after these, is 0.
  [[nodiscard]] std::span<const std::byte> advised(const Matrix& matrix, ExpertPart part,
                                                   std::int64_t first_row, std::int64_t num_rows,
                                                   std::int64_t others) const {
    if (matrix.packing == Packing::kPacked) return values_of(matrix, part, first_row, num_rows);
    return others == 0 ? matrix.values->bytes : std::span<const std::byte>{};
  }

  /// A word has the codes of a row as they are wanted.
  static void read_gptq(const Matrix& matrix, const Rows& rows, std::byte* out) {
    const std::int64_t row_bytes = rows.layout.value_row_bytes();
    for (std::int64_t word = 0; word < rows.layout.cols / kCodes; ++word) {
      for (std::int64_t row = 0; row < rows.layout.rows; ++row) {
        const std::uint32_t codes = word_at(*matrix.values, word * rows.all + rows.first + row);
        std::memcpy(out + row * row_bytes + word * std::int64_t{sizeof codes}, &codes,
                    sizeof codes);
      }
    }
  }

  static void read_awq(const Matrix& matrix, const Rows& rows, std::byte* out) {
    const std::int64_t row_bytes = rows.layout.value_row_bytes();
    const std::int64_t words = rows.all / kCodes;
    for (std::int64_t pair = 0; pair < row_bytes; ++pair) {
      for (std::int64_t row = 0; row < rows.layout.rows; ++row) {
        const std::int64_t n = rows.first + row;
        const std::int64_t at = 2 * pair * words + n / kCodes;
        const std::uint32_t even = code_of(word_at(*matrix.values, at), n % kCodes, Packing::kAwq);
        const std::uint32_t odd =
            code_of(word_at(*matrix.values, at + words), n % kCodes, Packing::kAwq);
        out[row * row_bytes + pair] = static_cast<std::byte>(even | odd << 4);
      }
    }
  }

  void read_scales(const Matrix& matrix, const Rows& rows, std::byte* out) const {
    const std::int64_t groups = rows.layout.cols / form_.group;
    const std::int64_t row_bytes = rows.layout.scale_row_bytes();
    const bool is_packed = matrix.packing == Packing::kPacked;
    for (std::int64_t row = 0; row < rows.layout.rows; ++row, out += row_bytes) {
      const std::int64_t n = rows.first + row;
      for (std::int64_t group = 0; group < groups; ++group) {
        const std::int64_t at = is_packed ? n * groups + group : group * rows.all + n;
        const std::byte* scale = matrix.scales->bytes.data() + 2 * at;
        require_file(std::isfinite(int4_scale_at(form_, scale)), tensors_->name(),
                     "tensor '{}': row {}, column {} is {}, which stored weights cannot have",
                     matrix.scales->spec.name, is_packed ? n : group, is_packed ? group : n,
                     int4_scale_at(form_, scale));
        std::memcpy(out + 2 * group, scale, 2);
        if (matrix.zeros == nullptr) continue;
        std::byte& two = out[2 * groups + group / 2];
        const auto zero = static_cast<std::byte>(zero_of(matrix, rows, n, groups, group));
        two = group % 2 == 0 ? zero : two | zero << 4;
      }
    }
  }

  [[nodiscard]] std::uint32_t zero_of(const Matrix& matrix, const Rows& rows, std::int64_t n,
                                      std::int64_t groups, std::int64_t group) const {
    const std::int64_t at = matrix.packing == Packing::kPacked
                                ? n / kCodes * groups + group
                                : group * (rows.all / kCodes) + n / kCodes;
    const std::uint32_t zero = code_of(word_at(*matrix.zeros, at), n % kCodes, matrix.packing);
    return matrix.packing == Packing::kGptq ? (zero + zero_offset_) & 15U : zero;
  }

  [[nodiscard]] Matrix find(const std::string& module, ExpertPart part) {
    const auto [rows, cols] = part_shape(config_, part);
    Matrix matrix;
    if (tensors_->find(module + ".weight_packed") != nullptr) {
      matrix = find_packed(module, rows, cols);
    } else {
      matrix = find_words(module, rows, cols);
    }
    check_order(module + (matrix.packing == Packing::kPacked ? ".weight_g_idx" : ".g_idx"), cols);
    for (const char* input : {".input_scale", ".input_global_scale", ".input_zero_point"}) {
      require_file(
          tensors_->find(module + input) == nullptr, tensors_->name(),
          "has a tensor '{}{}': rows that are quantised by a scale of the checkpoint's are "
          "not supported here",
          module, input);
    }
    return matrix;
  }

  /// GPTQ or AWQ, by the shape.
  [[nodiscard]] Matrix find_words(const std::string& module, std::int64_t rows, std::int64_t cols) {
    const std::string name = module + ".qweight";
    const StoredTensor* found = tensors_->find(name);
    require_file(found != nullptr, tensors_->name(), "has no tensor '{}'", name);
    const std::vector<std::int64_t> awq = {cols, rows / kCodes};
    Matrix matrix;
    matrix.packing = found->spec.shape == awq ? Packing::kAwq : Packing::kGptq;
    check_words(name, "columns", cols);
    check_words(name, "rows", rows);
    const std::vector<std::int64_t> gptq = {cols / kCodes, rows};
    matrix.values = &at(name, matrix.packing == Packing::kAwq ? awq : gptq, StoredType::kI32);
    matrix.scales = find_scales(module + ".scales", 0, rows, cols, true);
    matrix.zeros = &at(module + ".qzeros", {cols / form_.group, rows / kCodes}, StoredType::kI32);
    return matrix;
  }

  [[nodiscard]] Matrix find_packed(const std::string& module, std::int64_t rows,
                                   std::int64_t cols) {
    Matrix matrix{.packing = Packing::kPacked};
    const std::string name = module + ".weight_packed";
    check_words(name, "columns", cols);
    matrix.values = &at(name, {rows, cols / kCodes}, StoredType::kI32);
    const std::string zeros = module + ".weight_zero_point";
    const bool has_zeros = tensors_->find(zeros) != nullptr;
    matrix.scales = find_scales(module + ".weight_scale", 1, rows, cols, has_zeros);
    if (has_zeros) {
      matrix.zeros =
          &at(zeros, {(rows + kCodes - 1) / kCodes, cols / form_.group}, StoredType::kI32);
    }
    return matrix;
  }

  void check_words(const std::string& name, const char* what, std::int64_t extent) const {
    require_file(extent % kCodes == 0, tensors_->name(),
                 "tensor '{}': {} {} are not a multiple of {}", name, extent, what, kCodes);
  }

  /// Their shape says the group; the first ones' form is all others'.
  [[nodiscard]] const StoredTensor* find_scales(const std::string& name, std::size_t along,
                                                std::int64_t rows, std::int64_t cols,
                                                bool zero_points) {
    const StoredTensor* found = tensors_->find(name);
    require_file(found != nullptr, tensors_->name(), "has no tensor '{}'", name);
    const bool is_matrix = found->spec.shape.size() == 2;
    const std::int64_t groups = is_matrix ? found->spec.shape[along] : 0;
    const std::int64_t group = groups > 0 && cols % groups == 0 ? cols / groups : 0;
    require_file(group == 32 || group == 64 || group == 128, tensors_->name(),
                 "tensor '{}' has shape {}, for {} rows and {} columns: expected a scale for each "
                 "32, 64 or 128 columns",
                 name, shape_text(found->spec.shape), rows, cols);
    const StoredType type = found->spec.type;
    require_file(type == StoredType::kF16 || type == StoredType::kBF16, tensors_->name(),
                 "tensor '{}' is {}, expected F16 or BF16", name, to_string(type));
    const Int4Form form{.group = static_cast<std::int32_t>(group),
                        .scale = *dtype_of(type),
                        .zero_points = zero_points};
    if (first_name_.empty()) {
      form_ = form;
      first_name_ = name;
    }
    require_file(
        form == form_, tensors_->name(),
        "tensor '{}' is {} for {} columns each, {} zero points, and '{}' is {} for {}, {}: "
        "expected the same of all experts",
        name, to_string(form.scale), form.group, form.zero_points ? "with" : "without", first_name_,
        to_string(form_.scale), form_.group, form_.zero_points ? "with" : "without");
    const std::vector<std::int64_t> down = {groups, rows}, across = {rows, groups};
    return &at(name, along == 0 ? down : across, type);
  }

  /// Columns of groups one after the other: what GPTQ calls act-order or desc_act has another
  /// order.
  void check_order(const std::string& name, std::int64_t cols) const {
    const StoredTensor* found = tensors_->find(name);
    if (found == nullptr) return;
    const StoredTensor& order = at(name, {cols}, StoredType::kI32);
    for (std::int64_t k = 0; k < cols; ++k) {
      const auto group = static_cast<std::int32_t>(word_at(order, k));
      require_file(group == k / form_.group, tensors_->name(),
                   "tensor '{}': column {} is of group {}, expected {}: weights in another order "
                   "(act-order, desc_act) are not supported here",
                   name, k, group, k / form_.group);
    }
  }

  Int4Form form_;
  std::string first_name_;
  std::uint32_t zero_offset_;
  std::vector<std::array<Matrix, 3>> experts_;
};

}  // namespace

std::unique_ptr<ExpertSource> make_int4_source(std::shared_ptr<const TensorSet> tensors,
                                               const ExpertConfig& config,
                                               const std::vector<ExpertTensorNames>& names,
                                               GptqZeros zeros) {
  return std::make_unique<Int4Source>(std::move(tensors), config, names, zeros);
}

}  // namespace switchyard

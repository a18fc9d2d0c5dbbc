// gpt-oss: all experts of a layer in one tensor, MXFP4 or transposed. Dequantising is exact in
// bf16 and f32: an E2M1 value has two significant bits and its block a power of two.
#include <algorithm>
#include <cstring>
#include <utility>

#include "checkpoint/files/file_error.hpp"
#include "checkpoint/files/mapped_file.hpp"
#include "checkpoint/sources/expert_source.hpp"
#include "checkpoint/sources/mxfp4.hpp"
#include "core/check.hpp"
#include "core/half.hpp"
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

/// What both storages share: the biases.
class InterleavedSource : public ExpertSource {
 public:
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
    for (const auto& bytes : stored(expert, part, first_row, num_rows, first_row)) {
      read_ahead(bytes);
    }
  }
  void done_with(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                 std::int64_t num_rows) const override {
    check_read(config_, expert, part, first_row, num_rows, DType::kF32);
    const std::int64_t left = part_shape(config_, part)[0] - first_row - num_rows;
    for (const auto& bytes : stored(expert, part, first_row, num_rows, left)) give_back(bytes);
  }

 protected:
  InterleavedSource(std::shared_ptr<const TensorSet> tensors, const ExpertConfig& config,
                    const std::string& prefix)
      : tensors_(std::move(tensors)),
        config_(config),
        gate_up_bias_(
            tensors_->floats(prefix + "gate_up_proj_bias", {config.num_experts, 2 * config.inner})),
        down_bias_(
            tensors_->floats(prefix + "down_proj_bias", {config.num_experts, config.hidden})) {}

  using Spans = std::vector<std::span<const std::byte>>;
  /// Where rows are stored. A storage that has the rows of an expert all mixed names all of the
  /// expert if `others`, the rows before or after these, is 0, and nothing if it is not.
  [[nodiscard]] virtual Spans stored(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                                     std::int64_t num_rows, std::int64_t others) const = 0;

  std::shared_ptr<const TensorSet> tensors_;
  ExpertConfig config_;

 private:
  std::vector<float> gate_up_bias_;
  std::vector<float> down_bias_;
};

class Mxfp4Source final : public InterleavedSource {
 public:
  Mxfp4Source(std::shared_ptr<const TensorSet> tensors, const ExpertConfig& config,
              const std::string& prefix)
      : InterleavedSource(std::move(tensors), config, prefix),
        gate_up_(find(prefix + "gate_up_proj", 2 * config.inner, config.hidden)),
        down_(find(prefix + "down_proj", config.hidden, config.inner)) {}

  [[nodiscard]] DType dtype() const override { return DType::kBF16; }

  void read(std::int32_t expert, ExpertPart part, std::int64_t first_row, std::int64_t num_rows,
            DType dtype, void* out) const override {
    check_read(config_, expert, part, first_row, num_rows, dtype);
    const Quantised& matrix = part == ExpertPart::kDown ? down_ : gate_up_;
    const auto [rows, cols] = part_shape(config_, part);
    const auto [first, step] = interleave_of(part);
    const std::int64_t blocks = cols / kMxBlock;
    auto* to = static_cast<std::byte*>(out);
    for (std::int64_t row = 0; row < num_rows; ++row) {
      const std::int64_t stored_row = expert * rows * step + first + (first_row + row) * step;
      for (std::int64_t block = stored_row * blocks; block < (stored_row + 1) * blocks; ++block) {
        const float scale = e8m0_to_float(std::to_integer<std::uint8_t>(matrix.scales[block]));
        const std::byte* values = matrix.blocks + block * kMxBlockBytes;
        if (dtype == DType::kF32) {
          dequantise<float>(values, scale, dtype, to);
        } else {
          dequantise<std::uint16_t>(values, scale, dtype, to);
        }
        to += kMxBlock * size_of(dtype);
      }
    }
  }

 private:
  struct Quantised {
    const std::byte* blocks;
    const std::byte* scales;
  };

  [[nodiscard]] Spans stored(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                             std::int64_t num_rows, std::int64_t /*others*/) const override {
    const Quantised& matrix = part == ExpertPart::kDown ? down_ : gate_up_;
    const auto [rows, cols] = part_shape(config_, part);
    const std::int64_t step = interleave_of(part).step;
    const std::int64_t begin = (expert * rows + first_row) * step * (cols / kMxBlock);
    const auto count = static_cast<std::size_t>(num_rows * step * (cols / kMxBlock));
    return {{matrix.blocks + begin * kMxBlockBytes, count * kMxBlockBytes},
            {matrix.scales + begin, count}};
  }

  [[nodiscard]] Quantised find(const std::string& name, std::int64_t rows,
                               std::int64_t cols) const {
    require_file(cols % kMxBlock == 0, tensors_->name(),
                 "tensor '{}_blocks': {} columns are not a multiple of {}", name, cols, kMxBlock);
    const std::int64_t blocks = cols / kMxBlock;
    const auto& values =
        tensors_->at(name + "_blocks", {config_.num_experts, rows, blocks, kMxBlockBytes});
    const auto& scales = tensors_->at(name + "_scales", {config_.num_experts, rows, blocks});
    for (const StoredTensor* tensor : {&values, &scales}) {
      require_file(tensor->spec.type == StoredType::kU8 || tensor->spec.type == StoredType::kF8E8M0,
                   tensors_->name(), "tensor '{}' is {}, expected U8", tensor->spec.name,
                   to_string(tensor->spec.type));
    }
    return {values.bytes.data(), scales.bytes.data()};
  }

  /// 32 values from a table of the block's 16: each is rounded once, not per use.
  template <typename T>
  static void dequantise(const std::byte* values, float scale, DType dtype, std::byte* out) {
    std::array<T, 16> table{};
    for (std::size_t i = 0; i < 16; ++i) {
      store_float(table.data(), dtype, static_cast<std::int64_t>(i), kE2M1[i] * scale);
    }
    std::array<T, kMxBlock> block{};
    for (std::size_t i = 0; i < kMxBlockBytes; ++i) {
      const auto pair = std::to_integer<std::size_t>(values[i]);
      block[2 * i] = table[pair & 15U];
      block[2 * i + 1] = table[pair >> 4];
    }
    std::memcpy(out, block.data(), sizeof block);
  }

  Quantised gate_up_;
  Quantised down_;
};

class TransposedSource final : public InterleavedSource {
 public:
  TransposedSource(std::shared_ptr<const TensorSet> tensors, const ExpertConfig& config,
                   const std::string& prefix)
      : InterleavedSource(std::move(tensors), config, prefix),
        gate_up_(tensors_->at(prefix + "gate_up_proj",
                              {config.num_experts, config.hidden, 2 * config.inner})),
        down_(
            tensors_->at(prefix + "down_proj", {config.num_experts, config.inner, config.hidden})) {
    for (const StoredTensor* tensor : {&gate_up_, &down_}) {
      require_file(is_float(tensor->spec.type), tensors_->name(),
                   "tensor '{}' is {}, expected F32, BF16 or F16", tensor->spec.name,
                   to_string(tensor->spec.type));
    }
  }

  [[nodiscard]] DType dtype() const override { return *dtype_of(gate_up_.spec.type); }

  void read(std::int32_t expert, ExpertPart part, std::int64_t first_row, std::int64_t num_rows,
            DType dtype, void* out) const override {
    check_read(config_, expert, part, first_row, num_rows, dtype);
    const StoredTensor& tensor = part == ExpertPart::kDown ? down_ : gate_up_;
    const DType stored = *dtype_of(tensor.spec.type);
    const auto [rows, cols] = part_shape(config_, part);
    const auto [first, step] = interleave_of(part);
    const std::int64_t stored_cols = rows * step;
    const std::int64_t begin = first + first_row * step;  // first stored column that is needed
    const std::int64_t width = num_rows == 0 ? 0 : (num_rows - 1) * step + 1;
    // A stored row is a column of ours. Some of them at a time, so that what is written is not one
    // element per row but a run.
    std::vector<float> lines(static_cast<std::size_t>(kRun * width));
    std::array<float, kRun> run{};
    for (std::int64_t col = 0; col < cols; col += kRun) {
      const std::int64_t count = std::min(kRun, cols - col);
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t at = (expert * cols + col + i) * stored_cols + begin;
        row_ops::widen(stored, tensor.bytes.data() + at * size_of(stored), lines.data() + i * width,
                       width);
      }
      for (std::int64_t row = 0; row < num_rows; ++row) {
        const float* from = lines.data() + row * step;
        for (std::int64_t i = 0; i < count; ++i) run[static_cast<std::size_t>(i)] = from[i * width];
        row_ops::narrow(dtype, run.data(),
                        static_cast<std::byte*>(out) + (row * cols + col) * size_of(dtype), count);
      }
    }
  }

 private:
  static constexpr std::int64_t kRun = 32;

  [[nodiscard]] Spans stored(std::int32_t expert, ExpertPart part, std::int64_t /*first_row*/,
                             std::int64_t /*num_rows*/, std::int64_t others) const override {
    if (others != 0) return {};
    const StoredTensor& tensor = part == ExpertPart::kDown ? down_ : gate_up_;
    const std::size_t bytes = tensor.bytes.size() / static_cast<std::size_t>(config_.num_experts);
    return {tensor.bytes.subspan(static_cast<std::size_t>(expert) * bytes, bytes)};
  }

  const StoredTensor& gate_up_;
  const StoredTensor& down_;
};

}  // namespace

std::unique_ptr<ExpertSource> make_interleaved_source(std::shared_ptr<const TensorSet> tensors,
                                                      const ExpertConfig& config,
                                                      const std::string& prefix) {
  if (tensors->find(prefix + "gate_up_proj_blocks") != nullptr) {
    return std::make_unique<Mxfp4Source>(std::move(tensors), config, prefix);
  }
  return std::make_unique<TransposedSource>(std::move(tensors), config, prefix);
}

}  // namespace switchyard

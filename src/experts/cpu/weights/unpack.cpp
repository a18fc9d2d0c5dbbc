// Weights out of the panels again: the inverse of pack.cpp, row by row. A panel of usual sizes
// stays in the second-level cache while its rows are gathered from it.
#include <algorithm>
#include <cstring>

#include "core/half.hpp"
#include "core/row_ops.hpp"
#include "core/shape_check.hpp"
#include "experts/cpu/weights/weights.hpp"

namespace switchyard::cpu {
namespace {

/// A column of a panel, which is a row of the matrix.
struct Column {
  const std::byte* panel;
  std::int64_t col;
  std::int64_t cols;   ///< Of the panel.
  std::int64_t depth;  ///< Values wanted.
};

/// [depth / kGroup][columns][kGroup].
template <class T, int kGroup>
void gather(const Column& column, std::byte* out) {
  const std::byte* from = column.panel + column.col * kGroup * std::int64_t{sizeof(T)};
  const std::int64_t unit_bytes = column.cols * kGroup * std::int64_t{sizeof(T)};
  for (std::int64_t k = 0; k < column.depth; k += kGroup, from += unit_bytes) {
    const std::int64_t count = std::min<std::int64_t>(kGroup, column.depth - k);
    std::memcpy(out + k * std::int64_t{sizeof(T)}, from,
                static_cast<std::size_t>(count) * sizeof(T));
  }
}

/// [depth / 32]{[columns / 2][2] bf16 scales, [16][columns][2] int8}, as pack_q8() leaves them.
void dequantize(const Column& column, float* out) {
  const std::int64_t half = column.cols / 2;
  const std::byte* group = column.panel;
  for (std::int64_t first = 0; first < column.depth; first += kQ8Group) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, group + 2 * (column.col % half * 2 + column.col / half), sizeof(bits));
    const float scale = bf16_to_float(bits);
    const auto* values = reinterpret_cast<const std::int8_t*>(group + 2 * column.cols);
    const std::int64_t length = std::min(kQ8Group, column.depth - first);
    for (std::int64_t k = 0; k < length; ++k) {
      const std::int64_t pair = k / 2 * column.cols + column.col;
      out[first + k] = scale * static_cast<float>(values[2 * pair + k % 2]);
    }
    group += column.cols * kQ8GroupBytes;
  }
}

}  // namespace

void CpuExpertWeights::read(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                            std::int64_t num_rows, DType type, void* out) const {
  const std::int32_t local = local_of(expert, part, first_row, num_rows);
  require_float("the type that weights are read in", type);
  const bool down = part == ExpertPart::kDown;
  const std::int64_t depth = down ? config().inner : config().hidden;
  const std::int64_t per_panel = down ? kernels_.panel_cols : first_cols();
  const std::int64_t offset = part == ExpertPart::kUp ? per_panel : 0;
  const bool has_scales = kernels_.storage == Storage::kQ8 || kernels_.widen != nullptr;
  const DType stored = has_scales ? DType::kF32 : dtype();
  std::vector<std::byte> row(static_cast<std::size_t>(depth * size_of(stored)));
  auto* to = static_cast<std::byte*>(out);
  for (std::int64_t r = first_row; r < first_row + num_rows; ++r) {
    const std::int64_t panel = r / per_panel;
    const Column column{.panel = down ? second_panel(local, panel) : first_panel(local, panel),
                        .col = offset + r % per_panel,
                        .cols = kernels_.panel_cols,
                        .depth = depth};
    switch (kernels_.storage) {
      case Storage::kF32: gather<float, 1>(column, row.data()); break;
      case Storage::kBF16: gather<std::uint16_t, 2>(column, row.data()); break;
      case Storage::kF16: gather<std::uint16_t, 1>(column, row.data()); break;
      case Storage::kQ8: dequantize(column, reinterpret_cast<float*>(row.data())); break;
      case Storage::kE4M3:
      case Storage::kMxfp4:
      case Storage::kInt4:
      case Storage::kNvfp4:
        unpack_stored(kernels_, column.panel, column.col, depth,
                      reinterpret_cast<float*>(row.data()));
        break;
    }
    row_ops::convert(stored, row.data(), type, to, depth);
    to += depth * size_of(type);
  }
}

void CpuExpertWeights::read_bias(std::int32_t expert, ExpertPart part, float* out) const {
  const std::int32_t local = local_of(expert, part, 0, 0);
  require(config().bias, "the experts have no biases");
  if (part == ExpertPart::kDown) {
    std::copy_n(second_bias(local, 0), config().hidden, out);
    return;
  }
  const std::int64_t cols = first_cols();
  const std::int64_t offset = part == ExpertPart::kUp ? cols : 0;
  for (std::int64_t i = 0; i < config().inner; ++i) {
    out[i] = first_bias(local, i / cols)[offset + i % cols];
  }
}

}  // namespace switchyard::cpu

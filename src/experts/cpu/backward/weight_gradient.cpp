// Tasks of the weights' gradients. Panel by panel of the output the writes went to another page for
// every 64 bytes, and took as long as a third of the product (48 rows an expert, 2048 x 1024).
// Whole panels go from the product's registers to the rows, past the caches where a matrix is
// large: 28% of the way back in f32, 22% in bf16 (32 rows an expert, 2048 x 768, one Xeon).
#include "experts/cpu/backward/weight_gradient.hpp"

#include <algorithm>
#include <cstring>

#include "core/cpu/memory.hpp"
#include "core/row_ops.hpp"

namespace switchyard::cpu {
namespace {

constexpr std::int64_t kColumnsPerTask = 96;
constexpr std::int64_t kPanelsAtOnce = 8;
constexpr std::int64_t kRowsAhead = 16;                       ///< That are fetched into the cache.
constexpr std::int64_t kStreamBytes = std::int64_t{4} << 20;  ///< Of a matrix.

std::int64_t to_lines(std::int64_t bytes) { return (bytes + 63) / 64 * 64; }

/// Whole blocks.
std::int64_t columns_per_task(const Kernels& kernels) {
  return std::max<std::int64_t>(1, kColumnsPerTask / kernels.max_rows) * kernels.max_rows;
}

struct Rooms {
  std::int64_t turned, packed, product;
};

Rooms rooms_for(const Kernels& kernels, std::int64_t num_rows) {
  const std::int64_t cols = columns_per_task(kernels);
  return {.turned = to_lines(cols * num_rows * size_of(kernels.dtype)),
          .packed = to_lines(cols * packed_depth(kernels, num_rows) * kernels.element_bytes),
          .product = to_lines(kPanelsAtOnce * cols * kernels.panel_cols * 4)};
}

/// Some neighbouring panels of the product: [panels, places, panel_cols].
struct Piece {
  const float* product;
  std::int64_t first_panel;
  std::int64_t panels;
};

/// Whether rows go past the caches, which they would only empty.
bool streams(const WeightGradientArgs& args) {
  return !args.accumulate && args.out.bytes() >= kStreamBytes;
}

void write_rows(const WeightGradientArgs& args, std::int64_t first, const RowBlocks& blocks,
                const Piece& piece) {
  constexpr std::int64_t kMostCols = 64;
  const std::int64_t width = args.kernels->panel_cols;
  const std::int64_t first_col = piece.first_panel * width;
  const std::int64_t cols = std::min(piece.panels * width, args.right_cols - first_col);
  // 16-bit rows gain nothing by it here, where they are made of sums that lie in memory.
  const bool past_caches = streams(args) && args.out.dtype == DType::kF32;
  float row[kPanelsAtOnce * kMostCols];
  for (std::int64_t m = 0; m < blocks.rows(); ++m) {
    const std::int64_t to = args.row_of == nullptr ? first + m : args.row_of[first + m];
    if (to < 0) continue;
    std::byte* const out = args.out.row(to) + first_col * size_of(args.out.dtype);
    for (std::int64_t p = 0; p < piece.panels; ++p) {
      const float* const from = piece.product + (p * blocks.places() + m) * width;
      if (past_caches) {
        const std::int64_t bytes = std::min(width, cols - p * width) * 4;
        stream_bytes(reinterpret_cast<const std::byte*>(from), bytes, out + p * width * 4);
      } else {
        std::copy_n(from, width, row + p * width);
      }
    }
    if (!past_caches) row_ops::write_gradient(row, args.out.dtype, out, cols, args.accumulate);
  }
}

/// How the kernels may write whole panels to `rows` themselves, if they may; else write_rows()
/// does.
OutputRows direct_rows(const WeightGradientArgs& args, std::byte* const* rows) {
  const Kernels& kernels = *args.kernels;
  const DType dtype = args.out.dtype;
  if (!kernels.writes_rows || args.accumulate) return {};
  const bool lines = reinterpret_cast<std::uintptr_t>(args.out.data) % 64 == 0 &&
                     args.out.row_bytes() % 64 == 0 &&
                     kernels.panel_cols * size_of(dtype) % 64 == 0;
  if (streams(args) && dtype == DType::kF32 && !lines) return {};
  return {.rows = rows, .dtype = dtype, .past_caches = streams(args) && lines};
}

/// Of kernels that take floats, blocks of columns are pieces of the rows as they are.
void pack_float_columns(const WeightGradientArgs& args, std::int64_t first, const RowBlocks& blocks,
                        float* out) {
  const DType dtype = args.kernels->dtype;
  const std::int64_t depth = packed_depth(*args.kernels, args.num_rows);
  float widened[kColumnsPerTask];
  for (std::int64_t r = 0; r < depth; ++r) {
    const float* row = widened;
    fetch_lines(args.left[std::min(r + kRowsAhead, args.num_rows - 1)] + first * size_of(dtype),
                blocks.rows() * size_of(dtype), kRead);
    if (r >= args.num_rows) {
      std::fill_n(widened, blocks.rows(), 0.0F);
    } else if (dtype == DType::kF32) {
      row = reinterpret_cast<const float*>(args.left[r]) + first;
    } else {
      row_ops::widen(dtype, args.left[r] + first * size_of(dtype), widened, blocks.rows());
    }
    for (std::int64_t b = 0; b < blocks.count(); ++b) {
      const std::int64_t begin = blocks.begin(b);
      const std::int64_t size = blocks.size(b);
      float* const to = out + begin * depth + r * size;
      // With the length known they are moves of vectors, not a call.
      switch (size) {
        case 14: std::memcpy(to, row + begin, 14 * sizeof(float)); break;
        case 6: std::memcpy(to, row + begin, 6 * sizeof(float)); break;
        default: std::copy_n(row + begin, size, to);
      }
    }
  }
}

/// By transposing, whatever the kernels' form of rows.
void pack_columns(const WeightGradientArgs& args, std::int64_t first, const RowBlocks& blocks,
                  std::byte* turned, std::byte* out) {
  const std::int64_t count = blocks.rows();
  const std::int64_t element = size_of(args.kernels->dtype);
  transpose_rows({.rows = args.left,
                  .num_rows = args.num_rows,
                  .first = first,
                  .end = first + count,
                  .element = element,
                  .out = turned,
                  .out_elements = args.num_rows});
  const std::byte* columns[kColumnsPerTask];
  for (std::int64_t m = 0; m < count; ++m) columns[m] = turned + m * args.num_rows * element;
  pack_blocks({.kernels = args.kernels,
               .blocks = blocks,
               .begin = 0,
               .end = blocks.count(),
               .rows = columns,
               .cols = args.num_rows,
               .depth = packed_depth(*args.kernels, args.num_rows),
               .out = out});
}

}  // namespace

std::int64_t weight_gradient_tasks(const Kernels& kernels, std::int64_t left_cols) {
  const std::int64_t cols = columns_per_task(kernels);
  return (left_cols + cols - 1) / cols;
}

std::int64_t weight_gradient_scratch(const Kernels& kernels, std::int64_t num_rows) {
  const Rooms rooms = rooms_for(kernels, num_rows);
  return rooms.turned + rooms.packed + rooms.product;
}

void run_weight_gradient(const WeightGradientArgs& args, std::int64_t task, std::byte* scratch) {
  const Kernels& kernels = *args.kernels;
  const std::int64_t first = task * columns_per_task(kernels);
  const std::int64_t count = std::min(columns_per_task(kernels), args.left_cols - first);
  const std::int64_t depth = packed_depth(kernels, args.num_rows);
  const Rooms rooms = rooms_for(kernels, args.num_rows);
  std::byte* const packed = scratch + rooms.turned;
  auto* const product = reinterpret_cast<float*>(packed + rooms.packed);

  const RowBlocks blocks = kernels.blocks(count);
  if (kernels.element_bytes == sizeof(float)) {
    pack_float_columns(args, first, blocks, reinterpret_cast<float*>(packed));
  } else {
    pack_columns(args, first, blocks, scratch, packed);
  }
  std::byte* rows[kColumnsPerTask];
  for (std::int64_t m = 0; m < count; ++m) {
    const std::int64_t row = args.row_of == nullptr ? first + m : args.row_of[first + m];
    rows[m] = row < 0 ? nullptr : args.out.row(row);
  }
  OutputRows to = direct_rows(args, rows);
  const std::int64_t bytes = panel_bytes(kernels, depth);
  const std::int64_t panels = (args.right_cols + kernels.panel_cols - 1) / kernels.panel_cols;
  const std::int64_t direct = to.rows == nullptr ? 0 : args.right_cols / kernels.panel_cols;
  for (std::int64_t p = 0; p < panels;) {
    const std::int64_t here = std::min(kPanelsAtOnce, (p < direct ? direct : panels) - p);
    kernels.product({.a = packed,
                     .blocks = blocks,
                     .steps = depth / kernels.depth_multiple,
                     .weights = args.right_panels + p * bytes,
                     .panel_bytes = bytes,
                     .panels = here,
                     .out = product,
                     .to = p < direct ? to : OutputRows{}});
    if (p >= direct) {
      write_rows(args, first, blocks, {.product = product, .first_panel = p, .panels = here});
    }
    to.first_byte += here * kernels.panel_cols * size_of(to.dtype);
    p += here;
  }
  if (streams(args)) stream_fence();
}

}  // namespace switchyard::cpu

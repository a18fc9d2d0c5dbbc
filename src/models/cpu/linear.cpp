#include "models/cpu/linear.hpp"

#include <algorithm>
#include <vector>

#include "core/row_ops.hpp"
#include "experts/cpu/backward/operands.hpp"
#include "experts/cpu/backward/weight_gradient.hpp"
#include "experts/cpu/weights/weights.hpp"

namespace switchyard::models {
namespace {

using cpu::Kernels;

constexpr std::int64_t kBlocksPerTask = 24;  ///< Packed rows of a task stay in the second cache.
constexpr std::int64_t kPanelsAtOnce = 8;
constexpr std::int64_t kPackedPanels = 4;   ///< That rows are packed into at once.
constexpr std::int64_t kSummedRows = 1024;  ///< Of a piece of a weights' gradient.

std::int64_t pieces(std::int64_t count, std::int64_t size) { return (count + size - 1) / size; }
std::size_t bytes(std::int64_t floats) { return static_cast<std::size_t>(4 * floats); }

/// Memory of the calling thread, kept from call to call.
struct Scratch {
  cpu::HugeBuffer rounded, rounded_right, rows, product, gradient;
  std::vector<std::byte*> outputs;
};
Scratch& scratch_of_thread() {
  thread_local Scratch scratch;
  return scratch;
}

/// A matrix of f32 as the kernels take it: itself, or rounded into `room`.
const std::byte* operand(const Kernels& kernels, const float* matrix, std::int64_t size,
                         cpu::HugeBuffer& room, ThreadPool* pool) {
  if (kernels.dtype == DType::kF32) return reinterpret_cast<const std::byte*>(matrix);
  constexpr std::int64_t kPiece = std::int64_t{1} << 14;
  const std::int64_t element = size_of(kernels.dtype);
  room.reserve(static_cast<std::size_t>(size * element));
  parallel_for(pool, pieces(size, kPiece), [&](std::int64_t piece, int) {
    const std::int64_t first = piece * kPiece;
    row_ops::narrow(kernels.dtype, matrix + first, room.data() + first * element,
                    std::min(kPiece, size - first));
  });
  return room.data();
}

/// Rows of an operand().
cpu::RowPointers pointers_to(const Kernels& kernels, const std::byte* first, std::int64_t rows,
                             std::int64_t cols) {
  cpu::RowPointers pointers(static_cast<std::size_t>(rows));
  for (std::int64_t r = 0; r < rows; ++r) {
    pointers[static_cast<std::size_t>(r)] = first + r * cols * size_of(kernels.dtype);
  }
  return pointers;
}

struct Multiply {
  const Kernels* kernels;
  const float* a;           ///< [rows, depth].
  const std::byte* panels;  ///< Of [depth, cols].
  std::int64_t rows, depth, cols;
  float* out;  ///< [rows, cols].
  bool add;
};

/// Rows [first, first + count) by panels [begin, end).
void multiply_part(const Multiply& m, std::int64_t first, std::int64_t count, std::int64_t begin,
                   std::int64_t end) {
  const Kernels& kernels = *m.kernels;
  const std::int64_t width = kernels.panel_cols;
  Scratch& scratch = scratch_of_thread();
  const cpu::RowBlocks blocks = kernels.blocks(count);
  const std::int64_t places = blocks.places();
  const std::int64_t depth = cpu::packed_depth(kernels, m.depth);
  scratch.rows.reserve(static_cast<std::size_t>(places * depth * kernels.element_bytes));
  scratch.product.reserve(bytes(kPanelsAtOnce * places * width));
  const std::byte* const a =
      operand(kernels, m.a + first * m.depth, count * m.depth, scratch.rounded, nullptr);
  const cpu::RowPointers rows = pointers_to(kernels, a, count, m.depth);
  cpu::pack_blocks({.kernels = &kernels,
                    .blocks = blocks,
                    .begin = 0,
                    .end = blocks.count(),
                    .rows = rows.data(),
                    .cols = m.depth,
                    .depth = depth,
                    .out = scratch.rows.data()});
  auto* const product = reinterpret_cast<float*>(scratch.product.data());
  const std::int64_t panel_bytes = cpu::panel_bytes(kernels, depth);
  // Sums of whole panels leave the registers for the rows that they belong to.
  const std::int64_t direct = kernels.writes_rows && !m.add ? m.cols / width : 0;
  std::vector<std::byte*>& outputs = scratch.outputs;
  outputs.clear();
  for (std::int64_t r = 0; direct > 0 && r < count; ++r) {
    outputs.push_back(reinterpret_cast<std::byte*>(m.out + (first + r) * m.cols));
  }
  for (std::int64_t panel = begin; panel < end;) {
    const bool whole = panel < direct;
    const std::int64_t here =
        std::min(kPanelsAtOnce, (whole ? std::min(direct, end) : end) - panel);
    cpu::OutputRows to;
    if (whole) to = {.rows = outputs.data(), .first_byte = 4 * panel * width};
    kernels.product({.a = scratch.rows.data(),
                     .blocks = blocks,
                     .steps = depth / kernels.depth_multiple,
                     .weights = m.panels + panel * panel_bytes,
                     .panel_bytes = panel_bytes,
                     .panels = here,
                     .out = product,
                     .to = to});
    for (std::int64_t r = 0; !whole && r < count; ++r) {
      float* const out = m.out + (first + r) * m.cols;
      for (std::int64_t p = 0; p < here; ++p) {
        const std::int64_t col = (panel + p) * width;
        const float* from = product + (p * places + r) * width;
        const std::int64_t cols = std::min(width, m.cols - col);
        if (m.add) {
          row_ops::add(from, out + col, cols);
        } else {
          std::copy_n(from, cols, out + col);
        }
      }
    }
    panel += here;
  }
}

/// Tasks of rows; where these are few, of panels too, which changes no bit.
void multiply(const Multiply& m, ThreadPool* pool) {
  const Kernels& kernels = *m.kernels;
  const std::int64_t rows_per_task = kBlocksPerTask * kernels.max_rows;
  const std::int64_t row_tasks = pieces(m.rows, rows_per_task);
  const std::int64_t panels = pieces(m.cols, kernels.panel_cols);
  const std::int64_t threads = num_threads(pool);
  const std::int64_t groups =
      threads == 1 || row_tasks >= 2 * threads ? 1 : std::min(panels, 2 * threads);
  parallel_for(pool, row_tasks * groups, [&](std::int64_t task, int) {
    const std::int64_t first = task / groups * rows_per_task;
    const std::int64_t group = task % groups;
    multiply_part(m, first, std::min(rows_per_task, m.rows - first), group * panels / groups,
                  (group + 1) * panels / groups);
  });
}

}  // namespace

const Kernels& product_kernels(DType dtype) {
  return cpu::find_kernels(isa_in_use(), dtype, WeightFormat::kExact);
}

void Linear::pack(const float* weights, ThreadPool* pool) {
  const Kernels& kernels = *kernels_;
  const std::int64_t width = kernels.panel_cols;
  const std::int64_t panels = pieces(out_, width);
  const std::int64_t depth = cpu::packed_depth(kernels, in_);
  const cpu::PanelShape shape{
      .depth = depth, .panels = panels, .panel_bytes = cpu::panel_bytes(kernels, depth)};
  const std::byte* const rounded =
      operand(kernels, weights, out_ * in_, scratch_of_thread().rounded, pool);
  const std::int64_t row_bytes = in_ * size_of(kernels.dtype);
  panels_.reserve(static_cast<std::size_t>(shape.bytes()));
  parallel_for(pool, panels, [&](std::int64_t panel, int) {
    const std::byte* const rows = rounded + panel * width * row_bytes;
    const std::int64_t count = std::min(width, out_ - panel * width);
    cpu::pack_panel(
        {.rows = {rows, rows + width / 2 * row_bytes},
         .count = {std::min(count, width / 2), std::max<std::int64_t>(count - width / 2, 0)},
         .depth = in_,
         .shape = shape,
         .kernels = &kernels,
         .out = panels_.data() + panel * shape.panel_bytes});
  });
}

void Linear::pack_backward(const float* weights, ThreadPool* pool) {
  const Kernels& kernels = *kernels_;
  const std::int64_t width = kernels.panel_cols;
  const std::int64_t panel_bytes = cpu::panel_bytes(kernels, cpu::packed_depth(kernels, out_));
  const std::int64_t panels = pieces(in_, width);
  backward_panels_.reserve(static_cast<std::size_t>(panels * panel_bytes));
  const std::byte* const rounded =
      operand(kernels, weights, out_ * in_, scratch_of_thread().rounded, pool);
  const cpu::RowPointers rows = pointers_to(kernels, rounded, out_, in_);
  const std::int64_t cols = kPackedPanels * width;
  parallel_for(pool, pieces(in_, cols), [&](std::int64_t i, int) {
    cpu::pack_panels_of_rows({.kernels = &kernels,
                              .rows = rows.data(),
                              .num_rows = out_,
                              .first_col = i * cols,
                              .cols = std::min(cols, in_ - i * cols),
                              .out = backward_panels_.data() + i * kPackedPanels * panel_bytes,
                              .panel_bytes = panel_bytes});
  });
}

void Linear::forward(const float* x, std::int64_t rows, float* y, bool add,
                     ThreadPool* pool) const {
  multiply({.kernels = kernels_,
            .a = x,
            .panels = panels_.data(),
            .rows = rows,
            .depth = in_,
            .cols = out_,
            .out = y,
            .add = add},
           pool);
}

void Linear::backward_input(const float* dy, std::int64_t rows, float* dx, ThreadPool* pool) const {
  multiply({.kernels = kernels_,
            .a = dy,
            .panels = backward_panels_.data(),
            .rows = rows,
            .depth = out_,
            .cols = in_,
            .out = dx,
            .add = false},
           pool);
}

void Linear::backward_weights(const float* dy, const float* x, std::int64_t rows, float* dw,
                              bool accumulate, ThreadPool* pool) const {
  if (dw == nullptr) return;
  const Kernels& kernels = *kernels_;
  const std::int64_t width = kernels.panel_cols;
  const std::int64_t panels = pieces(in_, width);
  Scratch& scratch = scratch_of_thread();
  const std::int64_t most = cpu::packed_depth(kernels, std::min(rows, kSummedRows));
  scratch.gradient.reserve(static_cast<std::size_t>(panels * cpu::panel_bytes(kernels, most)));
  std::byte* const right = scratch.gradient.data();
  if (rows == 0 && !accumulate) std::fill_n(dw, in_ * out_, 0.0F);
  for (std::int64_t first = 0; first < rows; first += kSummedRows) {
    const std::int64_t count = std::min(kSummedRows, rows - first);
    const std::byte* const left =
        operand(kernels, dy + first * out_, count * out_, scratch.rounded, pool);
    const std::byte* const summed =
        operand(kernels, x + first * in_, count * in_, scratch.rounded_right, pool);
    const cpu::RowPointers left_rows = pointers_to(kernels, left, count, out_);
    const cpu::RowPointers right_rows = pointers_to(kernels, summed, count, in_);
    const std::int64_t panel_bytes = cpu::panel_bytes(kernels, cpu::packed_depth(kernels, count));
    const std::int64_t cols = kPackedPanels * width;
    parallel_for(pool, pieces(in_, cols), [&](std::int64_t i, int) {
      cpu::pack_panels_of_rows({.kernels = &kernels,
                                .rows = right_rows.data(),
                                .num_rows = count,
                                .first_col = i * cols,
                                .cols = std::min(cols, in_ - i * cols),
                                .out = right + i * kPackedPanels * panel_bytes,
                                .panel_bytes = panel_bytes});
    });
    const cpu::WeightGradientArgs gradient{
        .kernels = &kernels,
        .left = left_rows.data(),
        .num_rows = count,
        .left_cols = out_,
        .right_panels = right,
        .right_cols = in_,
        .row_of = nullptr,
        .out = {reinterpret_cast<std::byte*>(dw), DType::kF32, out_, in_},
        .accumulate = accumulate || first > 0};
    parallel_for(pool, cpu::weight_gradient_tasks(kernels, out_), [&](std::int64_t task, int) {
      cpu::HugeBuffer& room = scratch_of_thread().rows;
      room.reserve(static_cast<std::size_t>(cpu::weight_gradient_scratch(kernels, count)));
      cpu::run_weight_gradient(gradient, task, room.data());
    });
  }
}

}  // namespace switchyard::models

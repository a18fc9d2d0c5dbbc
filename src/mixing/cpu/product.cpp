// Dense products of any two f32 matrices by the experts' kernels: the right side becomes panels
// once, the left side blocks of rows, a task's at a time. Bound by the multiply-adds from some tens
// of rows on.
#include "mixing/cpu/product.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/row_ops.hpp"
#include "experts/cpu/backward/operands.hpp"
#include "switchyard/cpu_isa.hpp"

namespace switchyard::mixing {
namespace {

using cpu::HugeBuffer;
using cpu::Kernels;
using cpu::RowBlocks;

constexpr std::int64_t kMostRows = 96;  ///< Of a task: what it multiplies stays in two caches.
constexpr std::int64_t kPanelsAtOnce = 8;
constexpr std::int64_t kMostCols = 64;  ///< Of a panel.

/// Memory of the calling thread, kept from call to call.
struct Scratch {
  HugeBuffer panels;  ///< The right side.
  HugeBuffer worker;  ///< Per thread: rows of the left side turned and packed, and a product.
};

Scratch& scratch_of_thread() {
  thread_local Scratch scratch;
  return scratch;
}

std::int64_t to_lines(std::int64_t bytes) { return (bytes + 63) / 64 * 64; }

std::vector<const std::byte*> pointers(Matrix<const float> matrix, std::int64_t first,
                                       std::int64_t count) {
  std::vector<const std::byte*> rows;
  rows.reserve(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    rows.push_back(reinterpret_cast<const std::byte*>(matrix.row(first + i)));
  }
  return rows;
}

class Product {
 public:
  explicit Product(const ProductArgs& args)
      : args_(args),
        kernels_(cpu::find_kernels(isa_in_use(), DType::kF32, WeightFormat::kExact)),
        sum_(args.right.shape[args.right_transposed ? 1 : 0]),
        depth_(cpu::packed_depth(kernels_, sum_)),
        panel_bytes_(cpu::panel_bytes(kernels_, depth_)),
        rows_per_task_(std::max<std::int64_t>(1, kMostRows / kernels_.max_rows) *
                       kernels_.max_rows),
        turned_room_(args.left_transposed ? to_lines(rows_per_task_ * sum_ * 4) : 0),
        packed_room_(to_lines(rows_per_task_ * depth_ * kernels_.element_bytes)),
        worker_room_(turned_room_ + packed_room_ +
                     to_lines(kPanelsAtOnce * rows_per_task_ * kernels_.panel_cols * 4)) {
    if (args.left_transposed) left_rows_ = pointers(args.left, 0, sum_);
    if (!args.right_transposed) right_rows_ = pointers(args.right, 0, sum_);
  }

  void run() const {
    scratch_.panels.reserve(static_cast<std::size_t>(num_panels() * panel_bytes_));
    scratch_.worker.reserve(static_cast<std::size_t>(worker_room_ * num_threads(args_.pool)));
    parallel_for(args_.pool, num_panels(), [&](std::int64_t panel, int) { pack_panel(panel); });
    const std::int64_t tasks = (args_.out.rows + rows_per_task_ - 1) / rows_per_task_;
    parallel_for(args_.pool, tasks, [&](std::int64_t task, int worker) {
      run_rows(task * rows_per_task_, scratch_.worker.data() + worker * worker_room_);
    });
  }

 private:
  [[nodiscard]] std::int64_t num_panels() const {
    return (args_.out.cols + kernels_.panel_cols - 1) / kernels_.panel_cols;
  }

  void pack_panel(std::int64_t panel) const {
    const std::int64_t width = kernels_.panel_cols;
    const std::int64_t first = panel * width;
    const std::int64_t cols = std::min(width, args_.out.cols - first);
    std::byte* out = scratch_.panels.data() + panel * panel_bytes_;
    if (!args_.right_transposed) {
      cpu::pack_panels_of_rows({.kernels = &kernels_,
                                .rows = right_rows_.data(),
                                .num_rows = sum_,
                                .first_col = first,
                                .cols = cols,
                                .out = out});
      return;
    }
    if (cols < width || depth_ > sum_) std::memset(out, 0, static_cast<std::size_t>(panel_bytes_));
    const std::vector<const std::byte*> rows = pointers(args_.right, first, cols);
    cpu::transpose_rows({.rows = rows.data(),
                         .num_rows = cols,
                         .first = 0,
                         .end = sum_,
                         .element = 4,
                         .out = out,
                         .out_elements = width});
  }

  /// Rows of the left side from `first` on, as the kernels take them.
  void pack_rows(std::int64_t first, const RowBlocks& blocks, std::byte* turned,
                 std::byte* packed) const {
    std::vector<const std::byte*> rows;
    if (args_.left_transposed) {
      cpu::transpose_rows({.rows = left_rows_.data(),
                           .num_rows = sum_,
                           .first = first,
                           .end = first + blocks.rows(),
                           .element = 4,
                           .out = turned,
                           .out_elements = sum_});
      for (std::int64_t r = 0; r < blocks.rows(); ++r) rows.push_back(turned + r * sum_ * 4);
    } else {
      rows = pointers(args_.left, first, blocks.rows());
    }
    cpu::pack_blocks({.kernels = &kernels_,
                      .blocks = blocks,
                      .begin = 0,
                      .end = blocks.count(),
                      .rows = rows.data(),
                      .cols = sum_,
                      .depth = depth_,
                      .out = packed});
  }

  void run_rows(std::int64_t first, std::byte* memory) const {
    const RowBlocks blocks = kernels_.blocks(std::min(rows_per_task_, args_.out.rows - first));
    std::byte* const packed = memory + turned_room_;
    auto* const product = reinterpret_cast<float*>(packed + packed_room_);
    pack_rows(first, blocks, memory, packed);
    for (std::int64_t panel = 0; panel < num_panels(); panel += kPanelsAtOnce) {
      const std::int64_t here = std::min(kPanelsAtOnce, num_panels() - panel);
      kernels_.product({.a = packed,
                        .blocks = blocks,
                        .steps = depth_ / kernels_.depth_multiple,
                        .weights = scratch_.panels.data() + panel * panel_bytes_,
                        .panel_bytes = panel_bytes_,
                        .panels = here,
                        .out = product});
      write(first, blocks, panel, here, product);
    }
  }

  void write(std::int64_t first, const RowBlocks& blocks, std::int64_t panel, std::int64_t panels,
             const float* product) const {
    const std::int64_t width = kernels_.panel_cols;
    const std::int64_t col = panel * width;
    const std::int64_t cols = std::min(panels * width, args_.out.cols - col);
    float row[kPanelsAtOnce * kMostCols];
    for (std::int64_t r = 0; r < blocks.rows(); ++r) {
      for (std::int64_t p = 0; p < panels; ++p) {
        std::copy_n(product + (p * blocks.places() + r) * width, width, row + p * width);
      }
      row_ops::write_gradient(row, args_.out.dtype,
                              args_.out.row(first + r) + col * size_of(args_.out.dtype), cols,
                              args_.accumulate);
    }
  }

  const ProductArgs& args_;
  const Kernels& kernels_;
  std::int64_t sum_;    ///< K.
  std::int64_t depth_;  ///< K as packed.
  std::int64_t panel_bytes_;
  std::int64_t rows_per_task_;
  std::int64_t turned_room_;
  std::int64_t packed_room_;
  std::int64_t worker_room_;
  std::vector<const std::byte*> left_rows_;   ///< Where transposed.
  std::vector<const std::byte*> right_rows_;  ///< Where not transposed.
  Scratch& scratch_ = scratch_of_thread();
};

}  // namespace

void multiply(const ProductArgs& args) {
  if (args.out.rows == 0 || args.out.cols == 0) return;
  if (args.right.shape[args.right_transposed ? 1 : 0] > 0) {
    Product(args).run();
    return;
  }
  if (args.accumulate) return;
  // Empty sums: kernels have nothing to read.
  for (std::int64_t r = 0; r < args.out.rows; ++r) {
    const std::int64_t row_bytes = args.out.cols * size_of(args.out.dtype);
    std::memset(args.out.row(r), 0, static_cast<std::size_t>(row_bytes));
  }
}

}  // namespace switchyard::mixing

// The experts' way back on a CPU: one expert after the other, each in four loops over the threads.
// Its rows are gathered once; dout W2 with the activation's gradient behind it; then, side by side,
// the products that give dx, dW2 and dW13. All go through the forward's kernels: weights are turned
// panel by panel in a cache, not in memory. Bound by arithmetic from some tens of rows an expert
// on, by the weights and their gradients below. A thread owns the columns that it computes, and
// each sum is one chain: the same bits for any number of threads.
#include <algorithm>
#include <vector>

#include "core/row_ops.hpp"
#include "experts/cpu/backward/activation.hpp"
#include "experts/cpu/backward/operands.hpp"
#include "experts/cpu/backward/panel_products.hpp"
#include "experts/cpu/backward/row_sums.hpp"
#include "experts/cpu/backward/weight_gradient.hpp"
#include "experts/cpu/preactivation.hpp"
#include "experts/implementations.hpp"

namespace switchyard {
namespace cpu {
namespace {

constexpr std::int64_t kBlocksPerTask = 16;

/// Memory of the calling thread, kept from call to call.
struct Scratch {
  PackedRows dout;          ///< [n, H], summed over H.
  PackedRows x;             ///< [n, H], only to make pre-activations again.
  PackedRows dz;            ///< [n, J], summed over J: the columns of the first product's panels.
  HugeBuffer z;             ///< [n, 2I] compute type, where nobody has kept them.
  HugeBuffer inner;         ///< [n, I] compute type: weight * activation.
  HugeBuffer dz_rows;       ///< [n, J] compute type.
  HugeBuffer x_panels;      ///< x, summed over n.
  HugeBuffer inner_panels;  ///< inner, summed over n.
  HugeBuffer worker;        ///< Per thread: a panel and a product, or a weights' gradient's task.
  std::vector<float> dots;  ///< [panels of I, n].
  RowPointers dout_rows, x_rows, dz_pointers, inner_pointers;
  std::vector<std::byte*> dx_rows;
};

Scratch& scratch_of_thread() {
  thread_local Scratch scratch;
  return scratch;
}

class ExpertGradient {
 public:
  explicit ExpertGradient(const ExpertsBackwardArgs& args)
      : args_(args),
        weights_(static_cast<const CpuExpertWeights&>(*args.weights)),
        config_(weights_.config()),
        kernels_(weights_.kernels()),
        width_(kernels_.panel_cols),
        element_(size_of(weights_.dtype())),
        joined_(weights_.first().panels * width_),
        z_cols_((config_.gated ? 2 : 1) * config_.inner) {
    for (std::int64_t j = 0; wants_w13() && j < joined_; ++j) {
      row_of_joined_.push_back(row_of_column(weights_, j));
    }
  }

  void run() {
    const ScopedStage stage(args_.execution, "experts_backward", work());
    for (std::int32_t e = 0; e < args_.plan.num_experts; ++e) {
      expert_ = e;
      first_row_ = args_.plan.expert_begin[e];
      rows_ = args_.plan.expert_rows[e];
      if (rows_ == 0) {
        if (!args_.accumulate) clear_gradients(args_, e);
        continue;
      }
      reserve();
      pack(blocks_, scratch_.dout_rows, config_.hidden, scratch_.dout);
      if (args_.preactivation.data == nullptr) make_preactivation();
      through_activation();
      pack_last_operands();
      last_products();
      const RowSumsArgs sums{.call = &args_,
                             .expert = e,
                             .dout = &scratch_.dout_rows,
                             .dz = &scratch_.dz_pointers,
                             .dots = scratch_.dots.data(),
                             .pieces = inner_cols_ / width_};
      sum_row_weights(sums);
      sum_bias_gradients(sums);
    }
  }

 private:
  [[nodiscard]] bool wants_dx() const { return args_.dx_rows.data != nullptr; }
  [[nodiscard]] bool wants_w13() const { return args_.gradients.w13.data != nullptr; }
  [[nodiscard]] bool wants_w2() const { return args_.gradients.w2.data != nullptr; }
  [[nodiscard]] StageWork work() const {
    double rows = 0;
    double active = 0;
    for (std::int32_t e = 0; e < args_.plan.num_experts; ++e) {
      rows += args_.plan.expert_rows[e];
      active += args_.plan.expert_rows[e] > 0 ? 1 : 0;
    }
    const auto first = static_cast<double>(z_cols_ * config_.hidden);
    const auto second = static_cast<double>(config_.inner * config_.hidden);
    double products = second;
    if (args_.preactivation.data == nullptr) products += first;
    if (wants_dx()) products += first;
    if (wants_w13()) products += first;
    if (wants_w2()) products += second;
    const double flops = 2 * rows * products;
    return {.bytes = active * weights_.bytes_per_expert() +
                     2.0 * static_cast<double>(args_.x.bytes()) +
                     static_cast<double>(args_.gradients.w13.bytes() + args_.gradients.w2.bytes()),
            .flops = flops,
            .flops_executed = flops};
  }

  [[nodiscard]] std::int64_t tasks(std::int64_t items, std::int64_t per_task) const {
    return (items + per_task - 1) / per_task;
  }
  template <typename Body>
  void loop(std::int64_t count, const Body& body) const {
    parallel_for(args_.execution.pool, count, body);
  }

  void reserve() {
    blocks_ = kernels_.blocks(rows_);
    Scratch& s = scratch_;
    const std::int64_t second_sum = weights_.second().panels * width_;
    s.dout.reserve(kernels_, blocks_.places(), packed_depth(kernels_, second_sum));
    s.dz.reserve(kernels_, blocks_.places(), packed_depth(kernels_, joined_));
    inner_cols_ = tasks(config_.inner, width_) * width_;
    s.inner.reserve(bytes(rows_ * inner_cols_ * element_));
    s.dz_rows.reserve(bytes(rows_ * joined_ * element_));
    s.dots.resize(static_cast<std::size_t>(inner_cols_ / width_ * rows_));
    rows_panel_bytes_ = panel_bytes(kernels_, packed_depth(kernels_, rows_));
    if (wants_w13()) s.x_panels.reserve(bytes(hidden_panels() * rows_panel_bytes_));
    if (wants_w2()) s.inner_panels.reserve(bytes(inner_cols_ / width_ * rows_panel_bytes_));
    products_ = PanelProducts(kernels_, blocks_, std::max(s.dout.depth(), s.dz.depth()));
    worker_room_ = std::max(products_.room(), weight_gradient_scratch(kernels_, rows_));
    worker_room_ = (worker_room_ + 63) / 64 * 64;
    s.worker.reserve(bytes(worker_room_ * num_threads(args_.execution.pool)));
    point_at_rows();
  }

  void point_at_rows() {
    Scratch& s = scratch_;
    const auto point = [&](RowPointers& to, const std::byte* first, std::int64_t count,
                           std::int64_t row_bytes) {
      to.resize(static_cast<std::size_t>(count));
      for (std::int64_t i = 0; i < count; ++i) {
        to[static_cast<std::size_t>(i)] = first + i * row_bytes;
      }
    };
    s.dout_rows.resize(static_cast<std::size_t>(rows_));
    s.x_rows.resize(static_cast<std::size_t>(rows_));
    for (std::int64_t r = 0; r < rows_; ++r) {
      const std::int64_t token = args_.plan.row_token[first_row_ + r];
      s.dout_rows[static_cast<std::size_t>(r)] = args_.dout.row(token);
      s.x_rows[static_cast<std::size_t>(r)] = args_.x.row(token);
    }
    point(s.dz_pointers, s.dz_rows.data(), rows_, joined_ * element_);
    point(s.inner_pointers, s.inner.data(), rows_, inner_cols_ * element_);
    s.dx_rows.clear();
    for (std::int64_t r = 0; wants_dx() && r < rows_; ++r) {
      s.dx_rows.push_back(args_.dx_rows.row(first_row_ + r));
    }
  }

  [[nodiscard]] std::byte* memory_of(int worker) const {
    return scratch_.worker.data() + worker * worker_room_;
  }
  [[nodiscard]] Tile tile_of(int worker) const { return products_.tile(memory_of(worker)); }
  [[nodiscard]] std::int64_t hidden_panels() const { return tasks(config_.hidden, width_); }

  void pack(const RowBlocks& blocks, const RowPointers& rows, std::int64_t cols,
            const PackedRows& out) const {
    loop(tasks(blocks.count(), kBlocksPerTask), [&](std::int64_t i, int) {
      cpu::pack_blocks({.kernels = &kernels_,
                        .blocks = blocks,
                        .begin = i * kBlocksPerTask,
                        .end = std::min((i + 1) * kBlocksPerTask, blocks.count()),
                        .rows = rows.data(),
                        .cols = cols,
                        .depth = out.depth(),
                        .out = out.written(0)});
    });
  }

  /// As the forward has made it.
  void make_preactivation() const {
    Scratch& s = scratch_;
    s.x.reserve(kernels_, blocks_.places(), weights_.first().depth);
    s.z.reserve(bytes(rows_ * z_cols_ * element_));
    pack(blocks_, s.x_rows, config_.hidden, s.x);
    loop(weights_.first().panels, [&](std::int64_t panel, int worker) {
      float* product = tile_of(worker).product;
      products_.for_parts([&](const RowPart& part) {
        products_.multiply(s.x, part, weights_.first_panel(expert_, panel), 1, product);
        store_preactivation(
            {.weights = &weights_,
             .expert = expert_,
             .panel = panel,
             .panels = 1,
             .product = product,
             .places = part.blocks.places(),
             .rows = part.blocks.rows(),
             .out = rows_of(RawMatrix{s.z.data(), weights_.dtype(), rows_, z_cols_}, part)});
      });
    });
  }

  /// [n, 2I] of the expert at hand.
  [[nodiscard]] ConstRawMatrix preactivation() const {
    return {args_.preactivation.data == nullptr ? scratch_.z.data()
                                                : args_.preactivation.row(first_row_),
            weights_.dtype(), rows_, z_cols_};
  }

  void through_activation() const {
    const Scratch& s = scratch_;
    const std::int64_t panels = inner_cols_ / width_;
    const std::int64_t at_once = panels_at_once(panels, num_threads(args_.execution.pool));
    loop(tasks(panels, at_once), [&](std::int64_t i, int worker) {
      const std::int64_t first = i * at_once;
      const std::int64_t count = std::min(at_once, panels - first);
      const Tile tile = tile_of(worker);
      products_.turn({weights_.second_panel(expert_, 0), weights_.second(), first, count},
                     s.dout.depth(), tile);
      products_.for_parts([&](const RowPart& part) {
        products_.multiply(s.dout, part, tile.panels, count, tile.product);
        activation_backward(
            {.weights = &weights_,
             .panel = first,
             .panels = count,
             .dinner = tile.product,
             .places = part.blocks.places(),
             .preactivation = rows_of(preactivation(), part),
             .weight = &args_.plan.row_weight[first_row_ + part.first_row],
             .inner =
                 rows_of(RawMatrix{s.inner.data(), weights_.dtype(), rows_, inner_cols_}, part),
             .dz = rows_of(RawMatrix{s.dz_rows.data(), weights_.dtype(), rows_, joined_}, part),
             .dots = &scratch_.dots[static_cast<std::size_t>(first * rows_ + part.first_row)],
             .dots_stride = rows_});
      });
    });
  }

  void pack_last_operands() const {
    if (wants_dx()) pack(blocks_, scratch_.dz_pointers, joined_, scratch_.dz);
    const std::int64_t at_once = kMostPanelsAtOnce;
    const std::int64_t of_x = wants_w13() ? tasks(hidden_panels(), at_once) : 0;
    const std::int64_t of_inner = wants_w2() ? tasks(inner_cols_ / width_, at_once) : 0;
    loop(of_x + of_inner, [&](std::int64_t i, int) {
      const bool is_x = i < of_x;
      const std::int64_t panel = (is_x ? i : i - of_x) * at_once;
      const std::int64_t left = (is_x ? config_.hidden : config_.inner) - panel * width_;
      pack_panels_of_rows({.kernels = &kernels_,
                           .rows = (is_x ? scratch_.x_rows : scratch_.inner_pointers).data(),
                           .num_rows = rows_,
                           .first_col = panel * width_,
                           .cols = std::min(at_once * width_, left),
                           .out = (is_x ? scratch_.x_panels : scratch_.inner_panels).data() +
                                  panel * rows_panel_bytes_,
                           .panel_bytes = rows_panel_bytes_});
    });
  }

  void last_products() const {
    const WeightGradientArgs first{.kernels = &kernels_,
                                   .left = scratch_.dz_pointers.data(),
                                   .num_rows = rows_,
                                   .left_cols = joined_,
                                   .right_panels = scratch_.x_panels.data(),
                                   .right_cols = config_.hidden,
                                   .row_of = row_of_joined_.data(),
                                   .out = rows_of_expert(args_.gradients.w13, z_cols_),
                                   .accumulate = args_.accumulate};
    const WeightGradientArgs second{.kernels = &kernels_,
                                    .left = scratch_.dout_rows.data(),
                                    .num_rows = rows_,
                                    .left_cols = config_.hidden,
                                    .right_panels = scratch_.inner_panels.data(),
                                    .right_cols = config_.inner,
                                    .row_of = nullptr,
                                    .out = rows_of_expert(args_.gradients.w2, config_.hidden),
                                    .accumulate = args_.accumulate};
    const std::int64_t at_once = panels_at_once(hidden_panels(), num_threads(args_.execution.pool));
    const std::int64_t dx = wants_dx() ? tasks(hidden_panels(), at_once) : 0;
    const std::int64_t firsts = wants_w13() ? weight_gradient_tasks(kernels_, joined_) : 0;
    const std::int64_t seconds = wants_w2() ? weight_gradient_tasks(kernels_, config_.hidden) : 0;
    loop(dx + firsts + seconds, [&](std::int64_t i, int worker) {
      if (i < firsts) {
        run_weight_gradient(first, i, memory_of(worker));
      } else if (i < firsts + seconds) {
        run_weight_gradient(second, i - firsts, memory_of(worker));
      } else {
        const std::int64_t panel = (i - firsts - seconds) * at_once;
        dx_panels(panel, std::min(at_once, hidden_panels() - panel), tile_of(worker));
      }
    });
  }

  [[nodiscard]] RawMatrix rows_of_expert(RawMatrix all, std::int64_t rows) const {
    if (all.data == nullptr) return {};
    return {all.row(expert_ * rows), all.dtype, rows, all.cols};
  }

  void dx_panels(std::int64_t first, std::int64_t count, const Tile& tile) const {
    const RawMatrix& out = args_.dx_rows;
    products_.turn({weights_.first_panel(expert_, 0), weights_.first(), first, count},
                   scratch_.dz.depth(), tile);
    const bool whole = (first + count) * width_ <= config_.hidden;
    const bool direct =
        whole && kernels_.writes_rows && (out.dtype == DType::kF32 || out.dtype == kernels_.dtype);
    products_.for_parts([&](const RowPart& part) {
      OutputRows to;
      if (direct) {
        to = {.rows = &scratch_.dx_rows[static_cast<std::size_t>(part.first_row)],
              .first_byte = first * width_ * size_of(out.dtype),
              .dtype = out.dtype};
      }
      products_.multiply(scratch_.dz, part, tile.panels, count, tile.product, to);
      for (std::int64_t p = 0; !direct && p < count; ++p) {
        const std::int64_t col = (first + p) * width_;
        for (std::int64_t r = 0; r < part.blocks.rows(); ++r) {
          row_ops::convert(DType::kF32, tile.product + (p * part.blocks.places() + r) * width_,
                           out.dtype,
                           out.row(first_row_ + part.first_row + r) + col * size_of(out.dtype),
                           std::min(width_, config_.hidden - col));
        }
      }
    });
  }

  [[nodiscard]] static std::size_t bytes(std::int64_t count) {
    return static_cast<std::size_t>(count);
  }

  const ExpertsBackwardArgs& args_;
  const CpuExpertWeights& weights_;
  const ExpertConfig& config_;
  const Kernels& kernels_;
  const std::int64_t width_;    ///< Columns of a panel.
  const std::int64_t element_;  ///< Bytes of the compute type.
  const std::int64_t joined_;   ///< J.
  const std::int64_t z_cols_;   ///< 2I, plain I.
  Scratch& scratch_ = scratch_of_thread();
  std::vector<std::int64_t> row_of_joined_;  ///< [J] row of W13, or -1.
  // Of the expert at hand.
  std::int32_t expert_ = 0;
  std::int64_t first_row_ = 0;
  std::int64_t rows_ = 0;  ///< n.
  RowBlocks blocks_;
  std::int64_t inner_cols_ = 0;  ///< I, up to whole panels.
  PanelProducts products_;
  std::int64_t worker_room_ = 0;
  std::int64_t rows_panel_bytes_ = 0;  ///< Of a panel whose sum runs over the rows.
};

std::optional<std::string> reject(const ExpertsBackwardArgs& args) {
  if (args.execution.backend != Backend::kCpu) return "runs on the CPU";
  if (args.dpreactivation.data != nullptr || args.weighted_activation.data != nullptr) {
    return "has its rows in memory of its own, not in that of dpreactivation or "
           "weighted_activation";
  }
  return std::nullopt;
}

void run(const ExpertsBackwardArgs& args) { ExpertGradient(args).run(); }

}  // namespace
}  // namespace cpu

const Implementation<ExpertsBackwardArgs> kExpertsBackwardCpu{"cpu.by_expert", cpu::reject,
                                                              cpu::run};

}  // namespace switchyard

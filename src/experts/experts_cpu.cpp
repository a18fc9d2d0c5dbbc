// Experts on the CPU. Few rows per expert: bound by streaming each hit expert's weights once. Many:
// by arithmetic. Two loops over the threads: (expert, panels) units of the first product with the
// activation behind it, then column panels of the second product with all experts inside, so that
// one thread owns an output column and adds it up in the fixed order: no atomics, the same bits for
// any number of threads.
#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "core/half.hpp"
#include "experts/cpu_weights.hpp"
#include "experts/implementations.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {
namespace cpu {
namespace {

/// An expert with rows to work on.
struct ActiveExpert {
  std::int32_t expert;     ///< Local id.
  std::int64_t first_row;  ///< In the layout.
  std::int64_t used;       ///< Rows that somebody asked for; the rest is padding.
  RowBlocks blocks;
  std::int64_t place;  ///< Of its first row in the packed rows.
};

/// Neighbouring panels of one expert.
struct Unit {
  std::int64_t active;
  std::int64_t first_panel;
  std::int64_t panels;
};

/// Memory of the calling thread, kept from call to call.
struct Scratch {
  HugeBuffer rows;    ///< [places, H] packed.
  HugeBuffer inner;   ///< [places, I] packed.
  HugeBuffer worker;  ///< Per thread: products and sums.
  std::vector<ActiveExpert> active;
  std::vector<Unit> units;
};

class Job {
 public:
  explicit Job(const ExpertsArgs& args)
      : args_(args),
        weights_(static_cast<const CpuExpertWeights&>(*args.weights)),
        kernels_(weights_.kernels()),
        threads_(num_threads(args.execution.pool)) {
    find_active();
    const auto bytes = [&](std::int64_t depth) {
      return static_cast<std::size_t>(places_ * depth * kernels_.row_bytes);
    };
    scratch_.rows.reserve(bytes(weights_.first().depth));
    scratch_.inner.reserve(bytes(weights_.second().depth));
  }

  void run() {
    {
      const double matrices = weights_.config().gated ? 2 : 1;
      const ScopedStage stage(args_.execution, "gemm1+activation",
                              work(matrices, weights_.first(), input_bytes()));
      pack_inputs();
      first_product();
    }
    const bool fused = args_.rows.cols == 0;
    const double output =
        static_cast<double>(fused ? args_.reduced.sums.bytes() : 4 * used_rows_ * args_.rows.cols);
    const ScopedStage stage(args_.execution, fused ? "gemm2+combine" : "gemm2",
                            work(1, weights_.second(), output));
    second_product(fused);
  }

 private:
  void find_active() {
    const PlanView& plan = args_.plan;
    scratch_.active.clear();
    for (std::int32_t e = 0; e < plan.num_experts; ++e) {
      const std::int64_t used = plan.expert_rows[e];
      const std::int64_t rows = args_.layout.kind == LayoutKind::kCompact
                                    ? used
                                    : plan.expert_begin[e + 1] - plan.expert_begin[e];
      if (rows == 0) continue;
      const RowBlocks blocks = kernels_.blocks(rows);
      scratch_.active.push_back({e, plan.expert_begin[e], used, blocks, places_});
      places_ += blocks.places();
      most_places_ = std::max(most_places_, blocks.places());
      used_rows_ += used;
      rows_ += rows;
    }
  }

  [[nodiscard]] double input_bytes() const {
    const double rows = static_cast<double>(args_.x_is_packed ? used_rows_ : args_.x.rows);
    return rows * static_cast<double>(args_.x.row_bytes());
  }

  /// Bytes: the weights of the experts hit, the intermediate once, and `other` (inputs or outputs).
  [[nodiscard]] StageWork work(double matrices, const PanelShape& shape, double other) const {
    const ExpertConfig& config = weights_.config();
    const double flops = 2 * matrices * static_cast<double>(config.hidden * config.inner);
    return {
        .bytes = static_cast<double>(shape.bytes()) * static_cast<double>(scratch_.active.size()) +
                 static_cast<double>(used_rows_ * config.inner * size_of(weights_.dtype())) + other,
        .flops = flops * static_cast<double>(used_rows_),
        .flops_executed = flops * static_cast<double>(rows_)};
  }

  [[nodiscard]] std::byte* packed(const HugeBuffer& buffer, std::int64_t place,
                                  std::int64_t depth) const {
    return buffer.data() + place * depth * kernels_.row_bytes;
  }

  /// The row of x behind row `row` of an expert; null: padding, zeros.
  [[nodiscard]] const std::byte* input_row(const ActiveExpert& active, std::int64_t row) const {
    if (args_.x_is_packed) return args_.x.row(active.first_row + row);
    if (row >= active.used) return nullptr;
    return args_.x.row(args_.plan.row_token[active.first_row + row]);
  }

  void pack_block(const ActiveExpert& active, std::int64_t block) const {
    constexpr std::int64_t kMostRows = 16;
    const std::byte* rows[kMostRows];
    const std::int64_t begin = active.blocks.begin(block);
    const std::int64_t count = active.blocks.size(block);
    for (std::int64_t i = 0; i < count; ++i) rows[i] = input_row(active, begin + i);
    const std::int64_t depth = weights_.first().depth;
    kernels_.pack_rows({.rows = rows,
                        .count = count,
                        .cols = args_.x.cols,
                        .depth = depth,
                        .out = packed(scratch_.rows, active.place + begin, depth)});
  }

  void pack_inputs() const {
    // A loop over the threads costs more than packing a handful of rows.
    constexpr std::int64_t kAlone = 16 << 10;
    ThreadPool* pool = places_ * args_.x.cols <= kAlone ? nullptr : args_.execution.pool;
    const std::vector<ActiveExpert>& active = scratch_.active;
    parallel_for(pool, static_cast<std::int64_t>(active.size()), [&](std::int64_t i, int) {
      const ActiveExpert& expert = active[static_cast<std::size_t>(i)];
      for (std::int64_t b = 0; b < expert.blocks.count(); ++b) pack_block(expert, b);
    });
  }

  /// How many panels a unit takes: enough units for an even end, products that stay in cache.
  [[nodiscard]] std::int64_t group_of(std::int64_t panels, std::int64_t places,
                                      std::int64_t most) const {
    constexpr std::int64_t kProductBytes = 128 << 10;
    const std::int64_t even = panels / (8 * threads_);
    const std::int64_t cached = kProductBytes / (places * kernels_.panel_cols * 4);
    const std::int64_t group = std::clamp<std::int64_t>(std::min(even, cached), 1, most);
    return group >= 4 ? group / 4 * 4 : group;
  }

  void first_product() {
    const PanelShape& shape = weights_.first();
    const std::int64_t all = shape.panels * static_cast<std::int64_t>(scratch_.active.size());
    std::vector<Unit>& units = scratch_.units;
    units.clear();
    std::int64_t floats = 0;
    for (std::size_t i = 0; i < scratch_.active.size(); ++i) {
      const std::int64_t places = scratch_.active[i].blocks.places();
      const std::int64_t group = group_of(all, places, 8);
      floats = std::max(floats, group * places * kernels_.panel_cols);
      for (std::int64_t p = 0; p < shape.panels; p += group) {
        units.push_back({static_cast<std::int64_t>(i), p, std::min(group, shape.panels - p)});
      }
    }
    scratch_.worker.reserve(static_cast<std::size_t>(floats * threads_) * sizeof(float));
    parallel_for(args_.execution.pool, static_cast<std::int64_t>(units.size()),
                 [&](std::int64_t i, int worker) {
                   first_unit(units[static_cast<std::size_t>(i)],
                              reinterpret_cast<float*>(scratch_.worker.data()) + worker * floats);
                 });
  }

  void first_unit(const Unit& unit, float* product) const {
    const ActiveExpert& active = scratch_.active[static_cast<std::size_t>(unit.active)];
    const PanelShape& shape = weights_.first();
    const std::int64_t depth = weights_.second().depth;
    kernels_.product({.a = packed(scratch_.rows, active.place, shape.depth),
                      .blocks = active.blocks,
                      .depth = shape.depth,
                      .weights = weights_.first_panel(active.expert, unit.first_panel),
                      .panel_bytes = shape.panel_bytes,
                      .panels = unit.panels,
                      .out = product});
    for (std::int64_t p = 0; p < unit.panels; ++p) {
      const std::int64_t panel = unit.first_panel + p;
      kernels_.activate({.product = product + p * active.blocks.places() * kernels_.panel_cols,
                         .bias = weights_.first_bias(active.expert, panel),
                         .config = &weights_.config(),
                         .blocks = active.blocks,
                         .first_col = panel * weights_.first_cols(),
                         .depth = depth,
                         .last = panel + 1 == shape.panels,
                         .out = packed(scratch_.inner, active.place, depth)});
    }
  }

  void second_product(bool fused) {
    const PanelShape& shape = weights_.second();
    const std::int64_t num_tokens = fused ? args_.plan.num_tokens() : 0;
    const std::int64_t group =
        group_of(shape.panels, std::max<std::int64_t>({most_places_, num_tokens, 1}), 4);
    const std::int64_t slots =
        fused ? std::bit_width(static_cast<std::uint64_t>(tree_leaves())) : 0;
    const std::int64_t cols = group * kernels_.panel_cols;
    const std::int64_t products = most_places_ * cols;
    const std::int64_t floats = products + slots * num_tokens * cols;
    scratch_.worker.reserve(static_cast<std::size_t>(floats * threads_) * sizeof(float));
    parallel_for(
        args_.execution.pool, (shape.panels + group - 1) / group, [&](std::int64_t i, int worker) {
          float* product = reinterpret_cast<float*>(scratch_.worker.data()) + worker * floats;
          const std::int64_t first = i * group;
          const std::int64_t panels = std::min(group, shape.panels - first);
          if (fused) {
            reduce_columns(first, panels, product, product + products);
          } else {
            for (std::size_t a = 0; a < scratch_.active.size(); ++a) {
              second_unit({static_cast<std::int64_t>(a), first, panels}, product);
              store_rows({static_cast<std::int64_t>(a), first, panels}, product);
            }
          }
        });
  }

  void second_unit(const Unit& unit, float* product) const {
    const ActiveExpert& active = scratch_.active[static_cast<std::size_t>(unit.active)];
    const PanelShape& shape = weights_.second();
    kernels_.product({.a = packed(scratch_.inner, active.place, shape.depth),
                      .blocks = active.blocks,
                      .depth = shape.depth,
                      .weights = weights_.second_panel(active.expert, unit.first_panel),
                      .panel_bytes = shape.panel_bytes,
                      .panels = unit.panels,
                      .out = product});
  }

  /// Columns of H that a panel really has.
  [[nodiscard]] std::int64_t cols_of(std::int64_t panel) const {
    const std::int64_t left = weights_.config().hidden - panel * kernels_.panel_cols;
    return std::min(left, kernels_.panel_cols);
  }

  void store_rows(const Unit& unit, const float* product) const {
    const ActiveExpert& active = scratch_.active[static_cast<std::size_t>(unit.active)];
    for (std::int64_t p = unit.first_panel; p < unit.first_panel + unit.panels; ++p) {
      const float* bias = weights_.second_bias(active.expert, p);
      for (std::int64_t r = 0; r < active.blocks.rows(); ++r) {
        float* out = reinterpret_cast<float*>(args_.rows.row(active.first_row + r)) +
                     p * kernels_.panel_cols;
        const float* y = product + r * kernels_.panel_cols;
        for (std::int64_t j = 0; j < cols_of(p); ++j) {
          out[j] = bias == nullptr ? y[j] : y[j] + bias[j];
        }
      }
      product += active.blocks.places() * kernels_.panel_cols;
    }
  }

  /// Groups of the subtree, padded to a power of two.
  [[nodiscard]] std::int64_t tree_leaves() const {
    return static_cast<std::int64_t>(
        std::bit_ceil(static_cast<std::uint64_t>(args_.reduced.subtree.num_groups)));
  }

  /// The weighted sums of these columns: leaf by leaf, each finished pair of neighbours merged at
  /// once, so that a stack of log2(leaves) + 1 sums is enough. Adding the +0 of an absent group is
  /// not skipped: it turns a -0 into +0.
  void reduce_columns(std::int64_t first_panel, std::int64_t panels, float* product,
                      float* stack) const {
    const Subtree& tree = args_.reduced.subtree;
    const std::int64_t num_tokens = args_.plan.num_tokens();
    const std::int64_t size = num_tokens * panels * kernels_.panel_cols;
    std::size_t next = 0;  // of the active experts
    const std::int64_t leaves = args_.reduced.each_group ? tree.num_groups : tree_leaves();
    for (std::int64_t leaf = 0; leaf < leaves; ++leaf) {
      const auto index = static_cast<std::uint64_t>(leaf);
      float* sums = stack + (args_.reduced.each_group ? 0 : std::popcount(index) * size);
      std::memset(sums, 0, static_cast<std::size_t>(size) * sizeof(float));
      if (leaf < tree.num_groups) {
        const std::int32_t end = tree.order.begin(tree.first_group + static_cast<int>(leaf) + 1);
        next = reduce_group(next, end, first_panel, panels, product, sums);
      }
      if (args_.reduced.each_group) {
        store_sums(first_panel, panels, sums, leaf, tree.num_groups);
        continue;
      }
      for (int merges = std::countr_one(index); merges > 0; --merges, sums -= size) {
        for (std::int64_t i = 0; i < size; ++i) sums[i - size] += sums[i];
      }
    }
    if (!args_.reduced.each_group) store_sums(first_panel, panels, stack, 0, 1);
  }

  /// Adds the rows of the active experts from `next` whose global id is below `end`.
  std::size_t reduce_group(std::size_t next, std::int32_t end, std::int64_t first_panel,
                           std::int64_t panels, float* product, float* sums) const {
    const std::int64_t num_tokens = args_.plan.num_tokens();
    for (; next < scratch_.active.size(); ++next) {
      const ActiveExpert& active = scratch_.active[next];
      if (weights_.first_expert() + active.expert >= end) break;
      second_unit({static_cast<std::int64_t>(next), first_panel, panels}, product);
      for (std::int64_t p = 0; p < panels; ++p) {
        kernels_.reduce({.product = product + p * active.blocks.places() * kernels_.panel_cols,
                         .bias = weights_.second_bias(active.expert, first_panel + p),
                         .token = args_.plan.row_token.data + active.first_row,
                         .weight = args_.plan.row_weight.data + active.first_row,
                         .rows = active.used,
                         .sums = sums + p * num_tokens * kernels_.panel_cols});
      }
    }
    return next;
  }

  /// Token t's columns go to row t * rows_per_token + offset.
  void store_sums(std::int64_t first_panel, std::int64_t panels, const float* sums,
                  std::int64_t offset, std::int64_t rows_per_token) const {
    const RawMatrix& out = args_.reduced.sums;
    for (std::int64_t p = first_panel; p < first_panel + panels; ++p) {
      const std::int64_t cols = cols_of(p);
      for (std::int64_t t = 0; t < args_.plan.num_tokens(); ++t, sums += kernels_.panel_cols) {
        std::byte* to =
            out.row(t * rows_per_token + offset) + p * kernels_.panel_cols * size_of(out.dtype);
        if (out.dtype == DType::kF32) {
          std::memcpy(to, sums, static_cast<std::size_t>(cols) * sizeof(float));
        } else {
          for (std::int64_t j = 0; j < cols; ++j) store_float(to, out.dtype, j, sums[j]);
        }
      }
    }
  }

  static Scratch& scratch() {
    thread_local Scratch memory;
    return memory;
  }

  const ExpertsArgs& args_;
  const CpuExpertWeights& weights_;
  const Kernels& kernels_;
  const std::int64_t threads_;
  Scratch& scratch_ = scratch();
  std::int64_t places_ = 0;
  std::int64_t most_places_ = 0;
  std::int64_t used_rows_ = 0;
  std::int64_t rows_ = 0;
};

std::optional<std::string> reject(const ExpertsArgs& args, LayoutKind layout, const char* wanted) {
  if (args.execution.backend != Backend::kCpu) return "runs on the CPU";
  if (args.layout.kind != layout) return fmt::format("wants the {} layout", wanted);
  if (args.rows.cols != 0 && args.rows.dtype != DType::kF32) {
    return fmt::format("writes rows as f32, not {}", to_string(args.rows.dtype));
  }
  return std::nullopt;
}

void run(const ExpertsArgs& args) { Job(args).run(); }

}  // namespace
}  // namespace cpu

const Implementation<ExpertsArgs> kExpertsCpuGrouped = {
    "cpu.grouped",
    [](const ExpertsArgs& args) { return cpu::reject(args, LayoutKind::kCompact, "compact"); },
    cpu::run};
const Implementation<ExpertsArgs> kExpertsCpuBlocks = {
    "cpu.blocks",
    [](const ExpertsArgs& args) { return cpu::reject(args, LayoutKind::kAligned, "aligned"); },
    cpu::run};
const Implementation<ExpertsArgs> kExpertsCpuBatched = {
    "cpu.batched",
    [](const ExpertsArgs& args) { return cpu::reject(args, LayoutKind::kPadded, "padded"); },
    cpu::run};

}  // namespace switchyard

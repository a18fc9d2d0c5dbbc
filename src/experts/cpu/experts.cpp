// Experts on the CPU. Few rows per expert: bound by streaming each hit expert's weights once. Many:
// by arithmetic. Two loops over the threads: (expert, panels) units of the first product with the
// activation behind it, then column panels of the second product with all experts inside, so that
// one thread owns an output column and adds it up in the fixed order: no atomics, the same bits for
// any number of threads.
#include <algorithm>
#include <vector>

#include "experts/cpu/combine_columns.hpp"
#include "experts/cpu/packed_rows.hpp"
#include "experts/cpu/preactivation.hpp"
#include "experts/cpu/row_parts.hpp"
#include "experts/implementations.hpp"

namespace switchyard {
namespace cpu {
namespace {

/// Neighbouring panels, and some rows, of one active expert.
struct Unit {
  std::size_t active;
  std::int64_t first_panel;
  std::int64_t panels;
  RowPart part;
};

/// Memory of the calling thread, kept from call to call.
struct Scratch {
  WorkList work;
  PackedRows inputs;  ///< [places, H].
  PackedRows inner;   ///< [places, I].
  TokenParts parts;
  HugeBuffer worker;  ///< Per thread: products and sums.
  std::vector<Unit> units;
};

Scratch& scratch_of_thread() {
  thread_local Scratch scratch;
  return scratch;
}

class Job {
 public:
  explicit Job(const ExpertsArgs& args)
      : args_(args),
        weights_(static_cast<const CpuExpertWeights&>(*args.weights)),
        kernels_(weights_.kernels()),
        threads_(num_threads(args.execution.pool)) {
    scratch_.work.find(args, kernels_);
    scratch_.inputs.reserve(kernels_, scratch_.work.places, weights_.first().depth);
    scratch_.inner.reserve(kernels_, scratch_.work.places, weights_.second().depth);
    // A loop over the threads costs more than packing a handful of rows.
    constexpr std::int64_t kAlone = 16 << 10;
    glue_pool_ = scratch_.work.places * args.x.cols <= kAlone ? nullptr : args.execution.pool;
  }

  void run() {
    {
      const double matrices = weights_.config().gated ? 2 : 1;
      const ScopedStage stage(args_.execution, "gemm1+activation",
                              work(matrices, weights_.first(), input_bytes()));
      pack_inputs();
      first_product();
      scratch_.inner.finish(scratch_.work, glue_pool_);
    }
    const bool fused = args_.rows.cols == 0;
    const auto output = static_cast<double>(fused ? args_.reduced.sums.bytes()
                                                  : 4 * scratch_.work.used_rows * args_.rows.cols);
    const ScopedStage stage(args_.execution, fused ? "gemm2+combine" : "gemm2",
                            work(1, weights_.second(), output));
    second_product(fused);
  }

 private:
  [[nodiscard]] double input_bytes() const {
    const std::int64_t rows = args_.x_is_packed ? scratch_.work.used_rows : args_.x.rows;
    return static_cast<double>(rows * args_.x.row_bytes());
  }

  /// Bytes: the weights of the experts hit, the intermediate once, and `other` (inputs or outputs).
  [[nodiscard]] StageWork work(double matrices, const PanelShape& shape, double other) const {
    const ExpertConfig& config = weights_.config();
    const WorkList& list = scratch_.work;
    const double flops = 2 * matrices * static_cast<double>(config.hidden * config.inner);
    const std::int64_t inner = list.used_rows * config.inner * size_of(weights_.dtype());
    return {.bytes = static_cast<double>(shape.bytes()) * static_cast<double>(list.active.size()) +
                     static_cast<double>(inner) + other,
            .flops = flops * static_cast<double>(list.used_rows),
            .flops_executed = flops * static_cast<double>(list.rows)};
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
    kernels_.pack_rows({.rows = rows,
                        .count = count,
                        .cols = args_.x.cols,
                        .depth = scratch_.inputs.depth(),
                        .out = scratch_.inputs.written(active.place + begin)});
  }

  void pack_inputs() const {
    const std::vector<ActiveExpert>& active = scratch_.work.active;
    parallel_for(glue_pool_, static_cast<std::int64_t>(active.size()), [&](std::int64_t i, int) {
      const ActiveExpert& expert = active[static_cast<std::size_t>(i)];
      for (std::int64_t b = 0; b < expert.blocks.count(); ++b) pack_block(expert, b);
      scratch_.inputs.finish(expert);
    });
  }

  /// How many of `panels` a unit takes: enough units for an even end, products that stay in cache,
  /// and a multiple of what the kernels like to have side by side.
  [[nodiscard]] std::int64_t group_of(std::int64_t panels, std::int64_t rows,
                                      std::int64_t most) const {
    constexpr std::int64_t kProductBytes = 128 << 10;
    const std::int64_t even = panels / (8 * threads_);
    const std::int64_t cached = kProductBytes / (rows * kernels_.panel_cols * 4);
    const std::int64_t group = std::clamp<std::int64_t>(std::min(even, cached), 1, most);
    return group >= 4 ? group / 4 * 4 : group;
  }

  /// Room for `floats` per thread.
  [[nodiscard]] float* worker_memory(std::int64_t floats) const {
    scratch_.worker.reserve(static_cast<std::size_t>(floats * threads_) * sizeof(float));
    return reinterpret_cast<float*>(scratch_.worker.data());
  }

  void first_product() const {
    const std::int64_t panels = weights_.first().panels;
    const std::vector<ActiveExpert>& active = scratch_.work.active;
    std::vector<Unit>& units = scratch_.units;
    units.clear();
    std::int64_t floats = 0;
    // Panels of 8-bit weights are short: a unit is worth its start with so many bytes.
    constexpr std::int64_t kUnitBytes = 512 << 10;
    const std::int64_t most = std::max<std::int64_t>(8, kUnitBytes / weights_.first().panel_bytes);
    for (std::size_t i = 0; i < active.size(); ++i) {
      const RowBlocks& blocks = active[i].blocks;
      // Stored weights become numbers once for all rows.
      const RowParts parts =
          kernels_.widen == nullptr ? RowParts(blocks) : RowParts(blocks, blocks.rows());
      const std::int64_t places = parts.most_places(kernels_.max_rows);
      const std::int64_t group =
          group_of(panels * static_cast<std::int64_t>(active.size()), places, most);
      floats = std::max(floats, group * places * kernels_.panel_cols);
      for (std::int64_t p = 0; p < panels; p += group) {
        for (std::int64_t part = 0; part < parts.count(); ++part) {
          units.push_back({i, p, std::min(group, panels - p), parts[part]});
        }
      }
    }
    float* memory = worker_memory(floats);
    parallel_for(args_.execution.pool, static_cast<std::int64_t>(units.size()),
                 [&](std::int64_t i, int worker) {
                   first_unit(units[static_cast<std::size_t>(i)], memory + worker * floats);
                 });
  }

  void first_unit(const Unit& unit, float* product) const {
    const ActiveExpert& active = scratch_.work.active[unit.active];
    const PanelShape& shape = weights_.first();
    const auto& [first_row, blocks] = unit.part;
    multiply(kernels_, {.a = scratch_.inputs.ready(active.place + first_row),
                        .blocks = blocks,
                        .steps = scratch_.inputs.steps(),
                        .weights = weights_.first_panel(active.expert, unit.first_panel),
                        .panel_bytes = shape.panel_bytes,
                        .panels = unit.panels,
                        .out = product});
    if (args_.preactivation.data != nullptr) keep_preactivation(unit, product);
    for (std::int64_t p = 0; p < unit.panels; ++p) {
      const std::int64_t panel = unit.first_panel + p;
      kernels_.activate({.product = product + p * blocks.places() * kernels_.panel_cols,
                         .bias = weights_.first_bias(active.expert, panel),
                         .config = &weights_.config(),
                         .blocks = blocks,
                         .first_col = panel * weights_.first_cols(),
                         .depth = scratch_.inner.depth(),
                         .last = panel + 1 == shape.panels,
                         .out = scratch_.inner.written(active.place + first_row)});
    }
  }

  void keep_preactivation(const Unit& unit, const float* product) const {
    const ActiveExpert& active = scratch_.work.active[unit.active];
    const auto& [first_row, blocks] = unit.part;
    const std::int64_t rows = std::min(blocks.rows(), active.used - first_row);
    if (rows <= 0) return;  // padding
    RawMatrix out = args_.preactivation;
    out.data = out.row(active.first_row + first_row);
    out.rows = rows;
    store_preactivation({.weights = &weights_,
                         .expert = active.expert,
                         .panel = unit.first_panel,
                         .panels = unit.panels,
                         .product = product,
                         .places = blocks.places(),
                         .rows = rows,
                         .out = out});
  }

  void second_product(bool fused) const {
    const WorkList& list = scratch_.work;
    TokenParts& parts = scratch_.parts;
    parts.find(args_, list, kernels_);
    const std::int64_t panels = weights_.second().panels;
    const std::int64_t num_tokens = fused ? parts.most_tokens() : 0;
    const auto rows = std::max<std::int64_t>({parts.most_places(), num_tokens, 1});
    const std::int64_t group = group_of(panels * parts.count(), rows, 4);
    const std::int64_t groups = (panels + group - 1) / group;
    const std::int64_t cols = group * kernels_.panel_cols;
    const std::int64_t products = parts.most_places() * cols;
    const std::int64_t sums = fused ? combine_slots(args_.reduced) * num_tokens * cols : 0;
    float* memory = worker_memory(products + sums);
    parallel_for(args_.execution.pool, groups * parts.count(), [&](std::int64_t i, int worker) {
      const std::int64_t first = i % groups * group;
      const ColumnRange columns{first, std::min(group, panels - first)};
      float* product = memory + worker * (products + sums);
      if (fused) {
        reduce_columns(i / groups, columns, product, product + products);
      } else {
        store_columns(i / groups, columns, product);
      }
    });
  }

  void second_unit(std::size_t index, const PartRows& rows, const ColumnRange& columns,
                   float* product) const {
    const ActiveExpert& active = scratch_.work.active[index];
    const std::int64_t place = active.place + active.blocks.begin(rows.first_block);
    multiply(kernels_, {.a = scratch_.inner.ready(place),
                        .blocks = active.blocks.part(rows.first_block, rows.blocks),
                        .steps = scratch_.inner.steps(),
                        .weights = weights_.second_panel(active.expert, columns.first_panel),
                        .panel_bytes = weights_.second().panel_bytes,
                        .panels = columns.panels,
                        .out = product});
  }

  void reduce_columns(std::int64_t part, const ColumnRange& columns, float* product,
                      float* stack) const {
    const std::function<void(std::size_t, const PartRows&, float*)> multiply =
        [&](std::size_t index, const PartRows& rows, float* out) {
          second_unit(index, rows, columns, out);
        };
    combine_columns({.call = &args_,
                     .work = &scratch_.work,
                     .parts = &scratch_.parts,
                     .part = part,
                     .columns = columns,
                     .multiply = &multiply,
                     .product = product,
                     .stack = stack});
  }

  /// Padding's rows too, where there are any; then there is one part.
  void store_columns(std::int64_t part, const ColumnRange& columns, float* product) const {
    const TokenParts& parts = scratch_.parts;
    for (std::size_t i = 0; i < scratch_.work.active.size(); ++i) {
      const ActiveExpert& active = scratch_.work.active[i];
      PartRows rows = parts.rows(part, i);
      if (rows.blocks == 0) continue;
      if (parts.count() == 1) rows.count = active.blocks.rows();
      second_unit(i, rows, columns, product);
      store_rows(active, rows, columns, product);
    }
  }

  void store_rows(const ActiveExpert& active, const PartRows& rows, const ColumnRange& columns,
                  const float* product) const {
    const std::int64_t places = active.blocks.part(rows.first_block, rows.blocks).places();
    product += (rows.first - active.blocks.begin(rows.first_block)) * kernels_.panel_cols;
    for (std::int64_t p = columns.first_panel; p < columns.first_panel + columns.panels; ++p) {
      const float* bias = weights_.second_bias(active.expert, p);
      const std::int64_t cols = columns_of(weights_, p);
      for (std::int64_t r = 0; r < rows.count; ++r) {
        auto* out = reinterpret_cast<float*>(args_.rows.row(active.first_row + rows.first + r)) +
                    p * kernels_.panel_cols;
        const float* y = product + r * kernels_.panel_cols;
        for (std::int64_t j = 0; j < cols; ++j) out[j] = bias == nullptr ? y[j] : y[j] + bias[j];
      }
      product += places * kernels_.panel_cols;
    }
  }

  const ExpertsArgs& args_;
  const CpuExpertWeights& weights_;
  const Kernels& kernels_;
  const std::int64_t threads_;
  Scratch& scratch_ = scratch_of_thread();
  ThreadPool* glue_pool_ = nullptr;
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

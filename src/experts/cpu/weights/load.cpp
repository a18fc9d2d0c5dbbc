// Weights from a source into the panels of the CPU kernels. Bound by memory, or by the file where
// that is not in the page cache: some MiB of panels at a time in parallel, while the system reads
// the next ones. Beside the packed weights only a panel's rows per thread exist at a time, and only
// these MiB of a mapped file.
#include <algorithm>
#include <vector>

#include "core/check.hpp"
#include "experts/cpu/kernels/stored_panel.hpp"
#include "experts/cpu/weights/weights.hpp"
#include "experts/implementations.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {
namespace cpu {
namespace {

constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

std::int64_t bytes_of_depth(const Kernels& kernels, std::int64_t depth) {
  switch (kernels.storage) {
    case Storage::kF32: return 4 * depth * kernels.panel_cols;
    case Storage::kBF16:
    case Storage::kF16: return 2 * depth * kernels.panel_cols;
    case Storage::kQ8: return depth / kQ8Group * kQ8GroupBytes * kernels.panel_cols;
    case Storage::kE4M3:
    case Storage::kMxfp4:
    case Storage::kInt4:
    case Storage::kNvfp4: {
      const StoredPanel panel(kernels);
      return panel.bytes(round_up(depth, panel.depth_multiple()));
    }
  }
  return 0;
}

/// Neighbouring panels of the layer: those of the first product and of the second, expert after
/// expert, counted through.
struct Batch {
  std::int64_t begin, end;
};

/// Loads panels; `scratch` has room for a panel's rows per worker.
class Loader {
 public:
  Loader(const LoadExpertsArgs& args, CpuExpertWeights& weights)
      : args_(args), weights_(weights), kernels_(weights.kernels()) {
    read_type_ = kernels_.storage == Storage::kQ8 ? DType::kF32 : args.dtype;
    const std::int64_t longest = std::max(args.config.hidden, args.config.inner);
    // Of stored rows too: with their scales they are shorter than floats.
    scratch_bytes_ = round_up(kernels_.panel_cols * longest * size_of(read_type_), 64);
    if (kernels_.widen != nullptr) scratch_bytes_ = 2 * half_bytes(longest);
    scratch_.reserve(static_cast<std::size_t>(scratch_bytes_ * num_threads(args.execution.pool)));
  }

  void load() {
    if (args_.config.bias) {
      for (std::int32_t local = 0; local < args_.num_local; ++local) load_bias(local);
    }
    const std::int64_t all = panels_per_expert() * args_.num_local;
    Batch batch = batch_from(0);
    for (const Rows& rows : rows_of(batch)) say(&ExpertSource::will_read, rows);
    while (batch.begin < all) {
      // Asking for the next rows takes as long as the system needs to find room for them: it is
      // work like any other.
      const Batch next = batch_from(batch.end);
      const std::vector<Rows> soon = rows_of(next);
      const std::int64_t panels = batch.end - batch.begin;
      parallel_for(args_.execution.pool, std::ssize(soon) + panels,
                   [&](std::int64_t i, int worker) {
                     if (i < std::ssize(soon)) {
                       say(&ExpertSource::will_read, soon[static_cast<std::size_t>(i)]);
                     } else {
                       load_panel(batch.begin + i - std::ssize(soon), worker);
                     }
                   });
      for (const Rows& rows : rows_of(batch)) say(&ExpertSource::done_with, rows);
      if (args_.progress) args_.progress(static_cast<double>(batch.end) / static_cast<double>(all));
      batch = next;
    }
  }

 private:
  /// Rows of one matrix, as the source counts them.
  struct Rows {
    std::int32_t expert;
    ExpertPart part;
    std::int64_t first, count;
  };

  void say(void (ExpertSource::*advice)(std::int32_t, ExpertPart, std::int64_t, std::int64_t) const,
           const Rows& rows) const {
    (args_.source->*advice)(rows.expert, rows.part, rows.first, rows.count);
  }

  [[nodiscard]] std::int64_t panels_per_expert() const {
    return weights_.first().panels + weights_.second().panels;
  }

  /// From panel `begin` on: as many as can be in memory twice without being noticed.
  [[nodiscard]] Batch batch_from(std::int64_t begin) const {
    constexpr std::int64_t kBytes = 32 << 20;
    const std::int64_t all = panels_per_expert() * args_.num_local;
    const std::int64_t panel =
        std::max(weights_.first().panel_bytes, weights_.second().panel_bytes);
    return {begin, std::min(all, begin + std::max<std::int64_t>(1, kBytes / panel))};
  }

  /// The rows that the batch's panels are made of, in the order in which they are needed.
  [[nodiscard]] std::vector<Rows> rows_of(const Batch& batch) const {
    std::vector<Rows> list;
    const std::int64_t each = panels_per_expert();
    const std::int64_t firsts = weights_.first().panels;
    for (std::int64_t local = batch.begin / each; local * each < batch.end; ++local) {
      const std::int64_t begin = std::max<std::int64_t>(batch.begin - local * each, 0);
      const std::int64_t end = std::min(batch.end - local * each, each);
      const auto add = [&](ExpertPart part, std::int64_t from, std::int64_t to, std::int64_t cols,
                           std::int64_t rows) {
        const std::int64_t first = std::min(from * cols, rows);
        const std::int64_t count = std::min(to * cols, rows) - first;
        if (count <= 0) return;
        list.push_back({static_cast<std::int32_t>(args_.first_expert + local), part, first, count});
      };
      const std::int64_t cols = weights_.first_cols();
      add(ExpertPart::kGate, begin, std::min(end, firsts), cols, args_.config.inner);
      if (args_.config.gated) {
        add(ExpertPart::kUp, begin, std::min(end, firsts), cols, args_.config.inner);
      }
      add(ExpertPart::kDown, std::max(begin, firsts) - firsts, end - firsts, kernels_.panel_cols,
          args_.config.hidden);
    }
    return list;
  }

  void load_panel(std::int64_t index, int worker) const {
    const auto local = static_cast<std::int32_t>(index / panels_per_expert());
    const std::int64_t panel = index % panels_per_expert();
    std::byte* scratch = scratch_.data() + worker * scratch_bytes_;
    if (kernels_.widen != nullptr) {
      load_stored(local, panel, scratch);
    } else if (panel < weights_.first().panels) {
      load_first(local, panel, scratch);
    } else {
      load_second(local, panel - weights_.first().panels, scratch);
    }
  }

  /// Up to `most` rows of `part`, which has `num_rows`, from row `first` on; how many there are.
  std::int64_t read_rows(std::int32_t local, ExpertPart part, std::int64_t first,
                         std::int64_t num_rows, std::int64_t most, std::byte* out) const {
    const std::int64_t count = std::clamp<std::int64_t>(num_rows - first, 0, most);
    if (count > 0) {
      args_.source->read(args_.first_expert + local, part, first, count, read_type_, out);
    }
    return count;
  }

  /// Gate and up rows in the two halves; or gate rows in both.
  void load_first(std::int32_t local, std::int64_t panel, std::byte* scratch) const {
    const std::int64_t inner = args_.config.inner;
    const std::int64_t cols = weights_.first_cols();
    const std::int64_t first = panel * cols;
    const std::int64_t count = read_rows(local, ExpertPart::kGate, first, inner, cols, scratch);
    std::byte* up = scratch + cols * args_.config.hidden * size_of(read_type_);
    if (args_.config.gated) read_rows(local, ExpertPart::kUp, first, inner, cols, up);
    const std::int64_t half = kernels_.panel_cols / 2;
    pack_panel({.rows = {scratch, scratch + half * args_.config.hidden * size_of(read_type_)},
                .count = {std::min(count, half),
                          args_.config.gated ? count : std::max<std::int64_t>(count - half, 0)},
                .depth = args_.config.hidden,
                .shape = weights_.first(),
                .kernels = &kernels_,
                .out = weights_.first_panel(local, panel)});
  }

  void load_second(std::int32_t local, std::int64_t panel, std::byte* scratch) const {
    const std::int64_t cols = kernels_.panel_cols;
    const std::int64_t count =
        read_rows(local, ExpertPart::kDown, panel * cols, args_.config.hidden, cols, scratch);
    pack_panel({.rows = {scratch, scratch + cols / 2 * args_.config.inner * size_of(read_type_)},
                .count = {std::min(count, cols / 2), std::max<std::int64_t>(count - cols / 2, 0)},
                .depth = args_.config.inner,
                .shape = weights_.second(),
                .kernels = &kernels_,
                .out = weights_.second_panel(local, panel)});
  }

  [[nodiscard]] StoredLayout stored_layout(std::int64_t rows, std::int64_t depth) const {
    return {.format = args_.format, .rows = rows, .cols = depth, .int4 = kernels_.int4};
  }
  /// Room for the rows of half a panel with their scales.
  [[nodiscard]] std::int64_t half_bytes(std::int64_t depth) const {
    const StoredLayout half = stored_layout(kernels_.panel_cols / 2, depth);
    return round_up(half.value_bytes(), 64) + round_up(half.scale_bytes(), 64);
  }

  /// A panel as it is stored, each half by itself: of two matrices, or neighbouring rows of one.
  void load_stored(std::int32_t local, std::int64_t index, std::byte* scratch) const {
    const ExpertConfig& config = args_.config;
    const std::int64_t half = kernels_.panel_cols / 2;
    const bool down = index >= weights_.first().panels;
    const std::int64_t panel = down ? index - weights_.first().panels : index;
    const bool both = !down && config.gated;
    const std::int64_t num_rows = down ? config.hidden : config.inner;
    const std::int64_t depth = down ? config.inner : config.hidden;
    const ExpertPart parts[] = {down ? ExpertPart::kDown : ExpertPart::kGate,
                                down   ? ExpertPart::kDown
                                : both ? ExpertPart::kUp
                                       : ExpertPart::kGate};
    PackStoredArgs pack{
        .rows = {},
        .count = {},
        .depth = depth,
        .shape = down ? weights_.second() : weights_.first(),
        .kernels = &kernels_,
        .out = down ? weights_.second_panel(local, panel) : weights_.first_panel(local, panel)};
    for (int i = 0; i < 2; ++i) {
      const std::int64_t first = both ? panel * half : (2 * panel + i) * half;
      pack.count[i] = std::clamp<std::int64_t>(num_rows - first, 0, half);
      if (pack.count[i] == 0) continue;
      const std::int64_t values = round_up(stored_layout(half, depth).value_bytes(), 64);
      std::byte* room = scratch + i * half_bytes(depth);
      const std::int32_t expert = args_.first_expert + local;
      const StoredRows rows{room, room + values, args_.source->stored_factor(expert, parts[i])};
      args_.source->read_stored(expert, parts[i], first, pack.count[i], rows);
      pack.rows[i] = rows;
    }
    pack_stored(pack);
  }

  void load_bias(std::int32_t local) {
    const std::int32_t expert = args_.first_expert + local;
    std::vector<float> values(
        static_cast<std::size_t>(std::max(args_.config.inner, args_.config.hidden)));
    const std::int64_t cols = weights_.first_cols();
    const auto place = [&](std::int64_t offset) {
      for (std::int64_t i = 0; i < args_.config.inner; ++i) {
        weights_.first_bias(local, i / cols)[offset + i % cols] =
            values[static_cast<std::size_t>(i)];
      }
    };
    args_.source->read_bias(expert, ExpertPart::kGate, values.data());
    place(0);
    if (args_.config.gated) {
      args_.source->read_bias(expert, ExpertPart::kUp, values.data());
      place(cols);
    }
    args_.source->read_bias(expert, ExpertPart::kDown, values.data());
    std::copy_n(values.data(), args_.config.hidden, weights_.second_bias(local, 0));
  }

  const LoadExpertsArgs& args_;
  CpuExpertWeights& weights_;
  const Kernels& kernels_;
  DType read_type_;
  std::int64_t scratch_bytes_;
  HugeBuffer scratch_;
};

}  // namespace

PanelShape panel_shape(const Kernels& kernels, std::int64_t depth, std::int64_t cols) {
  const std::int64_t packed = round_up(depth, kernels.depth_multiple);
  return {.depth = packed,
          .panels = round_up(cols, kernels.panel_cols) / kernels.panel_cols,
          .panel_bytes = bytes_of_depth(kernels, packed)};
}

CpuExpertWeights::CpuExpertWeights(const LoadExpertsArgs& args, const Kernels& kernels)
    : ExpertWeights(args.config, args.dtype, args.format, Backend::kCpu, args.first_expert,
                    args.num_local),
      kernels_(kernels),
      first_(panel_shape(
          kernels, args.config.hidden,
          round_up(args.config.inner, kernels.panel_cols / 2) * (args.config.gated ? 2 : 1))),
      second_(panel_shape(kernels, args.config.inner, args.config.hidden)) {
  memory_.reserve(static_cast<std::size_t>(args.num_local * (first_.bytes() + second_.bytes())));
  if (!args.config.bias) return;
  first_bias_.resize(static_cast<std::size_t>(args.num_local * first_.panels * kernels.panel_cols));
  second_bias_.resize(
      static_cast<std::size_t>(args.num_local * second_.panels * kernels.panel_cols));
}

}  // namespace cpu

std::unique_ptr<ExpertWeights> load_experts_cpu(const LoadExpertsArgs& args) {
  const Int4Form int4 = args.format == WeightFormat::kInt4 ? args.source->int4_form() : Int4Form{};
  const cpu::Kernels& kernels = cpu::find_kernels(isa_in_use(), args.dtype, args.format, int4);
  auto weights = std::make_unique<cpu::CpuExpertWeights>(args, kernels);
  cpu::Loader(args, *weights).load();
  return weights;
}

void reload_experts_cpu(const LoadExpertsArgs& args, ExpertWeights& weights) {
  LoadExpertsArgs same = args;
  same.format = weights.format();
  cpu::Loader(same, dynamic_cast<cpu::CpuExpertWeights&>(weights)).load();
}

}  // namespace switchyard

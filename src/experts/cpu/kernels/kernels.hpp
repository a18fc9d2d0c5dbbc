#pragma once

// What the CPU experts need of an instruction set: a handful of loops over packed data. The driver
// (experts_cpu.cpp) knows nothing of registers, the kernels nothing of plans and threads.
//
// Weights lie in column panels: `panel_cols` outputs wide, all of the reduction deep. Rows (of x
// and of the intermediate) lie in blocks of at most `max_rows`. The product of a block and a panel
// is summed in registers, one chain per output in ascending depth: a row's bits therefore depend
// neither on the other rows of its block nor on how many there are.

#include <cstddef>
#include <cstdint>

#include "switchyard/cpu_isa.hpp"
#include "switchyard/experts.hpp"
#include "switchyard/tensor.hpp"
#include "switchyard/weight_format.hpp"

namespace switchyard::cpu {

/// The form of the weights in a panel; of those with codes stored_panel.hpp says it.
enum class Storage : std::uint8_t { kF32, kBF16, kF16, kQ8, kE4M3, kMxfp4, kInt4, kNvfp4 };

/// Values along the reduction that share a scale of kQ8.
inline constexpr std::int64_t kQ8Group = 32;

/// Bytes of such a group: a bf16 scale and the values.
inline constexpr std::int64_t kQ8GroupBytes = 2 + kQ8Group;

/// Rows of one expert cut into blocks of at most `most`. `fixed`: every block takes `most` places,
/// the last ones of the last block unused (tiles); else the blocks are of nearly equal size and
/// without a gap.
class RowBlocks {
 public:
  RowBlocks() = default;
  RowBlocks(std::int64_t rows, std::int64_t most, bool fixed)
      : rows_(rows),
        count_((rows + most - 1) / most),
        size_(fixed         ? most
              : count_ == 0 ? 0
                            : rows / count_),
        larger_(fixed || count_ == 0 ? 0 : rows % count_),
        fixed_(fixed) {}

  [[nodiscard]] std::int64_t rows() const { return rows_; }
  [[nodiscard]] std::int64_t count() const { return count_; }
  [[nodiscard]] std::int64_t begin(std::int64_t block) const {
    const std::int64_t first = block * size_ + (block < larger_ ? block : larger_);
    return first < rows_ ? first : rows_;
  }
  [[nodiscard]] std::int64_t size(std::int64_t block) const {
    return begin(block + 1) - begin(block);
  }
  /// That a row lies in.
  [[nodiscard]] std::int64_t block_of(std::int64_t row) const {
    const std::int64_t in_larger = larger_ * (size_ + 1);
    return row < in_larger ? row / (size_ + 1) : larger_ + (row - in_larger) / size_;
  }
  /// Neighbouring blocks by themselves: their first row is row 0.
  [[nodiscard]] RowBlocks part(std::int64_t first, std::int64_t count) const {
    RowBlocks out = *this;
    out.rows_ = begin(first + count) - begin(first);
    out.count_ = count;
    out.larger_ = larger_ <= first ? 0 : larger_ - first < count ? larger_ - first : count;
    return out;
  }
  /// Rows that the blocks take in memory.
  [[nodiscard]] std::int64_t places() const { return fixed_ ? count_ * size_ : rows_; }

 private:
  std::int64_t rows_ = 0;
  std::int64_t count_ = 0;
  std::int64_t size_ = 0;  ///< Of a block; the first `larger_` ones have one more.
  std::int64_t larger_ = 0;
  bool fixed_ = false;
};

struct PackRowsArgs {
  const std::byte* const* rows;  ///< `count` pointers to rows of `cols` elements; null: zeros.
  std::int64_t count;
  std::int64_t cols;
  std::int64_t depth;  ///< cols rounded up to the kernels' multiple; the rest becomes 0.
  void* out;           ///< One block.
};

/// What to fetch into the second-level cache meanwhile.
struct NextBytes {
  const std::byte* from = nullptr;
  std::int64_t bytes = 0;
};

/// Rows of a matrix that a product's sums are written to as they leave the registers, rounded once.
struct OutputRows {
  std::byte* const* rows = nullptr;  ///< [rows] where one begins; null: nowhere. Null itself: sums
                                     ///< go to `out`.
  std::int64_t first_byte = 0;  ///< Of a row, where the first panel's columns are; the next panel's
                                ///< follow.
  DType dtype = DType::kF32;    ///< f32, or the kernels' own.
  bool past_caches = false;     ///< stream_fence() behind it. Each panel's part of a row has a
                                ///< vector's alignment.

  [[nodiscard]] OutputRows from_row(std::int64_t row) const {
    OutputRows out = *this;
    if (rows != nullptr) out.rows += row;
    return out;
  }
};

struct ProductArgs {
  const void* a;             ///< Packed blocks.
  RowBlocks blocks;          ///< Of `a`.
  std::int64_t steps;        ///< Of all depth: packed depth / depth_multiple.
  const std::byte* weights;  ///< The first panel.
  std::int64_t panel_bytes;  ///< From one panel to the next.
  std::int64_t panels;       ///< How many to multiply with.
  float* out;                ///< [panels, places, panel_cols].
  /// Not all of the depth: `part_steps` (0: all) from `first_step` on, where `weights` begin. Sums
  /// of the steps before lie in `out`.
  std::int64_t first_step = 0;
  std::int64_t part_steps = 0;
  NextBytes next{};  ///< Of a part, for what follows it in memory is of no use.
  /// Of all the depth, and where Kernels::writes_rows. Sums of a depth that is cut wait in `out`.
  OutputRows to{};

  [[nodiscard]] std::int64_t length() const { return part_steps == 0 ? steps : part_steps; }
};

/// Stored weights as the numbers that they mean, in the order of a panel of the compute type.
struct WidenArgs {
  const std::byte* panel;  ///< As StoredPanel has it.
  std::int64_t first;      ///< Of the depth, a multiple of kWidenDepth.
  std::int64_t depth;      ///< How many, a multiple of StoredPanel::depth_multiple().
  std::byte* out;          ///< The panel from `first` on.
  Int4Form int4{};         ///< Of kInt4.
};
using WidenFunction = void (*)(const WidenArgs&);
inline constexpr std::int64_t kWidenDepth = 32;

struct ActivateArgs {
  const float* product;  ///< [places, panel_cols] of one panel: gate half, up half; or all gate.
  const float* bias;     ///< [panel_cols] in the same order, or null.
  const ExpertConfig* config;
  RowBlocks blocks;
  std::int64_t first_col;  ///< Of the intermediate.
  std::int64_t depth;      ///< Of the intermediate as packed: columns from there on do not exist.
  bool last;               ///< The last panel: also writes zeros up to `depth`.
  void* out;               ///< Packed blocks of the intermediate.
};

/// A piece of one row of the intermediate on the way back; `count` is a multiple of panel_cols / 2.
struct GradientArgs {
  const float* gate;    ///< Pre-activation.
  const float* up;      ///< Or null: plain.
  const float* dinner;  ///< The gradient of the row's unweighted intermediate.
  std::int64_t count;
  float weight;  ///< Of the row.
  const ExpertConfig* config;
  float* inner;  ///< out: weight * act(gate, up).
  float* dgate;  ///< out: gradients of the pre-activation.
  float* dup;    ///< out where gated.
  /// Behind panel_cols / 2 gradients of the gate lie as many of up, then the gate's next ones.
  bool taking_turns = false;
};

struct QuantizeRowsArgs {
  const float* rows;  ///< [count, depth].
  std::int64_t count;
  std::int64_t depth;
  void* out;  ///< One block as product() takes it.
};

struct ReduceArgs {
  const float* product;       ///< [rows, panel_cols] of one panel.
  const float* bias;          ///< [panel_cols], or null.
  const std::int32_t* token;  ///< [rows]; -1: padding.
  const float* weight;        ///< [rows].
  std::int64_t rows;
  std::int64_t first_token;  ///< Whose sums come first.
  float* sums;               ///< [tokens, panel_cols]: sums = fma(weight, product + bias, sums).
};

/// product() of all the depth by codes, of at most `most_rows` rows: its bits, without numbers
/// beyond the first-level cache.
struct CodedRowsProduct {
  std::int64_t most_rows = 0;
  void (*product)(Storage storage, const ProductArgs& args, const Int4Form& int4) = nullptr;
};

/// The loops of one instruction set for one compute type and storage. Of kF32, on any instruction
/// set, blocks of rows are [depth][rows] and panels [depth][panel_cols] floats, depth_multiple 1:
/// who has a matrix in that form need not pack it.
struct Kernels {
  CpuIsa isa;
  DType dtype;
  Storage storage;
  std::int64_t panel_cols;
  std::int64_t max_rows;
  bool fixed_blocks;
  std::int64_t depth_multiple;
  std::int64_t element_bytes;   ///< Of a row as pack_rows() and activate() leave it.
  std::int64_t step_row_bytes;  ///< Of a row as product() takes it, per depth_multiple.
  void (*pack_rows)(const PackRowsArgs&);
  void (*product)(const ProductArgs&);
  void (*activate)(const ActivateArgs&);
  /// Null: product() takes rows as they are; else blocks go through this first.
  void (*quantize_rows)(const QuantizeRowsArgs&);
  void (*reduce)(const ReduceArgs&);
  /// Returns <dinner, act(gate, up)> of the piece.
  float (*gradient)(const GradientArgs&);
  /// What limits them, to be measured: `rounds` rounds of `spin_flops` operations in registers, and
  /// reading memory as 1, 2, 4 or 8 streams side by side. The results are of no use.
  float (*spin)(std::int64_t rounds);
  double spin_flops;
  float (*read)(const std::byte* from, std::int64_t bytes, int streams);
  bool writes_rows = false;  ///< product() knows ProductArgs::to.
  /// Of weights with codes: product() takes panels of `dtype`, which this makes of stored ones.
  WidenFunction widen = nullptr;
  Int4Form int4{};  ///< Of kInt4.
  CodedRowsProduct coded_rows{};

  [[nodiscard]] RowBlocks blocks(std::int64_t rows) const { return {rows, max_rows, fixed_blocks}; }
};

/// The kernels for these types on the given instruction set, or on the next lower one that has a
/// kernel of its own for them. Those of stored weights are those of exact ones, but for `widen`.
const Kernels& find_kernels(CpuIsa isa, DType dtype, WeightFormat format, Int4Form int4 = {});

/// The same values in plain code, of panels `cols` wide; for any scale.
void widen_exactly(Storage storage, DType dtype, std::int64_t cols, const WidenArgs& args);

/// kernels.product() for all of the depth, of stored weights too: by their codes where the
/// instruction set has that for so many rows; else they are widened some depth at a time into the
/// first-level cache, where the product of exact weights finds them. So the bits are those of exact
/// weights.
void multiply(const Kernels& kernels, const ProductArgs& args);

// One per file; null where the file has nothing better than a lower instruction set.
const Kernels* portable_kernels(DType dtype, bool q8);
const Kernels* avx2_kernels(DType dtype, bool q8);
const Kernels* avx512_kernels(DType dtype, bool q8);
const Kernels* avx512_bf16_kernels(DType dtype, bool q8);
const Kernels* amx_bf16_kernels(DType dtype, bool q8);

// What there is for widening to a type; AMX has the last one's, of bf16.
WidenFunction portable_widening(DType dtype, Storage storage);
WidenFunction avx2_widening(DType dtype, Storage storage);
WidenFunction avx512_widening(DType dtype, Storage storage);
WidenFunction avx512_bf16_widening(Storage storage);
CodedRowsProduct avx512_bf16_coded_rows();
CodedRowsProduct amx_bf16_coded_rows(Storage storage);

}  // namespace switchyard::cpu

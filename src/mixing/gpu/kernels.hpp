#pragma once

// What Soft-MoE on a GPU does between its products. All sums run in an order that follows from the
// sizes alone: the same bits in every run. Logits and what has their shape are [T, S] f32.

#include <cuda_runtime_api.h>

#include "mixing/slot_groups.hpp"
#include "switchyard/device.hpp"
#include "switchyard/plan.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard::mixing {

/// Who reads and makes slots, as SlotGroups says it, for kernels.
struct GroupShape {
  std::int64_t num_tokens = 0;  ///< T.
  std::int64_t slots = 0;       ///< S.
  std::int64_t tokens = 0;      ///< m of a group.
  std::int64_t count = 0;       ///< Groups.
  std::int64_t per_sequence = 0;
  bool causal = false;

  explicit GroupShape(const SlotGroups& groups)
      : num_tokens(groups.num_tokens()),
        slots(groups.slots()),
        tokens(groups.tokens()),
        count(groups.count()),
        per_sequence(groups.per_sequence()),
        causal(groups.causal()) {}
};

/// How passes along columns are cut: a block takes `lanes` threads' columns, four each where four
/// divide S, of one chunk of a group's tokens.
struct ColumnTiles {
  int lanes = 1;  ///< A power of two, at most 32.
  int vector = 1;
  std::int32_t column_blocks = 0;
  std::int32_t chunks = 0;  ///< Of a group.
  std::int32_t chunk_tokens = 0;
};
[[nodiscard]] ColumnTiles column_tiles(const GroupShape& shape);

/// Largest logits and sums of exponentials of each group's columns [count, S], and of its chunks
/// [count, chunks, S], which may be the same memory where there is one chunk.
struct ColumnSums {
  float *largest = nullptr, *sum = nullptr;
  float *chunk_largest = nullptr, *chunk_sum = nullptr;
};

/// out[r] = 1 / sqrt(sum of squares of row r + kSoftMoeEpsilon).
void inverse_lengths(ConstRawMatrix rows, float* out, cudaStream_t stream);

/// out = rows as f32.
void widen_rows(ConstRawMatrix rows, float* out, cudaStream_t stream);

/// out = values rounded to bf16; a multiple of 4.
void round_values(Matrix<const float> values, std::byte* out, cudaStream_t stream);

/// out [cols, rows] = matrix^T.
void turn(Matrix<const float> matrix, float* out, cudaStream_t stream);

/// logits = logits * of_token * of_slot where these are given, and the sums of their columns, of
/// scale * logits; what is not finite goes into `status`, which may be null.
struct ColumnSumArgs {
  float* logits = nullptr;
  const float* of_token = nullptr;  ///< [T], or null, and then of_slot too.
  const float* of_slot = nullptr;   ///< [S].
  float scale = 1.0F;
  ColumnSums sums{};
  DeviceStatus* status = nullptr;
};
void sum_columns(const GroupShape& shape, const ColumnSumArgs& args, cudaStream_t stream);

/// Where weights [T, S] go: f32, or bf16 where 4 divides S.
struct WeightsOut {
  void* data = nullptr;
  DType dtype = DType::kF32;
};
/// D from these sums; 0 for groups that make no slots.
void dispatch_weights(const GroupShape& shape, const float* logits, float scale,
                      const ColumnSums& sums, WeightsOut out, cudaStream_t stream);
/// C; 0 for groups that read none.
void combine_weights(const GroupShape& shape, const float* logits, float scale, WeightsOut out,
                     cudaStream_t stream);

/// gradient = weights (gradient - rows' sums of weights gradient); 0 for groups that read none.
void combine_weights_backward(const GroupShape& shape, const float* weights, float* gradient,
                              cudaStream_t stream);

/// dots [count, S]: sums of weights * gradient over the tokens of each group that makes slots.
struct ColumnDotArgs {
  const float* weights = nullptr;
  const float* gradient = nullptr;
  float* dots = nullptr;
  float* chunk_dots = nullptr;  ///< [count, chunks, S], or `dots` where there is one chunk.
};
void dot_columns(const GroupShape& shape, const ColumnDotArgs& args, cudaStream_t stream);

/// With dl = dlogits + dispatch (gradient - dots), the second part for groups that make slots:
/// dlogits = scale * dl * of_token * of_slot, token_sums [T] and slot_sums [S] of dl * logits.
struct DispatchBackwardArgs {
  const float* dispatch = nullptr;
  const float* gradient = nullptr;
  const float* dots = nullptr;
  const float* logits = nullptr;
  const float* of_token = nullptr;  ///< Or null, and then of_slot too.
  const float* of_slot = nullptr;
  float scale = 1.0F;
  float* dlogits = nullptr;
  float* token_sums = nullptr;
  float* slot_sums = nullptr;
  float* token_parts = nullptr;  ///< [T, column_blocks]
  float* slot_parts = nullptr;   ///< [count * chunks, S]
};
void dispatch_weights_backward(const GroupShape& shape, const DispatchBackwardArgs& args,
                               cudaStream_t stream);

/// *out = the sum of `size` values, added to what is there where `accumulate`.
void sum_all(const float* values, std::int64_t size, bool accumulate, float* out,
             cudaStream_t stream);

/// out = first - rows * scale * inverse^2 * sums + second, a row at a time.
struct RowGradientArgs {
  Matrix<const float> first{};
  const float* second = nullptr;   ///< Like first, or null.
  ConstRawMatrix rows{};           ///< What was divided by its length.
  const float* inverse = nullptr;  ///< Of rows; null: nothing was.
  const float* sums = nullptr;     ///< Of rows.
  float scale = 1.0F;
  RawMatrix out{};  ///< One rounding.
  bool accumulate = false;
};
/// @param makes  Rows are tokens, and `second` counts for groups that make slots; or null.
void row_gradients(const RowGradientArgs& args, const GroupShape* makes, cudaStream_t stream);

/// SlotGroups::plan_into() on the device, in arrays that are there.
void plan_of_slots(const SlotGroups& groups, const PlanView& plan, cudaStream_t stream);

/// out[slot] = rows[token_row[slot]]: rows of the experts' layout by sets.
void rows_by_slots(ConstRawMatrix rows, const std::int32_t* token_row, RawMatrix out,
                   cudaStream_t stream);

}  // namespace switchyard::mixing

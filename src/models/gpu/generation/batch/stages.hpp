#pragma once

// The stages of a token step of some dozens of sequences in bf16, which are too many for
// row_product() and too few for kernels that are made for thousands of rows. Bound by the bytes of
// the weights: products are by mma.sync with the weights as its taller side, and each stage asks
// for its first weights before the one in front has ended. All only enqueue; no stage of a step may
// write weights.

#include <cuda_runtime_api.h>

#include <cstdint>

namespace switchyard::models::gpu {

/// Most rows of these stages, and numbers of one.
inline constexpr std::int64_t kBatchRows = 64;
inline constexpr std::int64_t kMostBatchHidden = 4096;

struct SumNormArgs {
  const float* x = nullptr;      ///< [rows, H], H a multiple of 4, at most kMostBatchHidden.
  const float* parts = nullptr;  ///< [splits, rows, top_k, H] what is added, or null: nothing.
  const float* share = nullptr;  ///< [rows, top_k] times these, or null: as they are.
  std::int32_t top_k = 1, splits = 1;
  float* sum = nullptr;           ///< out [rows, H]: x and its parts, may be x; or null.
  const float* weight = nullptr;  ///< [H].
  void* y = nullptr;              ///< out [rows, H] bf16: the sum's norm.
  std::int64_t rows = 0, hidden = 0;
  float epsilon = 0;
  cudaStream_t stream = nullptr;
};
/// The combine of the experts before, the residual sum and the norm. A block a row.
void sum_norm(const SumNormArgs& args);

struct BatchProductArgs {
  const void* x = nullptr;     ///< [rows, in] bf16, in a multiple of 8.
  const void* w = nullptr;     ///< [out, in] bf16.
  const float* add = nullptr;  ///< [rows, out], or null.
  void* y = nullptr;           ///< out [rows, out] bf16 or f32: x w^T + add.
  bool y_is_f32 = false;
  std::int64_t rows = 0, in = 0, out = 0;  ///< rows <= kBatchRows.
  cudaStream_t stream = nullptr;
};
/// A block has 16 outputs of all rows, or 32 where that would be more blocks than stand at once;
/// its warps share the columns.
void batch_product(const BatchProductArgs& args);

/// The experts of a layer, of which a row has chosen top_k.
struct BatchExpertsArgs {
  const void* w13 = nullptr;             ///< [E, 2 I, H] bf16: gate rows, then up rows.
  const void* w2 = nullptr;              ///< [E, H, I] bf16.
  const std::int32_t* expert = nullptr;  ///< [rows, top_k]; null: one expert, which all rows have.
  std::int32_t num_experts = 1, top_k = 1;
  const void* x = nullptr;              ///< [rows, H] bf16.
  void* inner = nullptr;                ///< [rows, top_k, I] bf16, of two kernels only.
  float* parts = nullptr;               ///< out [splits, rows, top_k, H], without their weights.
  std::int64_t rows = 0, h = 0, i = 0;  ///< rows <= kBatchRows; H and I multiples of 8.
  cudaStream_t stream = nullptr;
};
/// Whether eight of their rows fit into shared memory.
[[nodiscard]] bool batch_experts_fit(std::int64_t h, std::int64_t i);
/// In how many parts an expert's outputs come, which are to be added.
[[nodiscard]] std::int32_t batch_expert_splits(std::int32_t num_experts, std::int64_t h,
                                               std::int64_t i);
/// inner = silu(gate) * up, parts = inner w2^T. An expert has neighbouring blocks, a
/// multiprocessor's each; which rows are its, a block finds out for itself. Of more rows an expert
/// than fit its weights are read again. Of many experts one kernel, whose blocks have some of the
/// inner columns each, which go nowhere, and leave a part of all outputs; of few, one a product.
void batch_experts(const BatchExpertsArgs& args);

}  // namespace switchyard::models::gpu

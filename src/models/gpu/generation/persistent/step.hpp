#pragma once

// A token step of few sequences as one kernel that stays: its blocks, one a multiprocessor, go
// through the layers together and meet at a barrier behind each stage. A stage's weights are asked
// for before the barrier in front of it, and nothing is launched in between. Bound by the barriers
// (five a layer) where a model is small, by the bytes of the weights where it is large.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "models/gpu/generation/stages.hpp"

namespace switchyard::models::gpu {

/// A layer's weights and its part of the cache. Matrices are of the compute type, all else is f32.
struct alignas(16) PersistentLayer {
  const float* norm1 = nullptr;   ///< [H].
  const float* q_norm = nullptr;  ///< [D], or null: no norm.
  const float* k_norm = nullptr;
  const float* norm2 = nullptr;  ///< [H].
  const void* qkv = nullptr;     ///< [(N + 2M) D, H].
  const void* o = nullptr;       ///< [H, N D].
  const float* gate = nullptr;   ///< [E, H]; null: a dense layer, of one expert.
  const float* bias = nullptr;   ///< [E] for the choice alone, or null.
  const void* w13 = nullptr;     ///< [E, 2 I, H]: gate rows, then up rows.
  const void* w2 = nullptr;      ///< [E, H, I].
  void* keys = nullptr;          ///< As CacheLayer's.
  void* values = nullptr;
  std::int32_t inner = 0;  ///< I.
};

struct PersistentStepArgs {
  const PersistentLayer* layers = nullptr;  ///< [L] on the device.
  std::int32_t num_layers = 0;
  const float* table = nullptr;  ///< [V, H].
  const float* norm = nullptr;   ///< [H], the last one.
  const void* head = nullptr;    ///< [V, H] compute type.
  const float* cosine = nullptr;
  const float* sine = nullptr;
  std::int32_t vocabulary = 0, hidden = 0, heads = 0, kv_heads = 0, head_dim = 0;
  std::int32_t experts = 0, top_k = 0;  ///< Of the MoE layers; 0: all are dense.
  std::int32_t most_inner = 0;          ///< The largest I of all layers.
  bool renormalize = false;
  float scale = 1;  ///< Of the weights of the chosen.
  float epsilon = 0;
  std::int64_t capacity = 0;   ///< Of the cache,
  std::int64_t cache_row = 0;  ///< as CacheLayer has them.
  std::int32_t splits = 1;     ///< persistent_splits().

  std::int32_t rows = 0;         ///< B, at most kFewRows.
  std::int32_t* ids = nullptr;   ///< [B] in and out: the likeliest ones behind the step.
  CachePlace* place = nullptr;   ///< Goes one on.
  std::int32_t* told = nullptr;  ///< As LikeliestArgs::told.
  std::int32_t ring = 0;

  // What the stages leave for each other.
  float* x = nullptr;                ///< [B, H].
  float* middle = nullptr;           ///< [B, H].
  void* qkv = nullptr;               ///< [B, (N + 2M) D] compute type.
  void* mixed = nullptr;             ///< [B, N D] compute type, where splits is 1; else
  float* parts = nullptr;            ///< as AttendArgs'.
  float* stats = nullptr;            ///< Likewise.
  float* router_logits = nullptr;    ///< [B, E].
  void* inner = nullptr;             ///< [B, K, I] compute type.
  float* logits = nullptr;           ///< out [B, V].
  Best* best = nullptr;              ///< [multiprocessors, B].
  std::uint32_t* barrier = nullptr;  ///< [kBarrierWords], zero before the first step.
  bool bf16 = false;
  cudaStream_t stream = nullptr;
};
inline constexpr std::int64_t kBarrierWords = 64;  ///< Two lines of memory.

/// Whether the kernel can run such a step here: its rows and what the experts leave fit into shared
/// memory, and sizes are multiples of what it reads at a time. Looks at no address; I is the
/// caller's to check, of each layer.
[[nodiscard]] bool persistent_step_fits(const PersistentStepArgs& args);
/// How many blocks share the positions of a head: PersistentStepArgs::splits.
[[nodiscard]] std::int32_t persistent_splits(std::int64_t rows, std::int32_t heads,
                                             std::int32_t kv_heads, std::int64_t capacity);
/// Only enqueues, where persistent_step_fits(). Steps of one barrier must not overlap.
void persistent_step(const PersistentStepArgs& args);

}  // namespace switchyard::models::gpu

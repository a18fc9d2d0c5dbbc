#pragma once

// What a token step of generation consists of besides the stages of a forward, and a cache of keys
// and values. All only enqueue; `bf16`: arrays of the compute type are bf16, else f32; all else is
// f32. On Hopper they start while the stage before them ends, and fetch weights meanwhile: no stage
// of a step may write weights.

#include <cuda_runtime_api.h>

#include <cstdint>

namespace switchyard::models::gpu {

/// Most rows of row_product().
inline constexpr std::int64_t kFewRows = 8;

/// How far a cache is, on the device.
struct CachePlace {
  std::int32_t position = 0;  ///< Of the tokens of the step that runs.
  std::int32_t next = 0;      ///< Of the tokens of the next step.
};

struct BeginArgs {
  const std::int32_t* ids;  ///< [rows].
  const float* table;       ///< [vocabulary, hidden].
  float* x;                 ///< out [rows, hidden].
  CachePlace* place;        ///< Goes one on.
  std::int64_t rows, hidden;
  cudaStream_t stream;
};
void begin_step(const BeginArgs& args);

/// Keys and values of a layer: [B, M, capacity, row], a head's numbers and zeros up to `row`.
struct CacheLayer {
  void* keys = nullptr;  ///< Compute type, as attention takes them.
  void* values = nullptr;
  std::int64_t capacity = 0;
  std::int64_t row = 0;  ///< cache_row().
};
/// Numbers from one position of a head to the next: a multiple of 16 bytes.
[[nodiscard]] std::int64_t cache_row(std::int64_t head_dim, bool bf16);

struct AppendArgs {
  const void* turned;  ///< [rows, (N + M) D]: queries, then keys, as attention takes them.
  const void* qkv;     ///< [rows, (N + 2M) D]: values behind queries and keys.
  CacheLayer cache;    ///< out: row r is at position first + r % positions of r / positions.
  std::int64_t rows, positions, first;
  std::int32_t heads, kv_heads, head_dim;
  bool bf16;
  cudaStream_t stream;
};
void append(const AppendArgs& args);

struct AttendArgs {
  /// [rows, (N + 2M) D] as products leave it: queries and keys are normalised and turned here, keys
  /// and values go into the cache. Needs `place`, and one row a sequence.
  const void* qkv = nullptr;
  const float* q_weight = nullptr;  ///< [D], or null: no norm.
  const float* k_weight = nullptr;
  const float* cosine = nullptr;  ///< [S, D/2].
  const float* sine = nullptr;
  float epsilon = 0;
  /// Or [rows, (N + M) D], with keys and values in the cache already.
  const void* turned = nullptr;

  CacheLayer cache{};
  const CachePlace* place = nullptr;  ///< Or null: `first`.
  /// Place and cache were complete before the stage in front of this one began: they are read while
  /// that one runs. With `qkv`.
  bool cache_is_older = false;
  std::int64_t first = 0;                ///< Row r is at position first + r % positions.
  std::int64_t rows = 0, positions = 1;  ///< Of sequence r / positions.
  std::int32_t heads = 0, kv_heads = 0, head_dim = 0;
  /// 1: `mixed` is written; more: of each split parts and stats, for row_product().
  std::int32_t splits = 1;
  void* mixed = nullptr;   ///< out [rows, N D] compute type.
  float* parts = nullptr;  ///< out [rows, N, splits, D]: sums over a split's positions.
  float* stats =
      nullptr;  ///< out [rows, N, splits, 2]: largest score times log2(e), sum of weights.
  bool bf16 = false;
  cudaStream_t stream = nullptr;
};
/// Each row's queries over all positions up to its own. A block has a sequence's head of keys, or a
/// stretch of its positions: neighbouring threads read a key, each some of its numbers. Bound by
/// the bytes of the cache.
void attend(const AttendArgs& args);
/// How many blocks share the positions of a row: few rows alone do not fill the GPU.
[[nodiscard]] std::int32_t attend_splits(std::int64_t rows, std::int32_t heads,
                                         std::int32_t kv_heads, std::int64_t capacity);

/// y = rows w^T of at most kFewRows rows: a warp reads one or two rows of weights and has all rows'
/// products with them. The rows are made by every block for itself.
struct RowProductArgs {
  // Either the norm of x + delta,
  const float* x = nullptr;     ///< [rows, in].
  const void* delta = nullptr;  ///< [rows, in] compute type, or null.
  float* sum = nullptr;         ///< out [rows, in] x + delta, not in place; or null.
  const float* norm_weight = nullptr;
  float epsilon = 0;
  // or what attend() leaves.
  const void* mixed = nullptr;
  const float* parts = nullptr;
  const float* stats = nullptr;
  std::int32_t splits = 1, heads = 0;

  const void* w = nullptr;     ///< [out, in] compute type.
  const float* add = nullptr;  ///< [rows, out], or null. Then y is f32.
  void* y = nullptr;           ///< out [rows, out].
  bool y_is_f32 = false;       ///< Else of the compute type.
  std::int64_t rows = 0, in = 0, out = 0;
  bool bf16 = false;
  cudaStream_t stream = nullptr;
};
/// in: a multiple of 16 bytes.
void row_product(const RowProductArgs& args);

struct NormRowsArgs {
  const float* x;  ///< [rows, size], size a multiple of 4.
  const float* weight;
  void* y;  ///< out [rows, size] compute type.
  std::int64_t rows, size;
  float epsilon;
  bool bf16;
  cudaStream_t stream;
};
/// As rms_norm(), a block a row.
void norm_rows(const NormRowsArgs& args);

/// Most experts, and of a row, of norm_route() and of a step that is one kernel.
inline constexpr std::int32_t kMostRouted = 256;
inline constexpr std::int32_t kMostChosen = 32;

struct NormRouteArgs {
  const float* x;               ///< [rows, size], size a multiple of 4.
  const void* delta = nullptr;  ///< [rows, size] compute type, or null: what is added to x first,
  float* sum = nullptr;         ///< out [rows, size]: the two, where there is a delta.
  const float* weight;
  void* y;               ///< out [rows, size] compute type.
  const float* gate;     ///< [experts, size].
  const float* bias;     ///< [experts] for the choice alone, or null.
  std::int32_t* expert;  ///< out [rows, top_k].
  float* share;          ///< out [rows, top_k].
  std::int64_t rows, size;
  std::int32_t experts, top_k;
  bool renormalize;
  float scale, epsilon;
  bool bf16;
  bool lets_next_begin = false;  ///< The stage behind touches only weights before its wait.
  cudaStream_t stream;
};
/// Numbers of a gate that a block reads in no time: 256 KB from the L2 cache.
inline constexpr std::int64_t kMostOfGate = 1 << 16;
/// norm_rows() of x or of x + delta, and route() of its rows by a TopKRouter's softmax, without
/// groups. For gates of up to kMostOfGate: a block has all experts of a row.
void norm_route(const NormRouteArgs& args);

/// A logit and whose it is; id INT_MAX: none yet, -1: one was not a number.
struct Best {
  float logit;
  std::int32_t id;
};

struct LikeliestArgs {
  const float* logits;  ///< [rows, vocabulary].
  std::int64_t rows, vocabulary;
  std::int32_t* ids;   ///< out [rows]: the next step's tokens.
  std::int32_t* told;  ///< out [ring, rows], of place `position % ring`; -1: not all are numbers.
  const CachePlace* place;  ///< Of the step that runs.
  std::int32_t ring;
  cudaStream_t stream;
};
/// The largest logit of each row, the lowest id of equal ones, as sample() at temperature 0.
void likeliest(const LikeliestArgs& args);

}  // namespace switchyard::models::gpu

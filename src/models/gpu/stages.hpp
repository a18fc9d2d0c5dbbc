#pragma once

// The layer functions of a model on a GPU, each forward and backward. What they compute is said in
// models/cpu/*.hpp; here is what differs: memory, types and orders of sums. All only enqueue, all
// memory is the device's, pointers are aligned to 16 bytes, no sum depends on who comes first.
// `bf16`: arrays of the compute type are bf16, else f32. All else is f32.

#include <cuda_runtime_api.h>

#include <cstdint>

namespace switchyard::models::gpu {

/// Widest row that the norms take, a multiple of 4.
inline constexpr std::int64_t kMaxHidden = 2048;
inline constexpr std::int64_t kMaxHeadDim = 128;

struct EmbedArgs {
  const std::int32_t* ids;  ///< [tokens].
  const float* table;       ///< [vocabulary, hidden].
  float* x;                 ///< out [tokens, hidden]; hidden a multiple of 4.
  std::int64_t tokens, vocabulary, hidden;
  cudaStream_t stream;
};
void embed(const EmbedArgs& args);

struct EmbedBackwardArgs {
  const std::int32_t* ids;
  const float* dx;  ///< [tokens, hidden].
  float* dtable;    ///< out [vocabulary, hidden].
  std::int64_t tokens, vocabulary, hidden;
  bool accumulate;
  cudaStream_t stream;
};
/// A block for each id (of more than 2048 for 64 of them) and 128 columns finds their tokens and
/// adds up the rows, in order: reads all ids once for each, and every row once.
void embed_backward(const EmbedBackwardArgs& args);

struct NormArgs {
  const float* x;     ///< [rows, size] the residual stream.
  const void* delta;  ///< [rows, size] compute type, added to it first; or null.
  float* sum;         ///< out [rows, size] x + delta; null without a delta.
  const float* weight;
  void* y;       ///< out [rows, size] compute type.
  float* scale;  ///< out [rows].
  std::int64_t rows, size;
  float epsilon;
  bool bf16;
  cudaStream_t stream;
};
void rms_norm(const NormArgs& args);

struct NormBackwardArgs {
  const float* x;  ///< As it was normalised: with the delta.
  const float* weight;
  const float* scale;
  const void* dy;   ///< [rows, size] compute type.
  float* dx;        ///< [rows, size]: the gradient is added to it; or written.
  bool add;         ///< To dx.
  void* dx_typed;   ///< out [rows, size] dx in the compute type; null: nobody wants it.
  float* dweight;   ///< out [size].
  bool accumulate;  ///< Of dweight.
  float* parts;     ///< norm_parts() floats to work in.
  std::int64_t rows, size;
  bool bf16;
  cudaStream_t stream;
};
[[nodiscard]] std::int64_t norm_parts(std::int64_t rows, std::int64_t size);
void rms_norm_backward(const NormBackwardArgs& args);

struct RopeArgs {
  const void* qkv;        ///< [rows, (N + 2M) D] compute type.
  const float* q_weight;  ///< [D], or null: no norm.
  const float* k_weight;
  const float* cosine;  ///< [S, D/2].
  const float* sine;
  void* turned;                  ///< out [rows, (N + M) D] compute type.
  float* scales;                 ///< out [rows, N + M]; null without a norm.
  std::int64_t rows, positions;  ///< Row r has position first + r % positions.
  std::int64_t first = 0;
  std::int32_t heads, kv_heads;
  std::int32_t head_dim;  ///< Even, at most kMaxHeadDim.
  float epsilon;
  bool bf16;
  cudaStream_t stream;
};
void rope(const RopeArgs& args);

struct RopeBackwardArgs {
  RopeArgs forward;  ///< `turned` is not read.
  void* dqkv;        ///< [rows, (N + 2M) D]: gradients of `turned` in, of q and k out.
  float* dq_weight;  ///< out [D], or null.
  float* dk_weight;
  bool accumulate;  ///< Of the weights'.
  float* parts;     ///< rope_parts() floats to work in.
};
[[nodiscard]] std::int64_t rope_parts(std::int64_t rows, std::int64_t head_dim);
void rope_backward(const RopeBackwardArgs& args);

/// Rows of heads: element d of head h at position i of sequence b is at
/// data[(b * positions + i) * row + h * D + d].
struct Heads {
  void* data = nullptr;  ///< Compute type; rows are multiples of 16 bytes.
  std::int64_t row = 0;
};

struct AttentionArgs {
  Heads q, k, v;  ///< [B, S, N | M | M, D].
  Heads out;      ///< [B, S, N, D].
  float* lse;     ///< out [B, N, S].
  std::int64_t batch, positions;
  std::int32_t heads, kv_heads, head_dim;
  bool bf16;  ///< Then D is 32, 64 or 128 (attention_takes).
  cudaStream_t stream;
  bool portable = false;  ///< Not by instructions that one kind of GPU alone has; for tests.
};
[[nodiscard]] bool attention_takes(std::int32_t head_dim, bool bf16);
/// In bf16 by tensor cores, probabilities rounded to bf16 for the second product (Dao et al.,
/// FlashAttention-2, arXiv:2307.08691); in f32 all in f32.
void attention(const AttentionArgs& args);

struct AttentionBackwardArgs {
  AttentionArgs forward;  ///< As it was, out and lse as it left them.
  Heads dout;             ///< [B, S, N, D].
  Heads dq, dk, dv;       ///< out.
  float* delta;           ///< [B, N, S] to work in.
};
/// dq by blocks of queries, dk and dv by blocks of keys: nothing is added up between blocks.
void attention_backward(const AttentionBackwardArgs& args);

struct CrossEntropyArgs {
  const float* logits;          ///< [rows, vocabulary].
  const std::int32_t* targets;  ///< [rows]; -1: none.
  std::int64_t rows, vocabulary;
  float* nll;          ///< out [rows].
  void* dlogits;       ///< out [rows, vocabulary] compute type; or null.
  const float* scale;  ///< Of the gradient, on the device.
  bool bf16;
  cudaStream_t stream;
};
void cross_entropy(const CrossEntropyArgs& args);
/// out = sum of x [count] in double, in a fixed order.
void sum_of(const float* x, std::int64_t count, double* out, cudaStream_t stream);

/// A run of one tensor's numbers, for a block.
struct Piece {
  std::int64_t first;  ///< A multiple of 4.
  std::int32_t size;
  std::int32_t decay;  ///< 1: weight decay is for it.
  std::int64_t value;  ///< Where its values are in AdamWArgs::p; -1: split, in typed and low.
};
inline constexpr std::int64_t kPiece = 16 << 10;

/// What a step is told, and what it leaves; on the device.
struct StepInputs {
  double learning_rate;
  double beta1, beta2, epsilon, weight_decay, clip;
};
struct StepFactors {
  std::int64_t steps;  ///< Done so far; counts up where the norm is finite.
  double norm;         ///< Of the last one's gradients before clipping.
  float clip, beta1, rest1, beta2, rest2, decay, rate, root, epsilon;
  std::int32_t apply;  ///< 0: the norm is not finite, nothing is changed.
};

/// sums[i] = the sum of squares of piece i's gradients.
void squares_of_pieces(const Piece* pieces, std::int64_t num_pieces, const float* g, double* sums,
                       cudaStream_t stream);

inline constexpr int kDoubleParts = 3;  ///< Floats that have a double's digits.
/// What ranks tell each other beside gradients, as floats that add up exactly: of each rank a sum
/// in three parts, among zeros of the others, and counts as SplitCount has them.
struct RankTotalsArgs {
  const double* squares;  ///< [num_squares] of what this rank alone has.
  std::int64_t num_squares;
  int rank, num_ranks;
  const std::int64_t* counts;  ///< [layers] of [experts], `stride` apart; layers 0: not wanted.
  std::int64_t layers, experts, stride;
  float* totals;  ///< out [rank_totals()].
  cudaStream_t stream;
};
[[nodiscard]] constexpr std::int64_t rank_totals(int num_ranks, std::int64_t counts) {
  return kDoubleParts * std::int64_t{num_ranks} + 2 * counts;
}
void make_rank_totals(const RankTotalsArgs& args);
/// counts [count] of sums over ranks of what make_rank_totals() has left.
void read_rank_counts(const float* totals, int num_ranks, std::int64_t count, std::int64_t* counts,
                      cudaStream_t stream);

struct AdamWArgs {
  const Piece* pieces;  ///< [num_pieces] of all tensors.
  std::int64_t num_pieces;
  std::int64_t num_normed;     ///< The first ones, whose squares are summed here;
  const float* rank_totals{};  ///< those of the others lie here, of all ranks; or null.
  int num_ranks = 1;
  float* p;        ///< Master values, by Piece::value,
  const float* g;  ///< and the others by Piece::first.
  float* m;
  float* v;
  void* typed;         ///< bf16 copies of p, or what split_floats() makes of it; or null.
  std::uint16_t* low;  ///< What these lack of values that are split; or null: none is.
  const StepInputs* inputs;
  StepFactors* factors;
  double* sums;  ///< [num_pieces] to work in.
  cudaStream_t stream;
};
/// The step of optimizer.hpp: norm, clipping, factors and update, in three launches. By bytes: 28
/// a parameter, split or not, 2 for a copy, 4 for the norm. Over ranks `num_normed` pieces are
/// those of tensors that all have alike.
void adamw(const AdamWArgs& args);
/// typed = p in bf16. @param count  A multiple of 4.
void to_bf16(const float* p, std::int64_t count, void* typed, cudaStream_t stream);
/// p as the nearest bf16 number, halves away from zero, and the lower 16 bits of p, whose highest
/// one says which way that was: all of its bits in four bytes. A NaN becomes a quiet one.
/// @param p  [count]. @param typed  out [count] bf16. @param low  out [count]. By bytes: 8 a
/// number.
void split_floats(const float* p, std::int64_t count, void* typed, std::uint16_t* low,
                  cudaStream_t stream);
/// p [count] of what split_floats() has made. By bytes likewise.
void join_floats(const void* typed, const std::uint16_t* low, std::int64_t count, float* p,
                 cudaStream_t stream);

struct CountArgs {
  const std::int32_t* expert;  ///< [assignments]; -1: none.
  const std::uint8_t* kept;    ///< [assignments], or null: all.
  std::int64_t assignments;
  std::int32_t experts;
  std::int64_t* counts;       ///< [E]: added to.
  std::int64_t* counts_kept;  ///< [E]: added to.
  cudaStream_t stream;
};
void count_experts(const CountArgs& args);
/// bias += rate * sign(mean - count), where factors->apply; as update_selection_bias().
void move_bias(const std::int64_t* counts, std::int32_t experts, double rate,
               const StepFactors* factors, float* bias, cudaStream_t stream);

}  // namespace switchyard::models::gpu

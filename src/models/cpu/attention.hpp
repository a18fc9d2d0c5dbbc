#pragma once

// Causal attention of grouped heads: out_i = sum over j <= i of softmax_j(q_i . k_j / sqrt(D)) v_j.
// A task is a head of keys in a sequence, with all heads of queries that share it.

#include <cstdint>

#include "switchyard/thread_pool.hpp"

namespace switchyard::models {

/// Rows of [heads, D] floats for each position of each sequence.
template <class T>
struct HeadRows {
  T* data = nullptr;
  std::int64_t row = 0;       ///< Floats from one position to the next.
  std::int64_t sequence = 0;  ///< Floats from one sequence to the next.

  [[nodiscard]] T* at(std::int64_t b, std::int64_t position) const {
    return data + b * sequence + position * row;
  }
};

struct AttentionShape {
  std::int64_t batch;     ///< B.
  std::int64_t queries;   ///< Of each sequence: its last positions.
  std::int64_t keys;      ///< >= queries.
  std::int64_t heads;     ///< N.
  std::int64_t kv_heads;  ///< M.
  std::int64_t head_dim;  ///< D.
};

struct AttentionArgs {
  AttentionShape shape;
  HeadRows<const float> q;  ///< [B, queries, N, D].
  HeadRows<const float> k;  ///< [B, keys, M, D].
  HeadRows<const float> v;  ///< [B, keys, M, D].
  HeadRows<float> out;      ///< [B, queries, N, D].
  float* lse;  ///< out [B, N, queries]: logarithm of each row's sum of exponentials; or null.
  ThreadPool* pool;
  // Forward alone:
  float scale = 0;          ///< Of scores; 0: 1 / sqrt(D).
  std::int64_t window = 0;  ///< Position i sees j > i - window; 0: all j <= i.
  const float* sinks =
      nullptr;  ///< [N] a logit beside each row's scores, without a value; or null.
};

/// No bits depend on how many queries a call has: those of a whole sequence at once are those of
/// one position after the other. Each sum runs over ascending keys. A window hides keys, and saves
/// no work.
/// Cost: 2 B N D queries keys operations (causal), by the kernels of the experts.
void attention(const AttentionArgs& args);

struct AttentionBackwardArgs {
  AttentionArgs forward;       ///< queries = keys; out and lse as it left them.
  HeadRows<const float> dout;  ///< [B, S, N, D].
  HeadRows<float> dq, dk, dv;  ///< out, of the shapes of q, k, v.
};

/// dv_j = sum_i p_ij dout_i; ds_ij = p_ij (dout_i . v_j - dout_i . out_i) / sqrt(D); dq_i = sum_j
/// ds_ij k_j; dk_j = sum_i ds_ij q_i. Probabilities are made again: nothing of S x S is kept.
/// Cost: 5 products where the forward has 2.
void attention_backward(const AttentionBackwardArgs& args);

}  // namespace switchyard::models

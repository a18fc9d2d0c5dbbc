#pragma once

// The rows of a block's tokens in combine, and how its warps share their pieces.

#include <algorithm>
#include <cstdint>

#include "combine/gpu/call.hpp"

namespace switchyard::combining {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kStages = 3;  // in flight
constexpr int kChunks = 2;  // of 16 bytes a lane
constexpr int kMaxBlockTokens = 64;

struct CombineParams {
  const void* rows;                  // [rows, H]
  void* sums;                        // [N, H], or [N * num_groups, H]
  const float* added;                // [N, H] or null
  const std::int32_t* expert_begin;  // [El+1]
  const float* row_weight;           // [rows]
  const std::int32_t* token_begin;   // [N+1]
  const std::int32_t* token_row;     // [N*K]
  std::int32_t num_tokens, hidden;
  std::int32_t tokens_per_block;
  std::int32_t pieces;            // of a token: one warp each at a time
  std::int32_t pieces_per_block;  // blocks along y share a token's
  std::int32_t num_groups, width;
  bool each_group;
  std::int32_t border[kMaxGroups];  // local expert at which group g + 1 begins
};

/// The rows of a block's tokens.
struct BlockRows {
  std::int32_t begin[kMaxBlockTokens + 1];  // into the lists below
  std::int32_t group_end[kMaxGroups];       // first row of the next group
  std::int32_t row[kMaxBlockRows];
  std::int32_t group[kMaxBlockRows];
  float weight[kMaxBlockRows];
};

/// Returns how many tokens the block has.
__device__ inline int load_block_rows(const CombineParams& p, int first_token, BlockRows& s) {
  const int thread = static_cast<int>(threadIdx.x);
  const int count = min(p.tokens_per_block, p.num_tokens - first_token);
  const int base = __ldg(p.token_begin + first_token);
  if (thread <= count) s.begin[thread] = __ldg(p.token_begin + first_token + thread) - base;
  if (thread < p.num_groups - 1) s.group_end[thread] = __ldg(p.expert_begin + p.border[thread]);
  __syncthreads();
  for (int i = thread; i < s.begin[count]; i += kThreads) {
    const int row = __ldg(p.token_row + base + i);
    s.row[i] = row;
    s.weight[i] = __ldg(p.row_weight + row);
    int group = 0;
    for (int g = 0; g < p.num_groups - 1; ++g) group += row >= s.group_end[g] ? 1 : 0;
    s.group[i] = group;
  }
  __syncthreads();
  return count;
}

/// A stage of a warp's work: some rows of a piece of a token.
struct Cursor {
  int piece, token;
  int next, end;  // rows of the token, in the block's list

  __device__ __forceinline__ void open(const BlockRows& s) {
    next = s.begin[token];
    end = s.begin[token + 1];
  }
};

/// How the warps of a block share its pieces of tokens: a warp keeps to its piece as long as it
/// can.
struct Share {
  int pieces, tokens;  // of the block
  int first_token, token_step, piece_step;

  __device__ __forceinline__ Share(int block_pieces, int block_tokens)
      : pieces(block_pieces), tokens(block_tokens) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int warps_a_piece = max(1, kWarps / pieces);
    piece_step = kWarps;
    token_step = warps_a_piece;
    first_token = warp / pieces;
    if (pieces >= kWarps) first_token = 0;
  }
  [[nodiscard]] __device__ __forceinline__ Cursor start(const BlockRows& s) const {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    Cursor cursor{.piece = pieces >= kWarps ? warp : warp % pieces,
                  .token = first_token,
                  .next = 0,
                  .end = 0};
    // Warps beyond the last whole share have nothing.
    if (first_token >= token_step) cursor.piece = pieces;
    settle(cursor, s);
    return cursor;
  }
  __device__ __forceinline__ void advance(Cursor& cursor, const BlockRows& s) const {
    cursor.token += token_step;
    settle(cursor, s);
  }
  [[nodiscard]] __device__ __forceinline__ bool done(const Cursor& cursor) const {
    return cursor.piece >= pieces;
  }

 private:
  __device__ __forceinline__ void settle(Cursor& cursor, const BlockRows& s) const {
    if (cursor.token >= tokens) {
      cursor.token = first_token;
      cursor.piece += piece_step;
      if (cursor.token >= tokens) cursor.piece = pieces;
    }
    if (cursor.piece < pieces) cursor.open(s);
  }
};

}  // namespace switchyard::combining

#pragma once

// What the two streaming kernels are given, host and device alike.

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "experts/gpu/streaming/streaming.hpp"
#include "plan/gpu/plan_params.hpp"

namespace switchyard::streaming {

/// Warps that multiply; of codes, which take so many instructions, more where a block has the
/// registers of an SM.
inline constexpr int kFewConsumers = 8;
inline constexpr int kManyConsumers = 16;
/// With two that fill the ring and one that finishes.
constexpr int threads_of_block(int consumers) { return 32 * (consumers + 3); }
inline constexpr int kMaxRingStages = 24;
inline constexpr int kRingBarrierBytes = 512;
inline constexpr int kClaimBytes = 128;
inline constexpr int kPieceLevels = 4;
inline constexpr int kRingPartBytes = 2 * 32 * 16;  // for each consumer

/// How much of each weight row one stage takes: less, the more token rows share the stage.
struct Pieces {
  int bytes[kPieceLevels];      // falling; multiples of 64 (of codes: of a turn), of a token row
  int count[kPieceLevels];      // pieces of a row
  int tokens_at[kPieceLevels];  // where the token rows begin in a stage
  int stage_bytes;
  int num_stages;
  int lead_stages;
};

struct UpArgs {
  CUtensorMap w13_map[kPieceLevels];  // [E or 2E, I, H] in boxes of a tile's rows by a piece
  const std::byte* x;                 // [N, H]
  const std::byte* w13;               // [E, 2I or I, H]
  const float* b13;                   // [E, 2I or I] or null
  void* act;                          // [max_rows, I]
  const std::int32_t* expert_begin;
  const std::int32_t* expert_rows;
  const std::int32_t* row_token;  // [max_rows]; null: row r of x is row r of the plan
  int num_experts;
  int max_rows;
  int hidden;
  int inner;
  bool gated;
  bool plan_is_older;
  Activation activation;
  float alpha;
  float limit;
  int pass_rows;  // of one hit, at most
  Pieces pieces;
  int hits_at;  // offsets in shared memory
  int tokens_at;
  int parts_at;
  int ring_at;
  const float* scales13;  // of codes: StreamingParams::scales13
};

struct DownArgs {
  // [E, H, I] in boxes of a tile's rows by a piece: tiles have few_rows rows or one more.
  CUtensorMap w2_map[2][kPieceLevels];
  int few_rows;
  int tiles_per_block;
  const std::byte* act;  // [max_rows, I]
  const std::byte* w2;   // [E, H, I]
  const float* b2;       // [E, H] or null
  void* sums;            // [N, H] or [N * num_groups, H]
  const std::int32_t* expert_begin;
  const std::int32_t* expert_rows;
  const float* row_weight;
  const std::int32_t* token_begin;  // [N+1]
  const std::int32_t* token_row;
  int num_experts;
  int num_tokens;
  int hidden;
  int inner;
  int pass_rows;  // of one hit, at most
  DType sums_dtype;
  ReductionOrder order;
  int first_expert;
  int first_group;
  int num_groups;
  bool each_group;
  Pieces pieces;
  int hits_at;  // offsets in shared memory
  int parts_at;
  int groups_at;
  int begins_at;
  int terms_at;
  int y_at;
  int ring_at;
  // Far from what a block reads first: kernels' arguments are cold at every launch.
  PlanReport report;
  const DeviceStatus* status;
  const float* scales2;  // of codes
};

/// Both kernels in one: they share the ring and the offsets of what they share.
struct WholeArgs {
  UpArgs up;
  DownArgs down;
  StreamingSync* sync;
  int claims_at;
  // The kernel makes the plan of a few assignments: each block for itself, the first for others.
  bool makes_plan;
  planning::PlanParams plan;
  int experts_at;
};

}  // namespace switchyard::streaming

#pragma once

// What the kernels of plan are given, host and device alike.

#include <cstdint>

#include "core/gpu/stage_workspace.hpp"
#include "switchyard/device.hpp"
#include "switchyard/plan.hpp"

namespace switchyard::planning {

struct PlanParams {
  const std::int32_t* expert;  // [N, K]
  const float* weight;         // [N, K]
  const std::uint8_t* kept;    // [N, K] or null
  std::int32_t* expert_begin;  // [El+1]
  std::int32_t* expert_rows;   // [El]
  std::int32_t* row_token;     // [rows]
  float* row_weight;           // [rows]
  std::int32_t* token_begin;   // [N+1]
  std::int32_t* token_row;     // [N*K]
  StageWorkspace* workspace;
  std::uint32_t* counts;  // [blocks, El]
  DeviceStatus* status;   // or null
  std::int32_t num_tokens, top_k, num_experts, first_expert, total_experts;
  std::int32_t tokens_per_block;
  LayoutKind layout;
  std::uint32_t alignment;  // kAligned
  std::uint32_t capacity;   // rows an expert may have
};

}  // namespace switchyard::planning

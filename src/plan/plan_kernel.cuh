#pragma once

// What the kernels of plan share: their parameters, and one thread's assignment.

#include <cuda_runtime.h>

#include <cstdint>

#include "core/stage_workspace.hpp"
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

/// One thread's assignment.
struct Item {
  int index;   // token * K + k
  int expert;  // local, or -1
  float weight;
};

__device__ __forceinline__ Item load_item(const PlanParams& p, int index, bool inside) {
  Item item{.index = index, .expert = -1, .weight = 0.0F};
  if (!inside) return item;
  const int id = p.expert[index];
  item.weight = p.weight[index];
  const bool kept = p.kept == nullptr || p.kept[index] != 0;
  const bool bad = p.total_experts > 0 && (id < -1 || id >= p.total_experts);
  const int local = id - p.first_expert;
  if (!bad && kept && id >= 0 && local >= 0 && local < p.num_experts) item.expert = local;
  return item;
}

__device__ __forceinline__ void count_bad_id(const PlanParams& p, int index, bool inside) {
  if (p.total_experts == 0 || p.status == nullptr || !inside) return;
  const int id = p.expert[index];
  if (id < -1 || id >= p.total_experts) atomicAdd(&p.status->bad_ids, 1U);
}

/// Both in one pass.
__device__ __forceinline__ Item load_item_once(const PlanParams& p, int index, bool inside) {
  Item item{.index = index, .expert = -1, .weight = 0.0F};
  if (!inside) return item;
  const int id = p.expert[index];
  item.weight = p.weight[index];
  const bool kept = p.kept == nullptr || p.kept[index] != 0;
  const bool bad = p.total_experts > 0 && (id < -1 || id >= p.total_experts);
  if (bad && p.status != nullptr) atomicAdd(&p.status->bad_ids, 1U);
  const int local = id - p.first_expert;
  if (!bad && kept && id >= 0 && local >= 0 && local < p.num_experts) item.expert = local;
  return item;
}

}  // namespace switchyard::planning

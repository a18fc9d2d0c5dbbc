#pragma once

// What the kernels of plan share: one thread's assignment.

#include <cuda_runtime.h>

#include <cstdint>

#include "plan/gpu/plan_params.hpp"

namespace switchyard::planning {

/// One thread's assignment.
struct Item {
  int index;   // token * K + k
  int expert;  // local, or -1
  float weight;
};

/// @tparam kCountBad  Also count an id that no layer has: once for each assignment.
template <bool kCountBad = false>
__device__ __forceinline__ Item load_item(const PlanParams& p, int index, bool inside) {
  Item item{.index = index, .expert = -1, .weight = 0.0F};
  if (!inside) return item;
  const int id = p.expert[index];
  item.weight = p.weight[index];
  const bool kept = p.kept == nullptr || p.kept[index] != 0;
  const bool bad = p.total_experts > 0 && (id < -1 || id >= p.total_experts);
  if (kCountBad && bad && p.status != nullptr) atomicAdd(&p.status->bad_ids, 1U);
  const int local = id - p.first_expert;
  if (!bad && kept && id >= 0 && local >= 0 && local < p.num_experts) item.expert = local;
  return item;
}

__device__ __forceinline__ void count_bad_id(const PlanParams& p, int index, bool inside) {
  if (p.total_experts == 0 || p.status == nullptr || !inside) return;
  const int id = p.expert[index];
  if (id < -1 || id >= p.total_experts) atomicAdd(&p.status->bad_ids, 1U);
}

}  // namespace switchyard::planning

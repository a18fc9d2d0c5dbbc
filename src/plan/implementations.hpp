#pragma once

#include <bit>
#include <cstdint>

#include "core/select.hpp"
#include "switchyard/pack.hpp"
#include "switchyard/plan.hpp"

namespace switchyard {

extern const Implementation<CapacityArgs> kCapacityCpu;
extern const Implementation<PlanArgs> kPlanCpu;
extern const Implementation<PackArgs> kPackCpu;
#ifdef SWITCHYARD_WITH_CUDA
extern const Implementation<CapacityArgs> kCapacityCuda;
extern const Implementation<CapacityArgs> kCapacityCudaList;
extern const Implementation<PlanArgs> kPlanCudaFew;
extern const Implementation<PlanArgs> kPlanCudaTiles;
extern const Implementation<PlanArgs> kPlanCudaCounting;
extern const Implementation<PlanArgs> kPlanCudaList;
extern const Implementation<PackArgs> kPackCuda;

/// Bytes of Execution::workspace that each needs on the current device. Of a list of assignments:
/// the plan by plan_list_workspace_bytes, the capacity as of so many tokens with one expert each.
[[nodiscard]] std::int64_t plan_workspace_bytes(std::int64_t max_tokens, std::int64_t top_k,
                                                std::int64_t num_experts);
[[nodiscard]] std::int64_t plan_list_workspace_bytes(std::int64_t max_assignments,
                                                     std::int64_t num_experts);
[[nodiscard]] std::int64_t capacity_workspace_bytes(std::int64_t max_tokens, std::int64_t top_k,
                                                    std::int64_t num_experts);
#endif

/// A float as an integer that sorts as it does; both zeros are one. NaNs sort beyond infinity.
[[nodiscard]] constexpr std::uint32_t sort_key(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value + 0.0F);  // -0 + 0 = +0
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

}  // namespace switchyard

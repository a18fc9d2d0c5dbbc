#pragma once

#include "core/select.hpp"
#include "mixing/slot_groups.hpp"
#include "switchyard/routing/soft_moe.hpp"

namespace switchyard {

extern const Implementation<SoftMoeArgs> kSoftMoeCpu;
extern const Implementation<SoftMoeBackwardArgs> kSoftMoeBackwardCpu;

#ifdef SWITCHYARD_WITH_CUDA
extern const Implementation<SoftMoeArgs> kSoftMoeCuda;
extern const Implementation<SoftMoeBackwardArgs> kSoftMoeBackwardCuda;

namespace mixing {

/// What they need as Execution::workspace.
[[nodiscard]] std::int64_t forward_workspace_bytes(const ExpertWeights& weights,
                                                   const SlotGroups& groups);
[[nodiscard]] std::int64_t backward_workspace_bytes(const ExpertWeights& weights,
                                                    const SlotGroups& groups);

}  // namespace mixing
#endif

}  // namespace switchyard

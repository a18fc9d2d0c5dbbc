#pragma once

// The ways to run the experts; experts.cpp has the list.

#include <memory>

#include "core/select.hpp"
#include "switchyard/experts.hpp"

namespace switchyard {

extern const Implementation<ExpertsArgs> kExpertsCpuGrouped;   ///< kCompact: used rows only.
extern const Implementation<ExpertsArgs> kExpertsCpuBlocks;    ///< kAligned: whole blocks.
extern const Implementation<ExpertsArgs> kExpertsCpuBatched;   ///< kPadded: all C rows.
extern const Implementation<ExpertsArgs> kExpertsCudaDecode;   ///< Few rows, combined; f32 too.
extern const Implementation<ExpertsArgs> kExpertsCudaGrouped;  ///< Many rows, 16 bits, any layout.

std::unique_ptr<ExpertWeights> load_experts_cpu(const LoadExpertsArgs& args);
std::unique_ptr<ExpertWeights> load_experts_cuda(const LoadExpertsArgs& args);

}  // namespace switchyard

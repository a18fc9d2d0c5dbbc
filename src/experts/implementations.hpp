#pragma once

// The ways to run the experts; experts.cpp has the list.

#include <memory>

#include "core/select.hpp"
#include "switchyard/backward.hpp"
#include "switchyard/experts.hpp"

namespace switchyard {

extern const Implementation<ExpertsArgs> kExpertsCpuGrouped;     ///< kCompact: used rows only.
extern const Implementation<ExpertsArgs> kExpertsCpuBlocks;      ///< kAligned: whole blocks.
extern const Implementation<ExpertsArgs> kExpertsCpuBatched;     ///< kPadded: all C rows.
extern const Implementation<ExpertsArgs> kExpertsCudaStreaming;  ///< Few rows, combined.
// Many rows, any layout.
extern const Implementation<ExpertsArgs> kExpertsCudaGroupedSm90;  ///< 16 bits.
extern const Implementation<ExpertsArgs> kExpertsCudaGroupedSm80;
extern const Implementation<ExpertsArgs> kExpertsCudaGroupedSm80Flat;  ///< In 98 KB a block.
extern const Implementation<ExpertsArgs> kExpertsCudaGroupedF32Sm90;   ///< f32, in three products.
extern const Implementation<ExpertsArgs> kExpertsCudaGroupedF32;
extern const Implementation<ExpertsArgs> kExpertsCudaCoded;     ///< Of stored weights, as codes.
extern const Implementation<ExpertsArgs> kExpertsCudaExpanded;  ///< Of stored weights, as numbers.
extern const Implementation<ExpertsArgs> kExpertsCudaFp8;       ///< Of e4m3 rows and weights.

/// Any layout: its used rows.
extern const Implementation<ExpertsBackwardArgs> kExpertsBackwardCpu;
extern const Implementation<ExpertsBackwardArgs> kExpertsBackwardGpuSm90;  ///< 16 bits.
extern const Implementation<ExpertsBackwardArgs> kExpertsBackwardGpu;

/// As experts(); false, and nothing is done, where no implementation takes these arguments.
[[nodiscard]] bool try_experts(const ExpertsArgs& args);

std::unique_ptr<ExpertWeights> load_experts_cpu(const LoadExpertsArgs& args);
std::unique_ptr<ExpertWeights> load_experts_cuda(const LoadExpertsArgs& args);

/// Packs anew, where they lie, weights that were loaded with these arguments: the source's values
/// have changed. Fresh memory would cost more than the packing. What throws leaves neither the old
/// weights nor the new ones.
void reload_experts_cpu(const LoadExpertsArgs& args, ExpertWeights& weights);

}  // namespace switchyard

#pragma once

#include "switchyard/dispatch.hpp"

namespace switchyard {

/// The type on the way to the experts.
[[nodiscard]] DType dispatch_wire_of(const ExpertParallelConfig& config);

/// Raised when what ranks say to each other changes.
inline constexpr std::int64_t kProtocolVersion = 1;

/// Collective: all ranks have the same configuration, and it is a possible one. In this order, so
/// that all ranks refuse a bad value together. @param version  That this rank speaks.
void require_same_config(Communicator& communicator, const ExpertParallelConfig& config,
                         std::int64_t version = kProtocolVersion);
void check_config(const ExpertParallelConfig& config, int num_ranks);

/// Ids in -1 to num_experts - 1, and no weight of a used one is NaN; [T, K].
void check_assignments(Matrix<const std::int32_t> expert, Matrix<const float> weight,
                       std::int32_t num_experts);
/// What a call must satisfy before anything is sent.
void check_dispatch(const DispatchArgs& args, const ExpertParallelConfig& config);

}  // namespace switchyard

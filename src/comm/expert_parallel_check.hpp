#pragma once

#include "switchyard/expert_parallel.hpp"

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

/// What a call must satisfy before anything is sent.
void check_dispatch(const DispatchArgs& args, const ExpertParallelConfig& config);

}  // namespace switchyard

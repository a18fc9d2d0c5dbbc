#pragma once

// A model over ranks: whose experts a rank has, and what the ranks tell each other besides what
// their MoE layers do.

#include <memory>

#include "models/parameters.hpp"
#include "switchyard/experts.hpp"
#include "switchyard/models/model.hpp"

namespace switchyard::models {

/// The communicator where there is more than one rank; else null.
[[nodiscard]] Communicator* ranks_of(const ModelOptions& options);

/// The routed experts of this rank: all of them on one.
[[nodiscard]] ExpertShare experts_of(const ModelConfig& config, const ModelOptions& options);

/// As make_memory_source(), of arrays that have these experts alone.
[[nodiscard]] std::unique_ptr<ExpertSource> make_share_source(const ExpertConfig& config,
                                                              ExpertShare share, const float* w13,
                                                              const float* w2);

/// What one call has said, of this rank's tokens or of all ranks'.
struct CallSums {
  double nll = 0;            ///< Nats.
  double router_losses = 0;  ///< Unscaled.
  std::vector<RoutingStats> layers{};
};

/// Of kLossValues doubles, as a layer leaves them.
[[nodiscard]] inline LossValues loss_values(const double* values) {
  return {.balance = values[0],
          .z = values[1],
          .importance = values[2],
          .device = values[3],
          .communication = values[4],
          .entropy = values[5],
          .total = values[6]};
}

/// Collective: from a rank's to those of all. Losses become means over ranks, all else sums in the
/// order of ranks: the same bits on all.
void add_over_ranks(Communicator& ranks, CallSums& sums);

/// Adds a call to a step's statistics, its losses to the mean of `calls`.
void add_call(const CallSums& call, std::int32_t calls, std::vector<RoutingStats>& layers);
}  // namespace switchyard::models

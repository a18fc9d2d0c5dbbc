#pragma once

#include "layer/saved_forward.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {

/// route_at_once(), with the sums of losses where there are any.
void route_with_losses(const RouteAtOnceArgs& args, const LossConfig& config,
                       SavedForward::State& saved);

/// Of a routing that was just saved: sums, values of losses, and their prices, in the memory of
/// `saved`. Nothing where there are no losses, or the routing was given.
void save_losses(const RouterConfig& router, const LossConfig& config, const Execution& execution,
                 SavedForward::State& saved);

/// What these take of a forward's memory, where it is made before (SavedMemory::kLosses,
/// kLossWorkspace and kChainLosses).
struct LossBytes {
  std::int64_t sums = 0, workspace = 0, of_chain = 0;
};
/// For calls of up to so many tokens.
[[nodiscard]] LossBytes most_loss_bytes(const LossConfig& config, std::int64_t num_tokens,
                                        std::int64_t num_experts);

/// Room for what the losses of all iterations come to, as `part`'s shapes have it: values and
/// counts.
[[nodiscard]] SavedForward::State::Losses room_for_chain_losses(SavedForward::State& part);

/// What route_backward() takes of them.
[[nodiscard]] LossPrices prices_of_losses(const BackwardArgs& args, const LossConfig& config,
                                          const Execution& execution,
                                          const SavedForward::State& saved);

}  // namespace switchyard

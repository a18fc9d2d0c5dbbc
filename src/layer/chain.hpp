#pragma once

#include <memory>

#include "layer/chain_sums.hpp"
#include "layer/layer_runner.hpp"

namespace switchyard {

/// Chain-of-Experts: `layer` run by its iterations, with the gates, biases and options of `model`.
/// @param layer  With the gates of all iterations; its own configuration has no chain.
/// @param counts_at_once  Its counts are of its last forward when that returns; else of all
///        iterations of the last call with check().
std::unique_ptr<LayerRunner> make_chain_layer(std::unique_ptr<LayerRunner> layer,
                                              const ChainConfig& chain,
                                              std::unique_ptr<ChainSums> sums, bool counts_at_once);

/// Of a call, and of its backward: what has no meaning with as many routings as iterations.
/// @throws Error{kInvalidArgument}.
void check_chain_call(const ForwardArgs& args, const RouterConfig& router);
void check_chain_call(const BackwardArgs& args, const RouterConfig& router,
                      const LossConfig& losses, bool over_ranks);

}  // namespace switchyard

#pragma once

#include "switchyard/layer.hpp"

namespace switchyard {

/// All of the contract of a call before anything is written or used up.
/// @param losses      Of the layer.
/// @param over_ranks  The layer is shared by more than one.
/// @throws Error{kInvalidArgument}, as MoeLayer::backward() says.
void check_backward(const BackwardArgs& args, const LayerConfig& config, const LossConfig& losses,
                    const ExpertWeights& experts, DType compute, bool over_ranks);

}  // namespace switchyard

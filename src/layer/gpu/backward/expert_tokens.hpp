#pragma once

#include "layer/gpu/expert_tokens.hpp"

namespace switchyard {

/// The way back of weights [T, 1] on the input: `dx` [T, H], the gradient of the tokens times their
/// weights, becomes that of the tokens; `dweight` [T, 1], or empty, is its product with the tokens.
void weighted_backward_on_gpu(ConstRawMatrix tokens, Matrix<const float> weight, Matrix<float> dx,
                              Matrix<float> dweight, const Execution& execution);

}  // namespace switchyard

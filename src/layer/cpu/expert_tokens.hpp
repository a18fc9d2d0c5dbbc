#pragma once

#include "layer/cpu/buffers.hpp"
#include "layer/cpu/router.hpp"

namespace switchyard {

/// A rank's tokens on their way to the experts, with buffers that are kept from
/// call to call. What is returned is valid until the next call of the same name.
class ExpertTokens {
 public:
  /// LayerConfig::weight_on_input: each token times its weight, which is then 1. Reports "pack".
  Assignments weighted(const Assignments& work, const Execution& execution);

  /// What a dispatch in the type `wire` leaves of the tokens. Reports "dequantize" where that is
  /// not all of them.
  ConstRawMatrix crossed(ConstRawMatrix tokens, DType wire, const Execution& execution);

 private:
  RawBuffer weighted_, crossed_;
  ArrayBuffer<float> ones_, wide_;
};

/// The way back of weighted(): `dx` [T, H], the gradient of the tokens times their weights [T, 1],
/// becomes that of the tokens; `dweight` [T, 1], or empty, is its product with the tokens.
void weighted_backward(ConstRawMatrix tokens, Matrix<const float> weight, Matrix<float> dx,
                       Matrix<float> dweight, const Execution& execution);

}  // namespace switchyard

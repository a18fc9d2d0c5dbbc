#pragma once

#include "layer/cpu/buffers.hpp"
#include "layer/cpu/router.hpp"

namespace switchyard {

/// A rank's tokens on their way to the experts, and around them; with buffers that are kept from
/// call to call. What is returned is valid until the next call of the same name.
class ExpertTokens {
 public:
  /// LayerConfig::weight_on_input: each token times its weight, which is then 1. Reports "pack".
  Assignments weighted(const Assignments& work, const Execution& execution);

  /// What a dispatch in the type `wire` leaves of the tokens. Reports "dequantize" where that is
  /// not all of them.
  ConstRawMatrix crossed(ConstRawMatrix tokens, DType wire, const Execution& execution);

  /// LayerConfig::identity_experts: [T, H] `shared` (none: +0), and to it each token times its
  /// `identity_weight`, by fma. Reports "shared".
  Matrix<const float> around(ConstRawMatrix tokens, Vector<const float> identity_weight,
                             Matrix<const float> shared, const Execution& execution);

 private:
  RawBuffer weighted_, crossed_;
  ArrayBuffer<float> ones_, wide_, around_;
};

}  // namespace switchyard

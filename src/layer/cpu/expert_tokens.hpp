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

/// The way back of weighted(): `dx` [T, H], the gradient of the tokens times their weights [T, 1],
/// becomes that of the tokens; `dweight` [T, 1], or empty, is its product with the tokens.
void weighted_backward(ConstRawMatrix tokens, Matrix<const float> weight, Matrix<float> dx,
                       Matrix<float> dweight, const Execution& execution);

/// What goes back through experts that return their input.
struct IdentityBackward {
  ConstRawMatrix tokens{};                ///< [T, H] compute type, as is
  ConstRawMatrix dout{};                  ///< [T, H].
  Matrix<const std::int32_t> expert{};    ///< [T, K] as chosen,
  std::int32_t first_identity = 0;        ///< from here on such experts,
  Vector<const float> identity_weight{};  ///< [T] and the sums of their weights.
  Matrix<float> dweight{};                ///< out [T, K], theirs alone; or empty.
  Matrix<float> dtokens{};                ///< out [T, H] what they say of the tokens; or empty.
};
void identity_backward(const IdentityBackward& args, const Execution& execution);

}  // namespace switchyard

#pragma once

#include "switchyard/plan.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

/// What came back for each row of a plan, by rows, to the choice that the row was made for.
struct ChoiceGradientsArgs {
  PlanView plan{};
  Matrix<const std::int32_t> expert{};  ///< [T, K] as planned; -1: unused.
  Matrix<const std::uint8_t> kept{};    ///< [T, K], or empty: all.
  Vector<const float> drow_weight{};    ///< [rows of the layout].
  Matrix<float> dweight{};              ///< out [T, K]; 0 where unused or dropped.
  std::int32_t num_experts = 0;         ///< On a GPU: ids from here on have no rows either.
};

/// Cost: K^2 comparisons a token.
void give_choice_gradients(const ChoiceGradientsArgs& args);

}  // namespace switchyard

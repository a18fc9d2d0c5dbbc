#pragma once

#include "switchyard/experts.hpp"

namespace switchyard {

/// An expert's activation as kernels take it.
struct ActivationParams {
  Activation kind = Activation::kSilu;
  float alpha = 0;
  float limit = 0;
};

}  // namespace switchyard

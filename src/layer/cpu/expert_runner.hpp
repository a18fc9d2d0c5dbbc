#pragma once

#include "layer/cpu/buffers.hpp"
#include "switchyard/experts.hpp"

namespace switchyard {

/// From rows and a plan to weighted sums, by the path of the layout: compact gathers and combines
/// inside the experts where it can; aligned and padded pack, run the experts and combine.
class ExpertRunner {
 public:
  struct Args {
    const ExpertWeights* weights = nullptr;
    PlanView plan{};
    Layout layout{};
    ConstRawMatrix x{};     ///< [N, H] compute type.
    ReducedRows reduced{};  ///< out.
    Execution execution{};
  };
  void run(const Args& args);

 private:
  RawBuffer packed_;
  RawBuffer rows_;
};

}  // namespace switchyard

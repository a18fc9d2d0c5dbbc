#pragma once

#include <memory>

#include "switchyard/execution.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard::bench {

/// A dense product of 8192^3, one at a time between runs of something else. A GPU's clocks follow
/// the power drawn over tenths of a second: a rate measured by itself, from a cool start, was up to
/// a quarter above what the same card kept up beside the work.
class DenseBeside {
 public:
  virtual ~DenseBeside() = default;
  virtual void run() = 0;  ///< Waits for it.
  /// Operations per second of the median. @throws Error{kInvalidArgument}: it never ran.
  [[nodiscard]] virtual double flops() const = 0;
};

/// Null on a CPU. The operands are random and of `dtype`, the sums f32.
[[nodiscard]] std::unique_ptr<DenseBeside> make_dense_beside(Backend backend, DType dtype);

}  // namespace switchyard::bench

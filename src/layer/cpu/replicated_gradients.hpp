#pragma once

#include <cstdint>

#include "comm/host/gradient_exchange.hpp"
#include "layer/cpu/buffers.hpp"
#include "layer/replicated_parts.hpp"

namespace switchyard {

/// Gradients of the parameters that every rank has alike: each rank makes its tokens' part in f32;
/// the sum over ranks is what is written or added, with the same bits on every rank.
class ReplicatedGradients {
 public:
  /// The arguments with f32 memory of this object in place of the caller's, to be written.
  [[nodiscard]] BackwardArgs parts_of(const BackwardArgs& args);
  /// Which of them are wanted, a bit for each.
  [[nodiscard]] std::uint64_t wanted() const { return parts_.wanted(); }
  /// Collective: from the parts to the caller's memory.
  void add_up(GradientExchange& ranks, bool accumulate, const Execution& execution);

 private:
  ArrayBuffer<float> values_;
  ReplicatedParts parts_;
};

}  // namespace switchyard

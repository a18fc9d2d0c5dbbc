#pragma once

#include <cstdint>
#include <vector>

#include "comm/host/gradient_exchange.hpp"
#include "layer/cpu/buffers.hpp"
#include "switchyard/backward.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {

/// Values of all parameters that every rank has alike: the router's and the shared experts'.
[[nodiscard]] std::int64_t most_replicated_values(const LayerConfig& config);

/// Gradients of those: each rank makes its tokens' part in f32; the sum over ranks is what is
/// written or added, with the same bits on every rank.
class ReplicatedGradients {
 public:
  /// The arguments with f32 memory of this object in place of the caller's, to be written.
  [[nodiscard]] BackwardArgs parts_of(const BackwardArgs& args);
  /// Which of them are wanted, a bit for each.
  [[nodiscard]] std::uint64_t wanted() const { return wanted_; }
  /// Collective: from the parts to the caller's memory.
  void add_up(GradientExchange& ranks, bool accumulate, const Execution& execution);

 private:
  struct Piece {
    std::int64_t begin = 0;
    std::int64_t count = 0;
    DType dtype = DType::kF32;
    void* out = nullptr;
  };
  ArrayBuffer<float> parts_;
  std::vector<Piece> pieces_;
  std::uint64_t wanted_ = 0;
};

}  // namespace switchyard

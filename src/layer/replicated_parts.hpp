#pragma once

#include <cstdint>
#include <vector>

#include "switchyard/backward.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {

/// Gradients of the parameters that every rank has alike, the router's and the shared experts': a
/// rank makes its tokens' part in f32, one behind the other, and ranks add these up.
class ReplicatedParts {
 public:
  struct Piece {
    std::int64_t begin = 0;  ///< Among all values; a multiple of kAlignment.
    std::int64_t count = 0;
    DType dtype = DType::kF32;
    void* out = nullptr;  ///< Where the caller wants the sum.
  };
  static constexpr std::int64_t kAlignment = 32;  ///< Values: GPUs move 16 bytes at a time.

  /// Of what `args` asks for.
  void lay_out(const BackwardArgs& args);
  /// The same arguments with `memory` [total()] in place of the caller's, to be written.
  [[nodiscard]] BackwardArgs in(float* memory, const BackwardArgs& args) const;

  [[nodiscard]] const std::vector<Piece>& pieces() const { return pieces_; }
  /// Values, with what lies unused between them.
  [[nodiscard]] std::int64_t total() const { return total_; }
  /// Which are asked for, a bit for each.
  [[nodiscard]] std::uint64_t wanted() const { return wanted_; }
  /// total() where all are.
  [[nodiscard]] static std::int64_t most(const LayerConfig& config);

 private:
  std::vector<Piece> pieces_;
  std::int64_t total_ = 0;
  std::uint64_t wanted_ = 0;
};

}  // namespace switchyard

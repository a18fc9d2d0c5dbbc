#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>

#include "bench/cases/cases.hpp"
#include "bench/cases/synthetic.hpp"

namespace switchyard::bench {

/// What a torch process is to time, on the data that ours had.
struct TorchWork {
  const char* work = "";  ///< "select", "pack", "layer" or "naive"; tools/peers/torch_peer.py.
  const LayerCase& c;
  ConstRawMatrix tokens{};  ///< [T, H], in host memory.
  const SyntheticRouting& routing;
  std::span<const float> gate{};  ///< [E, H].
};

/// torch in a Python process of its own, asked between our own runs.
class TorchPeer {
 public:
  /// Starts `python3` of PATH.
  /// @throws Error{kUnsupported}: no python3, no torch in it, or no GPU for it.
  explicit TorchPeer(Backend backend);
  ~TorchPeer();
  TorchPeer(const TorchPeer&) = delete;
  TorchPeer& operator=(const TorchPeer&) = delete;

  [[nodiscard]] const std::string& version() const;  ///< "2.11.0".

  /// Puts torch's medians beside ours: result.torch_us by stage, and `torch` with its version in
  /// `more`. A work that torch cannot do leaves its reason there. Nothing for no token.
  /// @throws Error{kTimeout}, {kIo}: the process does not answer, or is gone.
  void measure(const TorchWork& work, CaseResult& result);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Bar `bar`: torch's time for the experts and the combine over ours, both with the plan made.
/// Ours is by events, torch's by a graph. Nothing where torch was not measured.
void judge_against_torch(const std::string& bar, double target, CaseResult& result);

}  // namespace switchyard::bench

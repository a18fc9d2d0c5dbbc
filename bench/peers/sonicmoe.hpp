#pragma once

#include <memory>
#include <string>

#include "bench/cases/cases.hpp"

namespace switchyard::bench {

/// SonicMoE in a Python process, in turns there with this library's layer (through its Python
/// package) and a dense product: tools/peers/sonicmoe_peer.py.
class SonicmoePeer {
 public:
  /// Starts `python3` of PATH.
  /// @throws Error{kUnsupported}: no python3; in it no torch with a GPU, sonicmoe or switchyard.
  SonicmoePeer();
  ~SonicmoePeer();
  SonicmoePeer(const SonicmoePeer&) = delete;
  SonicmoePeer& operator=(const SonicmoePeer&) = delete;

  /// Measures a layer of these sizes, its forward or, with Pass::kBoth, forward and backward; a
  /// skew "zipf:X" by a router that is tilted so. Judges it: peers["sonicmoe"], and in `more` what
  /// both took (`sonicmoe`), `bar`, `value` (SonicMoE's time over ours), `target`, `holds`. A shape
  /// that cannot be measured leaves its reason in `sonicmoe` and no answer to the bar.
  /// @throws Error{kTimeout}, {kIo}: the process does not answer, or is gone.
  void measure(const LayerCase& c, CaseResult& result);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace switchyard::bench

#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "bench/cases/cases.hpp"

namespace switchyard::bench {

/// A program for experts as they are stored, in a Python process, in turns there with this library
/// (through its Python package): tools/peers/stored_peer.py says what both do.
class StoredPeer {
 public:
  /// Starts `python3` of PATH.
  /// @param name  Of the peer: "triton-mxfp4" (weights in MXFP4) or "deepgemm" (in e4m3).
  /// @throws Error{kUnsupported}: no python3; in it no torch with a GPU, no such peer or no
  /// switchyard.
  explicit StoredPeer(std::string name);
  ~StoredPeer();
  StoredPeer(const StoredPeer&) = delete;
  StoredPeer& operator=(const StoredPeer&) = delete;

  /// Measures experts of these sizes: peers[name], and in `more` under the name what both took,
  /// `ratio` (the peer's time over ours) and what differed, or why it cannot be measured (`error`).
  /// @throws Error{kTimeout}, {kIo}: the process does not answer, or is gone.
  void measure(const LayerCase& c, CaseResult& result);

  /// Whether a peer of this class is called so.
  [[nodiscard]] static bool has(std::string_view name);
  /// What its weights are stored in. @pre has(name).
  [[nodiscard]] static WeightFormat format_of(std::string_view name);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace switchyard::bench

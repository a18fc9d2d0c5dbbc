#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include "switchyard/comm.hpp"
#include "switchyard/cpu_isa.hpp"
#include "switchyard/execution.hpp"
#include "verify/run_backward.hpp"
#include "verify/run_layer.hpp"
#include "verify/stage_checks.hpp"

namespace switchyard::verify {

/// Which way through a layer is checked.
enum class Pass : std::uint8_t { kForward, kBackward, kBoth };

/// "forward", "backward", "both".
[[nodiscard]] const char* to_string(Pass pass) noexcept;

/// What `switchyard verify` is asked for.
struct VerifyOptions {
  std::int64_t cases = 1000;
  std::uint64_t seed = 17;
  std::vector<int> ranks{1, 2, 3, 4, 5, 8};  ///< Each case takes one.
  std::vector<int> threads{1, 2};            ///< Per rank; each case takes one.
  std::vector<CpuIsa> isas{};                ///< CPU: in turn; empty: all that can be used here.
  Backend backend = Backend::kCpu;
  DeviceEngine device_engine = DeviceEngine::kAuto;
  /// Random cases without a way back (weights that are not exact, errors, over nccl-pairs) go
  /// forward alone.
  Pass pass = Pass::kForward;
  /// The router of all cases, as it is spelled, or "all": each by name in turn. Empty: mostly
  /// top-k.
  std::string router{};
  /// Of all cases; empty: mostly exact. On CUDA those with codes are for bf16; q8: CPU.
  std::optional<WeightFormat> weights{};
  bool fp8_rows = false;    ///< Of all cases; with weights of e4m3 on CUDA.
  std::string case_json{};  ///< This one case instead of random ones.
  std::int64_t soak = 0;    ///< So many exchanges on one set of objects: this instead of cases.
  std::string fault{};      ///< absent, late, throw, corrupt-count: this instead of cases.
  std::chrono::milliseconds timeout{
      10000};         ///< Of the waits between ranks; a fault's: at most 1 s, on GPUs 4 s.
  bool json = false;  ///< One JSON object instead of words.
  /// Null: ranks are threads. Else this process's rank among those of a launcher; rank 0 prints.
  Communicator* world = nullptr;
  /// With `world`, collective: the first so many of its ranks; null on the others.
  std::function<Communicator*(int)> first_ranks{};
  int workers = 0;  ///< Cases at a time; 0: one for each core.
  /// Called with the cases done and their number, now and then, and at last with two equal numbers,
  /// before anything is printed; may be empty.
  std::function<void(std::int64_t, std::int64_t)> progress{};
  LayerRunner run = run_layer;  ///< What runs the layers of the cases.
  BackwardRunner run_backward = verify::run_backward;
  StageCalls stages{};  ///< And the stages called by themselves.
};

/// Check random layers, one case or one fault against the reference. On a miss prints what is wrong
/// and one line that reproduces it.
/// @returns 0: all holds; 1: a miss.
/// @throws Error{kInvalidArgument}: a case or fault that is not one; {kUnsupported}: a pass that
/// the
///         case, the backend or all numbers of ranks do not have.
int run_verify(const VerifyOptions& options, std::ostream& out);

}  // namespace switchyard::verify

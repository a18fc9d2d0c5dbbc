#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "switchyard/backward.hpp"
#include "switchyard/comm.hpp"
#include "switchyard/error.hpp"
#include "verify/problem.hpp"

namespace switchyard::verify {

/// One gradient of a layer, of type `dtype`, as the caller of backward() holds it.
struct GradientArray {
  std::string name{};
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  DType dtype = DType::kF32;
  bool of_parameter = true;        ///< Added to what is there where `accumulate` says so.
  std::vector<std::byte> bytes{};  ///< [rows, cols]; empty: not asked for.
};

/// A way back through the layer of a problem: what is asked for, all made of the case's seed.
struct BackwardProblem {
  Recompute recompute = Recompute::kNone;
  bool accumulate = false;
  DType dout_type = DType::kF32;
  std::vector<float> dout{};     ///< [T, H], values of dout_type.
  std::vector<float> dlogits{};  ///< [T, E] of auxiliary losses, or empty, as for a chain.
  /// In the order of `Gradient`, with what is in them before.
  std::vector<GradientArray> gradients{};
};

/// Places in BackwardProblem::gradients.
enum class Gradient : std::uint8_t {
  kTokens,
  kWeight,
  kGate,
  kRouterBias,
  kW13,
  kW2,
  kB13,
  kB2,
  kSharedW13,
  kSharedW2,
  kSharedB13,
  kSharedB2,
  kSharedGate,
  kNoiseGate,
  kNetwork,
  kConstantExperts,
  kGatingResidual,
  kPreviousLogits,
};

/// Whether there is a way back through such a layer: of exact weights, of a forward that does not
/// fail.
[[nodiscard]] bool has_backward(const Case& test);

[[nodiscard]] BackwardProblem make_backward_problem(const Problem& problem);

/// All gradients that a layer has, in f32, each asked for.
[[nodiscard]] std::vector<GradientArray> all_gradients(const Case& test);

/// What a forward that keeps something and its backward gave, put together from all ranks.
struct BackwardResult {
  std::vector<std::byte> out{};        ///< [T, H] of the forward,
  std::vector<std::byte> plain_out{};  ///< and of one that keeps nothing, between the two.
  RoutingRecord record{};
  std::vector<GradientArray> gradients{};
  std::string apart{};  ///< A gradient that has other bits on some rank than on rank 0; or empty.
  std::optional<Error> error{};  ///< What was thrown, instead of results.
};

/// How it is run, on as many ranks as the case says.
struct BackwardRun {
  int threads = 1;
  Backend backend = Backend::kCpu;
  DeviceEngine device_engine = DeviceEngine::kAuto;
  std::chrono::milliseconds timeout{30000};
  /// Null: ranks are threads. Else this process is one of them, and only rank 0 has a result.
  Communicator* group = nullptr;
};

[[nodiscard]] BackwardResult run_backward(const Problem& problem, const BackwardProblem& backward,
                                          const BackwardRun& run);

/// run_backward(), or what a test of the checks puts in its place: one that errs.
using BackwardRunner =
    std::function<BackwardResult(const Problem&, const BackwardProblem&, const BackwardRun&)>;

}  // namespace switchyard::verify

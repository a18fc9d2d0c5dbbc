#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "switchyard/error.hpp"
#include "switchyard/layer.hpp"
#include "verify/problem.hpp"

namespace switchyard::verify {

/// How a problem is run, apart from what its case says.
struct RunArgs {
  int threads = 1;
  std::vector<std::int64_t> rank_begin{};  ///< [R+1] tokens of each rank; need not start at 0.
  int calls = 1;                           ///< Forward calls on one layer; the last one counts.
  Backend backend = Backend::kCpu;
  DeviceEngine device_engine = DeviceEngine::kAuto;
  std::chrono::milliseconds timeout{30000};
  /// Null: ranks are threads. Else this process is one of the ranks: the result is that of all on
  /// rank 0; elsewhere `error` alone is right, in whether there is one.
  Communicator* group = nullptr;
};

/// What one rank saw.
struct RankResult {
  std::vector<std::byte> out{};  ///< [T, H] of its tokens.
  RoutingRecord record{};
  Traffic traffic{};
  std::int64_t rows_used = 0;
  std::int64_t rows_executed = 0;
};

struct RunResult {
  std::vector<RankResult> ranks{};
  std::optional<Error> error{};  ///< What forward threw, instead of results.
};

[[nodiscard]] LayerOptions options_of(const Case& test, const RunArgs& args);

[[nodiscard]] RunResult run_layer(const Problem& problem, const RunArgs& args);

/// run_layer(), or what a test of the checks puts in its place: one that errs.
using LayerRunner = std::function<RunResult(const Problem&, const RunArgs&)>;

}  // namespace switchyard::verify

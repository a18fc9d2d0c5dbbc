#pragma once

#include <cstddef>
#include <vector>

#include "switchyard/perft.hpp"
#include "testkit/call_memory.hpp"
#include "verify/run_backward.hpp"

namespace switchyard::verify {

// `adapters` is the problem of a layer of plain experts on one rank: A their first matrices, B
// times the adapters' scale their second ones. The scale is a power of two, so that what the
// adapters compute is exactly that. Where is_merged(), all of them are one expert of width M r.

/// Whether a backend has them as one product.
[[nodiscard]] bool is_merged(const PerftConfig& config, Backend backend);

/// The adapters that are such a layer.
[[nodiscard]] PerftModel model_of(const Problem& adapters, const PerftConfig& config);

/// A forward of the tokens [begin, end), but for its output. What it reads lies where `memory` puts
/// it, for as long as both live.
class PerftCall {
 public:
  PerftCall(const Problem& adapters, const PerftConfig& config, std::int64_t begin,
            std::int64_t end, CallMemory& memory);
  PerftCall(const PerftCall&) = delete;
  PerftCall& operator=(const PerftCall&) = delete;

  PerftForwardArgs args{};

 private:
  std::vector<std::byte> x_, expert_{}, weight_{};
};

/// Forward and back over `ranks` ranks, put together as one rank's.
[[nodiscard]] BackwardResult run_perft(const Problem& adapters, const PerftConfig& config,
                                       const BackwardProblem& backward, const BackwardRun& run,
                                       int ranks);

}  // namespace switchyard::verify

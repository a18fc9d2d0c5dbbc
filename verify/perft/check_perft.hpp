#pragma once

#include <string>

#include "switchyard/perft.hpp"
#include "verify/verify.hpp"

namespace switchyard::verify {

/// @throws Error{kInvalidArgument}: use_perft() takes no such spelling.
void check_perft_spelling(const std::string& spelling);

/// Draws what the spelling of a case's adapters does not say, and writes it there; takes out of the
/// case what has no output.
void use_perft(Case& test, const std::string& spelling, std::uint64_t seed, std::uint64_t index);

/// The adapters of a case, beside its layer. @throws Error{kInvalidArgument}.
[[nodiscard]] inline PerftConfig perft_of(const Case& test) {
  return parse_perft(test.router,
                     {.hidden = test.layer.experts.hidden, .router = test.layer.router});
}

/// What runs adapters both ways, over the ranks of the case: run_perft(), or one that errs.
using PerftRunner =
    std::function<BackwardResult(const Problem& adapters, const PerftConfig& config,
                                 const BackwardProblem& backward, const BackwardRun& run)>;

/// Adapters beside the layer of the case, which is frozen: they are a layer of plain experts, so
/// their problem is one too, with the adapters' scale in B. Its forward and its backward are held
/// as any layer's are; then their sum with the layer's output by bits. Ranks are threads. Empty if
/// all holds, else the first thing that does not.
[[nodiscard]] std::string check_perft(const Problem& problem, const VerifyOptions& options,
                                      const PerftRunner& run = {});

}  // namespace switchyard::verify

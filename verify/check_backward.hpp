#pragma once

#include <string>

#include "verify/run_backward.hpp"

namespace switchyard::verify {

/// Runs the layer forward and back and compares every gradient that is asked for with the
/// reference; then once more with another number of threads and the other Recompute, for the same
/// bits; and of ranks whose number does not show in the bits, on one. Of a case that
/// has_backward(). Empty if all holds, else the first thing that does not. Of processes, rank 0
/// compares.
/// @param how  Its threads are those of the case instead.
[[nodiscard]] std::string check_backward(const Problem& problem, const BackwardRunner& run,
                                         BackwardRun how = {});
/// The same of another way back than make_backward_problem() makes.
[[nodiscard]] std::string check_backward(const Problem& problem, const BackwardProblem& backward,
                                         const BackwardRunner& run, BackwardRun how = {});

/// Of check_backward() what is a chain's: its gradients against those of its iterations.
[[nodiscard]] std::string check_chain_gradients(const Problem& problem,
                                                const BackwardProblem& backward,
                                                const BackwardResult& result,
                                                const BackwardRunner& run, const BackwardRun& how);

}  // namespace switchyard::verify

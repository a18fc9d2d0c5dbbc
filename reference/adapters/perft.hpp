#pragma once

#include <cstdint>
#include <vector>

#include "switchyard/perft.hpp"

// PERFT by its definition, in double, without a rounding in between. Gradients are held by
// differences of this; bounds of each number are those of a layer of plain experts (layer.hpp).

namespace switchyard::reference {

struct PerftProblem {
  PerftConfig config{};  ///< Routed: by top-k softmax.
  std::int64_t num_tokens = 0;
  std::vector<double> x{};     ///< [T, H].
  std::vector<double> base{};  ///< [T, H].
  std::vector<double> a{};     ///< [M, r, H].
  std::vector<double> b{};     ///< [M, H, r].
  std::vector<double> gate{};  ///< Routed: [M, H].
  /// Embedded: [T, K], -1 unused. Routed: the choice, which is a constant; empty: it is made.
  std::vector<std::int32_t> expert{};
  std::vector<double> weight{};  ///< Embedded: [T, K].
};

struct PerftResult {
  std::vector<double> y{};             ///< [T, H].
  std::vector<std::int32_t> expert{};  ///< Routed: [T, K] as it was chosen.
};

PerftResult perft(const PerftProblem& problem);

}  // namespace switchyard::reference

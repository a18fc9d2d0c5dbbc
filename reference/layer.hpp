#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "reference/bounded.hpp"
#include "reference/expert.hpp"
#include "switchyard/layer.hpp"

namespace switchyard::reference {

/// Which rows of experts become e4m3.
enum class Fp8Rows : std::uint8_t {
  kNone,
  kAll,
  kPerhaps,  ///< As the kernels like it that run.
};

/// What of a layer's way to run shows in its numbers.
struct LayerRun {
  Precision precision{};
  std::int32_t ranks = 1;
  DType wire = DType::kF32;     ///< Of the ranks' partial sums; does nothing on one rank ...
  bool rank_invariant = false;  ///< ... unless every group's partial is rounded to it.
  /// Of the tokens on the way to the experts, own ones too; empty: as they are computed with.
  std::optional<DType> dispatch_wire{};
  Fp8Rows fp8_rows = Fp8Rows::kNone;  ///< CUDA, of gated experts that are stored in e4m3.
  bool round_rows = false;            ///< CUDA: an expert's row is rounded to the compute type ...
  double row_scale = 1;               ///< ... before it is multiplied by this, which w2 has in it.
};

/// Who does what, as some implementation has decided it.
struct Assignments {
  std::span<const std::int32_t> expert{};  ///< [T, K], -1 where unused.
  std::span<const float> weight{};         ///< [T, K].
  std::span<const std::uint8_t> kept{};    ///< [T, K], or empty: all.
  std::int64_t top_k = 0;                  ///< K.
};

/// [T, H] the tokens that the experts take: as computed with, times their weights [T, 1] where
/// these are on the input, and what the dispatch wire leaves of that.
std::vector<double> expert_tokens(const LayerModel& model, const LayerRun& run,
                                  std::span<const double> tokens, std::span<const float> weight);

/// [H] the gate of the shared experts, empty where they have none.
/// @throws std::invalid_argument: not f32 in host memory.
std::vector<double> shared_gate(const LayerModel& model);

/// What the shared experts' output of token x [H] is multiplied by: 1, or sigmoid(x . shared_gate).
Bounded shared_factor(const LayerModel& model, std::span<const double> x);

/// [T, H] the layer's output before it is rounded to its type, for tokens [T, H] as computed with.
std::vector<Bounded> layer_output(const LayerModel& model, const LayerRun& run,
                                  std::span<const double> tokens, const Assignments& assignments);

/// Empty if each element of `out` [T, H] of type `dtype` lies within its bound; else the first that
/// does not.
std::string check_output(std::span<const Bounded> expected, std::int64_t hidden, DType dtype,
                         std::span<const float> out);

}  // namespace switchyard::reference

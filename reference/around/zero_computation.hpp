#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "reference/layer.hpp"

// Zero-computation experts by their definition (ZeroComputationExperts).

namespace switchyard::reference {

/// What an expert's output counts of its token and of a vector of its own, x [H] -> a1 x + a2 v.
struct ZeroComputationShares {
  Bounded of_token{};
  Bounded of_vector{};
};
ZeroComputationShares zero_computation_shares(const LayerModel& model, std::int32_t expert,
                                              std::span<const double> x);

/// Of the constant expert `expert` rows of W, 0 and 1, or v, 2: [H].
/// @throws std::invalid_argument: not f32 in host memory.
std::vector<double> constant_row(const LayerModel& model, std::int32_t expert, int part);

/// Whether an id is that of a constant expert.
bool is_constant(const LayerModel& model, std::int32_t expert);

/// Adds to `out` [T, H] what picks of such experts give to tokens [T, H].
void add_zero_computation(const LayerModel& model, std::span<const double> tokens,
                          const Assignments& assignments, std::vector<Bounded>& out);

/// Adds the gradients of picks of such experts to those of weights [T, K] and tokens [T, H].
/// @returns that of LayerModel::constant_experts.
std::vector<Bounded> zero_computation_gradient(
    const LayerModel& model, std::span<const double> tokens, const Assignments& assignments,
    std::span<const double> dout, std::vector<Bounded>& dweight, std::vector<BoundedSum>& dtokens);

}  // namespace switchyard::reference

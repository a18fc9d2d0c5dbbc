#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "switchyard/layer.hpp"
#include "verify/case.hpp"
#include "verify/plain_source.hpp"

namespace switchyard::verify {

/// The numbers of a case.
struct Problem {
  Case test{};
  LayerModel model{};
  std::vector<float> tokens{};               ///< [T, H], values of the tokens' type.
  std::vector<std::int32_t> given_expert{};  ///< [T, K] where the routing is given.
  std::vector<std::int32_t> token_ids{};     ///< [T] of a text, made up.
  std::vector<float> given_weight{};         ///< [T, K].
  std::vector<float> previous_logits{};      ///< [T, E] of a gating residual; else empty.
};

[[nodiscard]] Problem make_problem(const Case& test);

/// What the router of the tokens [begin, end), which are a rank's, draws upon. Views of `problem`.
[[nodiscard]] RouteRequest request_of(const Problem& problem, std::int64_t begin, std::int64_t end);

/// Values of `dtype` as the library takes them, and back.
[[nodiscard]] std::vector<std::byte> encode(DType dtype, std::span<const float> values);
[[nodiscard]] std::vector<float> decode(DType dtype, std::span<const std::byte> bytes);

}  // namespace switchyard::verify

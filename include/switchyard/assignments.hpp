#pragma once

#include <cstdint>
#include <variant>

#include "switchyard/tensor.hpp"

namespace switchyard {

/// Who works on what, as `route` writes it: K places for each token.
struct DenseAssignments {
  Matrix<const std::int32_t> expert{};  ///< [T, K] ids, -1 where unused.
  Matrix<const float> weight{};         ///< [T, K].
};

/// Any number of experts a token, none and all of them included: what expert choice, top-p and hash
/// routers give.
struct AssignmentList {
  /// [T+1] from 0, ascending, to A: token t has the assignments [token_begin[t],
  /// token_begin[t+1]), in the order of its choice where it has one.
  Vector<const std::int32_t> token_begin{};
  Vector<const std::int32_t> expert{};  ///< [A] ids, -1 where unused.
  Vector<const float> weight{};         ///< [A].
};

using AnyAssignments = std::variant<DenseAssignments, AssignmentList>;

/// T.
[[nodiscard]] constexpr std::int64_t num_tokens(const DenseAssignments& dense) {
  return dense.expert.shape[0];
}
[[nodiscard]] constexpr std::int64_t num_tokens(const AssignmentList& list) {
  return list.token_begin.shape[0] - 1;
}
/// T * K, or A.
[[nodiscard]] constexpr std::int64_t num_assignments(const DenseAssignments& dense) {
  return dense.expert.size();
}
[[nodiscard]] constexpr std::int64_t num_assignments(const AssignmentList& list) {
  return list.expert.size();
}
[[nodiscard]] inline std::int64_t num_tokens(const AnyAssignments& any) {
  return std::visit([](const auto& shape) { return num_tokens(shape); }, any);
}
[[nodiscard]] inline std::int64_t num_assignments(const AnyAssignments& any) {
  return std::visit([](const auto& shape) { return num_assignments(shape); }, any);
}

/// A matrix as one vector, row after row: what there is of each assignment of a dense routing.
template <typename T>
[[nodiscard]] constexpr Vector<T> flat(const Matrix<T>& matrix) {
  return {matrix.data, {matrix.size()}};
}

}  // namespace switchyard

#pragma once

// What both ways of Soft-MoE on a GPU do alike: pieces of the workspace, and dense products. In
// bf16 these are cuBLASLt's, of weights that are rounded to bf16 as well; else, and where that is
// not here, the router's: fp32 to the last places on tensor cores, for any number of rows.

#include <algorithm>
#include <cstddef>
#include <initializer_list>

#include "core/gpu/cuda_check.hpp"
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/stage_workspace.hpp"
#include "experts/raw_matrix.hpp"
#include "mixing/gpu/places.hpp"
#include "mixing/rows_of.hpp"
#include "switchyard/backward.hpp"
#include "switchyard/route.hpp"

namespace switchyard::mixing {

[[nodiscard]] inline bool all_aligned_16(std::initializer_list<const void*> pointers) {
  for (const void* const pointer : pointers) {
    if (!is_aligned_16(pointer)) return false;
  }
  return true;
}

class Call {
 public:
  Call(const char* name, const Execution& execution, const CommonPlaces& places, std::int64_t bytes)
      : execution_(execution), places_(places) {
    require(execution.workspace != nullptr && bytes <= execution.workspace_bytes,
            "{} needs {} bytes of workspace, has {}", name, bytes, execution.workspace_bytes);
    require(reinterpret_cast<std::uintptr_t>(execution.workspace) % Division::kAlignment == 0,
            "{}'s workspace is not aligned to {} bytes", name, Division::kAlignment);
  }

  [[nodiscard]] cudaStream_t stream() const { return static_cast<cudaStream_t>(execution_.stream); }
  [[nodiscard]] std::byte* data(const Piece& piece) const {
    return static_cast<std::byte*>(execution_.workspace) + piece.at;
  }
  [[nodiscard]] float* floats(const Piece& piece) const {
    return reinterpret_cast<float*>(data(piece));
  }
  [[nodiscard]] Matrix<float> floats(const Piece& piece, std::int64_t rows,
                                     std::int64_t cols) const {
    return {floats(piece), {rows, cols}};
  }
  /// The call's, with a piece for a workspace.
  [[nodiscard]] Execution with(const Piece& piece) const {
    Execution execution = execution_;
    execution.workspace = data(piece);
    execution.workspace_bytes = piece.bytes;
    return execution;
  }

  /// Of what counters are zero at first.
  void zero(const Piece& piece, std::int64_t bytes) const {
    SWITCHYARD_CUDA(cudaMemsetAsync(
        data(piece), 0, static_cast<std::size_t>(std::min(bytes, piece.bytes)), stream()));
  }
  void zero_counters_of_products() const {
    zero(places_.gemm, std::int64_t{offsetof(StageWorkspace, plan_turn)});
  }

  [[nodiscard]] PlanView plan(const SlotGroups& groups) const {
    const std::int64_t rows = groups.num_sets() * groups.slots();
    const std::int64_t num_experts = groups.num_experts();
    const auto ints = [&](const Piece& piece, std::int64_t size) {
      return Vector<std::int32_t>{reinterpret_cast<std::int32_t*>(data(piece)), {size}};
    };
    return {.num_experts = static_cast<std::int32_t>(num_experts),
            .expert_begin = ints(places_.expert_begin, num_experts + 1),
            .expert_rows = ints(places_.expert_rows, num_experts),
            .row_token = ints(places_.row_token, rows),
            .row_weight = {floats(places_.row_weight), {rows}},
            .token_begin = ints(places_.token_begin, rows + 1),
            .token_row = ints(places_.token_row, rows),
            .most_rows = 1};
  }
  [[nodiscard]] ColumnSums column_sums() const {
    return {.largest = floats(places_.largest),
            .sum = floats(places_.sum),
            .chunk_largest = floats(places_.chunk_largest),
            .chunk_sum = floats(places_.chunk_sum)};
  }

  /// `matrix` where a product by rows of `left` takes it, else a copy in f32.
  [[nodiscard]] ConstRawMatrix as_right(ConstRawMatrix matrix, DType left,
                                        const Piece& memory) const {
    if (matrix.dtype == DType::kF32 || matrix.dtype == left) return matrix;
    widen_rows(matrix, floats(memory), stream());
    return {data(memory), DType::kF32, matrix.rows, matrix.cols};
  }

  /// Whether products of such rows [., H] with weights of so many slots are cuBLASLt's.
  [[nodiscard]] bool rounds(ConstRawMatrix rows, std::int64_t slots) const {
    return rows.dtype == DType::kBF16 && slots % 8 == 0 && places_.dense.bytes > 0;
  }
  /// out [M, N] = left [M, H] right^T, right [N, H] of f32 or left's type.
  void multiply(ConstRawMatrix left, ConstRawMatrix right, Matrix<float> out) const {
    if (left.rows == 0) return;
    if (right.dtype == DType::kBF16 && rounds(left, right.rows)) {
      shared_dense_products()->forward(dense(left), dense(right), {out.data, false}, left.rows,
                                       left.cols, right.rows, stream(), data(places_.dense));
      return;
    }
    router_gemm({.tokens = left,
                 .gate = right,
                 .gate_is_fresh = true,
                 .logits = out,
                 .execution = within_stage(places_.gemm)});
  }
  /// out [M, H] = weights [M, N] rows [N, H].
  void mix(Matrix<const float> weights, ConstRawMatrix rows, Matrix<float> out) const {
    if (weights.shape[0] == 0) return;
    if (rounds(rows, weights.shape[1])) return mix(rounded(weights), rows, out);
    if (is_better_turned(rows)) {
      turn(weights, floats(places_.turned), stream());
      collect(floats(places_.turned, weights.shape[1], weights.shape[0]), rows, raw(out));
      return;
    }
    router_gemm_backward({.tokens = nobody_reads(out.data, weights.shape[0], rows.cols),
                          .gate = rows,
                          .dlogits = weights,
                          .dtokens = out,
                          .execution = within_stage(places_.sums)});
  }
  /// The same of weights in bf16, for rows that rounds() them.
  void mix(ConstRawMatrix weights, ConstRawMatrix rows, Matrix<float> out) const {
    if (weights.rows == 0) return;
    shared_dense_products()->backward_input(dense(weights), dense(rows), {out.data, false},
                                            weights.rows, rows.cols, weights.cols, stream(),
                                            data(places_.dense));
  }
  /// out [N, H] = weights^T [M, N] rows [M, H], one rounding.
  void collect(Matrix<const float> weights, ConstRawMatrix rows, RawMatrix out,
               bool accumulate = false) const {
    if (rounds(rows, weights.shape[1]) && out.dtype != DType::kF16) {
      return collect(rounded(weights), rows, out, accumulate);
    }
    router_gemm_backward({.tokens = rows,
                          .gate = nobody_reads(out.data, weights.shape[1], rows.cols),
                          .dlogits = weights,
                          .dgate = out,
                          .accumulate = accumulate,
                          .execution = within_stage(places_.sums)});
  }
  /// The same of weights in bf16, for rows that rounds() them and an `out` of f32 or bf16.
  void collect(ConstRawMatrix weights, ConstRawMatrix rows, RawMatrix out,
               bool accumulate = false) const {
    shared_dense_products()->backward_weights(
        dense(weights), dense(rows), {out.data, out.dtype == DType::kBF16}, weights.rows, rows.cols,
        weights.cols, accumulate, stream(), data(places_.dense));
  }

 private:
  [[nodiscard]] static Dense dense(ConstRawMatrix matrix) {
    return {const_cast<std::byte*>(matrix.data), matrix.dtype == DType::kBF16};
  }
  [[nodiscard]] ConstRawMatrix rounded(Matrix<const float> weights) const {
    round_values(weights, data(places_.turned), stream());
    return {data(places_.turned), DType::kBF16, weights.shape[0], weights.shape[1]};
  }
  /// A stage has begun.
  [[nodiscard]] Execution within_stage(const Piece& piece) const {
    Execution execution = with(piece);
    execution.recorder = nullptr;
    execution.status = nullptr;
    return execution;
  }
  /// Of many rows Hopper's kernel for sums over tokens does what that for sums over experts has no
  /// shared memory for: a pass over the weights costs less than half of the tensor cores' rate.
  [[nodiscard]] bool is_better_turned(ConstRawMatrix rows) const {
    constexpr std::int64_t kMostRows = 384;
    return rows.dtype == DType::kBF16 && rows.rows > kMostRows &&
           device_attribute(cudaDevAttrComputeCapabilityMajor) == 9;
  }
  /// In the place of a factor of a product that nobody asks for.
  static ConstRawMatrix nobody_reads(const void* data, std::int64_t rows, std::int64_t cols) {
    return {static_cast<const std::byte*>(data), DType::kBF16, rows, cols};
  }

  const Execution& execution_;
  const CommonPlaces& places_;
};

}  // namespace switchyard::mixing

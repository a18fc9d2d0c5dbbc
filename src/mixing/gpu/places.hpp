#pragma once

// How the workspace of Soft-MoE on a GPU is divided. All of it is scratch of one call.

#include <algorithm>

#include "core/gpu/dense/products.hpp"
#include "experts/gpu/workspace.hpp"
#include "mixing/gpu/kernels.hpp"
#include "route/implementations.hpp"
#include "switchyard/device.hpp"

namespace switchyard::mixing {

/// Pieces of memory, each from a multiple of kAlignment bytes on.
class Division {
 public:
  static constexpr std::int64_t kAlignment = 256;

  [[nodiscard]] std::int64_t take(std::int64_t size) {
    const std::int64_t at = bytes_;
    bytes_ += (size + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  }
  [[nodiscard]] std::int64_t bytes() const { return bytes_; }

 private:
  std::int64_t bytes_ = 0;
};

/// A piece and its size.
struct Piece {
  std::int64_t at = 0, bytes = 0;

  Piece() = default;
  Piece(Division& division, std::int64_t size) : at(division.take(size)), bytes(size) {}
};

/// Whether rows of this type are multiplied by weights rounded to it, by cuBLASLt: as a dense
/// layer's are in bf16. Else weights are f32, in products of terms.
[[nodiscard]] inline bool rounds_weights(DType rows, std::int64_t slots) {
  return rows == DType::kBF16 && slots % 8 == 0 && shared_dense_products() != nullptr;
}

/// What both ways have.
struct CommonPlaces {
  Piece gemm;  ///< Of router_gemm(), whose counters are zero at first.
  Piece sums;  ///< Of router_gemm_backward().
  Piece expert_begin, expert_rows, row_token, row_weight, token_begin, token_row;
  Piece of_token, of_slot;  ///< 1 / length [T], [S].
  Piece phi;                ///< [S, H] f32, where its type goes with no product.
  Piece largest, sum, chunk_largest, chunk_sum;
  Piece weights;  ///< [T, S] D, then C, or the other way round.
  Piece turned;   ///< [S, T], or of a group, for a product; or weights rounded for one.
  Piece dense;    ///< Of DenseProducts.
  Piece rows;     ///< [B*S, H] f32 or compute type: by experts, before it is by sets.

  CommonPlaces(Division& division, const SlotGroups& groups, std::int64_t hidden,
               std::int64_t row_bytes, DType compute) {
    const std::int64_t tokens = groups.num_tokens(), slots = groups.slots();
    const std::int64_t num_rows = groups.num_sets() * slots, num_experts = groups.num_experts();
    const auto room = [&](std::int64_t size) { return Piece(division, size); };
    gemm = room(router_gemm_workspace_bytes(tokens, slots, hidden));
    const auto of_sums = [&](std::int64_t summed, std::int64_t rows_of_sum) {
      return router_gemm_backward_workspace_bytes(summed, rows_of_sum, hidden);
    };
    // No less for more that are summed; turned products sum over slots, of a group or of all.
    sums = room(std::max(
        {of_sums(tokens, slots), of_sums(slots, tokens), of_sums(slots, groups.tokens())}));
    expert_begin = room(4 * (num_experts + 1));
    expert_rows = room(4 * num_experts);
    row_token = room(4 * num_rows);
    row_weight = room(4 * num_rows);
    token_begin = room(4 * (num_rows + 1));
    token_row = room(4 * num_rows);
    of_token = room(4 * tokens);
    of_slot = room(4 * slots);
    phi = room(4 * slots * hidden);
    const std::int64_t columns = 4 * groups.count() * slots;
    const std::int64_t chunks = column_tiles(GroupShape(groups)).chunks;
    largest = room(columns);
    sum = room(columns);
    chunk_largest = room(chunks * columns);
    chunk_sum = room(chunks * columns);
    weights = room(4 * tokens * slots);
    turned = room(4 * tokens * slots);
    dense = room(rounds_weights(compute, slots) ? DenseProducts::kWorkspace : 0);
    rows = room(groups.num_sets() > 1 ? num_rows * row_bytes : 0);
  }
};

struct ForwardPlaces {
  Division division{};
  CommonPlaces common;
  Piece experts;
  Piece logits, slots, slot_outputs;  ///< Where they are not saved.
  Piece out;                          ///< [T, H] f32, before its rounding.
  std::int64_t bytes = 0;

  ForwardPlaces(const ExpertWeights& expert_weights, const SlotGroups& groups)
      : common(division, groups, expert_weights.config().hidden,
               expert_weights.config().hidden * size_of(expert_weights.dtype()),
               expert_weights.dtype()) {
    const std::int64_t tokens = groups.num_tokens(), hidden = expert_weights.config().hidden;
    const std::int64_t rows = groups.num_sets() * groups.slots();
    const std::int64_t row_bytes = rows * hidden * size_of(expert_weights.dtype());
    experts = Piece(division, experts_workspace_bytes(rows, expert_weights));
    logits = Piece(division, 4 * tokens * groups.slots());
    slots = Piece(division, row_bytes);
    slot_outputs = Piece(division, row_bytes);
    out = Piece(division, 4 * tokens * hidden);
    bytes = division.bytes();
  }
};

struct BackwardPlaces {
  Division division{};
  CommonPlaces common;
  Piece experts;
  Piece dslot_outputs;      ///< [B*S, H] compute type.
  Piece slot_outputs;       ///< [B*S, H] f32: the forward's where dout is of another type.
  Piece dslots;             ///< [B*S, H] f32.
  Piece dlogits, gradient;  ///< [T, S]
  Piece token_sums, token_parts, slot_sums, slot_parts;
  Piece dx, dx_of_slots;  ///< [T, H] f32: through the logits, and through what slots are made of.
  Piece dphi;             ///< [S, H] f32.
  std::int64_t bytes = 0;

  BackwardPlaces(const ExpertWeights& expert_weights, const SlotGroups& groups)
      : common(division, groups, expert_weights.config().hidden, 4 * expert_weights.config().hidden,
               expert_weights.dtype()) {
    const ExpertConfig& config = expert_weights.config();
    const std::int64_t tokens = groups.num_tokens(), slots = groups.slots();
    const std::int64_t hidden = config.hidden, rows = groups.num_sets() * slots;
    const ColumnTiles tiles = column_tiles(GroupShape(groups));
    experts = Piece(division, experts_backward_workspace_bytes(config, expert_weights.dtype(),
                                                               expert_weights.num_local(), rows));
    dslot_outputs = Piece(division, rows * hidden * size_of(expert_weights.dtype()));
    slot_outputs = Piece(division, 4 * rows * hidden);
    dslots = Piece(division, 4 * rows * hidden);
    dlogits = Piece(division, 4 * tokens * slots);
    gradient = Piece(division, 4 * tokens * slots);
    token_sums = Piece(division, 4 * tokens);
    token_parts = Piece(division, 4 * tokens * tiles.column_blocks);
    slot_sums = Piece(division, 4 * slots);
    slot_parts = Piece(division, 4 * groups.count() * tiles.chunks * slots);
    dx = Piece(division, 4 * tokens * hidden);
    dx_of_slots = Piece(division, 4 * tokens * hidden);
    dphi = Piece(division, 4 * slots * hidden);
    bytes = division.bytes();
  }
};

}  // namespace switchyard::mixing

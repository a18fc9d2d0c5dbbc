#pragma once

// Where the pieces lie in a block's shared memory.

#include <cstdint>

#include "experts/gpu/streaming/args.hpp"

namespace switchyard::streaming {

/// Offsets in a block's shared memory; the ring is last.
struct UpLayout {
  int hits, tokens, parts, ring;
};
struct DownLayout {
  int hits, parts, groups, begins, terms, y, ring;
};

struct WholeLayout {
  int claims, experts, up_hits, down_hits, tokens, parts, groups, begins, terms, y, ring;
};

/// Bytes of `rows` weight rows in a stage that has `piece` bytes of each token row, and the piece
/// of the next level: half, in whole steps (of codes: turns).
[[nodiscard]] std::int64_t weight_bytes(WeightFormat format, std::int64_t rows, std::int64_t piece);
[[nodiscard]] int next_piece(WeightFormat format, int piece);
/// Rows that lie together: what blocks and tiles of the second kernel are whole numbers of.
[[nodiscard]] int row_unit(WeightFormat format);
/// Most rows of a tile of the second kernel, which a stage has room for before its token rows:
/// exact rows are given out in equal parts, codes in full tiles and what is left.
[[nodiscard]] int down_tile_rows(const StreamingProblem& problem, int num_blocks, int tiles);

/// Most hits: one for every 64 rows of an expert.
[[nodiscard]] std::int64_t max_hits(const StreamingProblem& problem);
[[nodiscard]] UpLayout up_layout(const StreamingProblem& problem);
[[nodiscard]] DownLayout down_layout(const StreamingProblem& problem, int num_blocks);
[[nodiscard]] WholeLayout whole_layout(const StreamingProblem& problem, int num_blocks);

}  // namespace switchyard::streaming

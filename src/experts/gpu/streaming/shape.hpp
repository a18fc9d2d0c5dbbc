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

/// Most hits: one for every 64 rows of an expert.
[[nodiscard]] std::int64_t max_hits(const StreamingProblem& problem);
[[nodiscard]] UpLayout up_layout(const StreamingProblem& problem);
[[nodiscard]] DownLayout down_layout(const StreamingProblem& problem, int num_blocks);
[[nodiscard]] WholeLayout whole_layout(const StreamingProblem& problem, int num_blocks);

}  // namespace switchyard::streaming

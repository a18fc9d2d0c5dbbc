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
[[nodiscard]] std::int64_t max_hits(const StreamingParams& params);
[[nodiscard]] UpLayout up_layout(const StreamingParams& params);
[[nodiscard]] DownLayout down_layout(const StreamingParams& params, int num_blocks);
[[nodiscard]] WholeLayout whole_layout(const StreamingParams& params, int num_blocks);

}  // namespace switchyard::streaming

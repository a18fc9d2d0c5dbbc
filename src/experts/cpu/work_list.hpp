#pragma once

#include <algorithm>
#include <vector>

#include "experts/cpu/weights/weights.hpp"
#include "switchyard/experts.hpp"

namespace switchyard::cpu {

/// An expert with rows to work on.
struct ActiveExpert {
  std::int32_t expert;     ///< Local id.
  std::int64_t first_row;  ///< In the layout.
  std::int64_t used;       ///< Rows that somebody asked for; the rest is padding.
  RowBlocks blocks;
  std::int64_t place;  ///< Of its first row among the packed rows.
};

/// The experts that a plan hits and the rows worked on for them: the used ones, or with the aligned
/// and padded layouts all that the layout has.
struct WorkList {
  std::vector<ActiveExpert> active;
  std::int64_t places = 0;  ///< Rows of all, packed.
  std::int64_t used_rows = 0;
  std::int64_t rows = 0;

  void find(const ExpertsArgs& args, const Kernels& kernels) {
    *this = {.active = std::move(active)};
    active.clear();
    for (std::int32_t e = 0; e < args.plan.num_experts; ++e) {
      const std::int64_t used = args.plan.expert_rows[e];
      const std::int64_t first = args.plan.expert_begin[e];
      const std::int64_t all =
          args.layout.kind == LayoutKind::kCompact ? used : args.plan.expert_begin[e + 1] - first;
      if (all == 0) continue;
      const RowBlocks blocks = kernels.blocks(all);
      active.push_back({e, first, used, blocks, places});
      places += blocks.places();
      used_rows += used;
      rows += all;
    }
  }
};

}  // namespace switchyard::cpu

#include "experts/cpu/token_parts.hpp"

#include <algorithm>

namespace switchyard::cpu {
namespace {

constexpr std::int64_t kLeastTokens = 512;  ///< Of a part: 128 KiB of sums of 64 columns.
constexpr std::int64_t kLeastBlocks = 16;   ///< Of an expert in a part, on average: one is shared.

/// How many parts.
std::int64_t parts_of(const ExpertsArgs& args, const WorkList& work, const Kernels& kernels) {
  const std::int64_t tokens = args.plan.num_tokens();
  if (tokens < 2 * kLeastTokens || work.used_rows == 0) return 1;
  if (work.used_rows != work.rows || kernels.widen != nullptr) return 1;
  for (const ActiveExpert& active : work.active) {
    const std::int32_t* const first = args.plan.row_token.data + active.first_row;
    if (first[0] < 0 || !std::is_sorted(first, first + active.used)) return 1;
  }
  const std::int64_t rows = kLeastBlocks * kernels.max_rows * std::ssize(work.active);
  const std::int64_t least = std::max(kLeastTokens, rows * tokens / work.used_rows);
  return std::max<std::int64_t>(1, tokens / least);
}

}  // namespace

void TokenParts::find(const ExpertsArgs& args, const WorkList& work, const Kernels& kernels) {
  const std::int64_t parts = parts_of(args, work, kernels);
  const std::int64_t tokens = args.plan.num_tokens();
  active_ = work.active.size();
  first_token_.clear();
  rows_.clear();
  for (std::int64_t part = 0; part <= parts; ++part) first_token_.push_back(part * tokens / parts);
  most_tokens_ = (tokens + parts - 1) / parts;
  most_places_ = 0;
  for (std::int64_t part = 0; part < parts; ++part) {
    for (const ActiveExpert& active : work.active) {
      PartRows rows{.first = 0, .count = active.used, .blocks = active.blocks.count()};
      if (parts > 1) {
        const std::int32_t* const first = args.plan.row_token.data + active.first_row;
        const auto place_of = [&](std::int64_t token) {
          return std::lower_bound(first, first + active.used, token) - first;
        };
        rows.first = place_of(first_token(part));
        rows.count = place_of(first_token(part + 1)) - rows.first;
        rows.first_block = active.blocks.block_of(rows.first);
        const std::int64_t last = rows.first + rows.count - 1;
        rows.blocks = rows.count == 0 ? 0 : active.blocks.block_of(last) + 1 - rows.first_block;
      }
      most_places_ =
          std::max(most_places_, active.blocks.part(rows.first_block, rows.blocks).places());
      rows_.push_back(rows);
    }
  }
}

}  // namespace switchyard::cpu

#include "models/cpu/embedding.hpp"

#include <algorithm>
#include <vector>

#include "core/row_ops.hpp"

namespace switchyard::models {

void embed(const EmbeddingArgs& args, const float* table, float* out) {
  constexpr std::int64_t kRows = 64;
  parallel_for(args.pool, (args.num_tokens + kRows - 1) / kRows, [&](std::int64_t task, int) {
    const std::int64_t end = std::min(args.num_tokens, (task + 1) * kRows);
    for (std::int64_t t = task * kRows; t < end; ++t) {
      std::copy_n(table + args.ids[t] * args.hidden, args.hidden, out + t * args.hidden);
    }
  });
}

/// Tokens sorted by id, stably: who has an id adds up all of its rows.
void embed_backward(const EmbeddingArgs& args, const float* dout, float* dtable, bool accumulate) {
  if (dtable == nullptr) return;
  std::vector<std::int64_t> begin(static_cast<std::size_t>(args.vocabulary + 1));
  for (std::int64_t t = 0; t < args.num_tokens; ++t) {
    ++begin[static_cast<std::size_t>(args.ids[t]) + 1];
  }
  for (std::size_t v = 1; v < begin.size(); ++v) begin[v] += begin[v - 1];
  std::vector<std::int64_t> token(static_cast<std::size_t>(args.num_tokens)), next = begin;
  for (std::int64_t t = 0; t < args.num_tokens; ++t) {
    token[static_cast<std::size_t>(next[static_cast<std::size_t>(args.ids[t])]++)] = t;
  }
  constexpr std::int64_t kIds = 16;
  parallel_for(args.pool, (args.vocabulary + kIds - 1) / kIds, [&](std::int64_t task, int) {
    const std::int64_t end = std::min(args.vocabulary, (task + 1) * kIds);
    for (std::int64_t v = task * kIds; v < end; ++v) {
      float* const row = dtable + v * args.hidden;
      if (!accumulate) std::fill_n(row, args.hidden, 0.0F);
      for (auto i = static_cast<std::size_t>(begin[static_cast<std::size_t>(v)]);
           i < static_cast<std::size_t>(begin[static_cast<std::size_t>(v) + 1]); ++i) {
        row_ops::add(dout + token[i] * args.hidden, row, args.hidden);
      }
    }
  });
}

}  // namespace switchyard::models

#pragma once

// Rows of a table by token ids.

#include <cstdint>

#include "switchyard/thread_pool.hpp"

namespace switchyard::models {

struct EmbeddingArgs {
  const std::int32_t* ids;  ///< [T], in [0, vocabulary).
  std::int64_t num_tokens;
  std::int64_t vocabulary;
  std::int64_t hidden;
  ThreadPool* pool;
};

/// out [T, H] = rows of `table` [V, H].
void embed(const EmbeddingArgs& args, const float* table, float* out);

/// dtable [V, H] = sums of the rows of dout [T, H] whose token it is, in ascending t; or with
/// `accumulate` added to what is there.
void embed_backward(const EmbeddingArgs& args, const float* dout, float* dtable, bool accumulate);

}  // namespace switchyard::models

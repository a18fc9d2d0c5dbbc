#pragma once

// Generation beside a CPU's forward of the same text, however it is cut.

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/cuda/models/gpu_models.hpp"

namespace switchyard::models {

/// Of logits. In bf16 every expert has every token, so that no choice can turn.
inline constexpr double kBoundF32 = 2e-4, kBoundBf16 = 0.1;

/// Positions `first` to `last` of all sequences.
inline std::vector<std::int32_t> cut(const test::Text& text, std::int64_t first,
                                     std::int64_t last) {
  std::vector<std::int32_t> ids;
  for (std::int64_t b = 0; b < text.batch; ++b) {
    const auto row = text.tokens.begin() + b * text.positions;
    ids.insert(ids.end(), row + first, row + last);
  }
  return ids;
}

/// Decodes the next `count` positions of a text; logits behind each, or behind the last ones.
inline std::vector<float> decode(Model& model, Cache& cache, const test::Text& text,
                                 std::int64_t count, bool last_only = false) {
  const std::int64_t first = cache.length();
  const std::vector<std::int32_t> ids = cut(text, first, first + count);
  const std::int64_t rows = text.batch * (last_only ? 1 : count);
  std::vector<float> logits(static_cast<std::size_t>(rows * model.config().vocabulary));
  model.decode({ids.data(), {text.batch, count}}, cache,
               {logits.data(), {rows, model.config().vocabulary}});
  return logits;
}

/// `have`: behind `count` positions from `first` on, or behind the last of them; `want`: forward's.
inline void expect_like(const std::vector<float>& have, const std::vector<float>& want,
                        const test::Text& text, std::int64_t first, std::int64_t count,
                        double bound) {
  const std::int64_t vocabulary = std::ssize(want) / (text.batch * text.positions);
  const std::int64_t each = std::ssize(have) / (text.batch * vocabulary);
  for (std::int64_t i = 0; i < std::ssize(have); ++i) {
    const std::int64_t row = i / vocabulary, b = row / each;
    const std::int64_t position = first + count - each + row % each;
    const float x = want[static_cast<std::size_t>((b * text.positions + position) * vocabulary +
                                                  i % vocabulary)];
    ASSERT_NEAR(have[static_cast<std::size_t>(i)], x, bound * (1 + std::abs(x)))
        << "sequence " << b << " position " << position << " logit " << i % vocabulary;
  }
}

inline void expect_pieces(Model& model, const test::Text& text, const std::vector<float>& want,
                          const std::vector<std::int64_t>& pieces, double bound) {
  Cache cache = model.make_cache(text.batch, text.positions);
  for (const std::int64_t count : pieces) {
    SCOPED_TRACE(testing::Message() << count << " behind " << cache.length());
    const std::int64_t first = cache.length();
    expect_like(decode(model, cache, text, count), want, text, first, count, bound);
    ASSERT_EQ(cache.length(), first + count);
    cache.truncate(first);
    expect_like(decode(model, cache, text, count, true), want, text, first, count, bound);
    if (testing::Test::HasFatalFailure()) return;
  }
}

/// A prompt and tokens behind it have the logits of a CPU's forward of all in f32.
inline void expect_like_the_cpu(const ModelConfig& config, DType compute, double bound,
                                const std::vector<std::int64_t>& batches,
                                std::int64_t positions = 29) {
  Model cpu(config, {.num_threads = 2, .seed = 3});
  Model gpu(config, on_gpu(compute));
  make_rough(cpu, 0.1F);
  make_rough(gpu, 0.1F);
  for (const std::int64_t batch : batches) {
    SCOPED_TRACE(testing::Message() << config.router << " " << to_string(compute) << " heads of "
                                    << config.head_dim << ", batch " << batch);
    const test::Text text(batch, positions, config.vocabulary);
    std::vector<std::int64_t> pieces(18, 1);
    pieces[0] = positions - 17;
    expect_pieces(gpu, text, test::logits(cpu, text), pieces, bound);
    if (testing::Test::HasFatalFailure()) return;
  }
}

}  // namespace switchyard::models

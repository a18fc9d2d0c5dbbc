// Attention forward. Bound by the products; S x S exists only as one panel of scores, which stays
// in the second-level cache.
#include <limits>

#include "core/cpu/vector_loops.hpp"
#include "models/cpu/attention_head.hpp"

namespace switchyard::models {
namespace {

/// Columns of scores [keys][kWidth] into exponentials of scale * score - the column's largest one;
/// 0 where key > visible + column, or with a window key <= visible + column - window.
struct ColumnsArgs {
  float* scores;
  std::int64_t keys, visible;
  std::int64_t window;  ///< Larger than all keys: none.
  float scale;
  float sink;      ///< Without a key; -infinity: none.
  float* largest;  ///< out [kWidth]: scale * the largest score.
  float* sum;      ///< out [kWidth].
};
template <int kWidth>
void softmax_columns(const ColumnsArgs& args) {
  cpu::vectorized([&]() SWITCHYARD_INLINE {
    // Copies: the compiler cannot know that scores do not lie on top of them.
    const float scale = args.scale;
    const std::int64_t keys = args.keys;
    float most[kWidth], sum[kWidth];
    for (int w = 0; w < kWidth; ++w) {
      most[w] = args.sink;
      sum[w] = 0;
    }
    const auto hidden_below = [&](std::int64_t key) SWITCHYARD_INLINE {
      return static_cast<int>(std::max<std::int64_t>(key - args.visible, 0));
    };
    const auto hidden_from = [&](std::int64_t key) SWITCHYARD_INLINE {
      return static_cast<int>(
          std::clamp<std::int64_t>(key - args.visible + args.window, 0, kWidth));
    };
    for (std::int64_t key = 0; key < keys; ++key) {
      const float* const row = args.scores + key * kWidth;
      const int begin = hidden_below(key), end = hidden_from(key);
      for (int w = 0; w < kWidth; ++w) {
        const bool seen = w >= begin && w < end;
        const float score = seen ? row[w] * scale : -std::numeric_limits<float>::infinity();
        most[w] = score > most[w] ? score : most[w];
      }
    }
    for (std::int64_t key = 0; key < keys; ++key) {
      float* const row = args.scores + key * kWidth;
      const int begin = hidden_below(key), end = hidden_from(key);
      for (int w = 0; w < kWidth; ++w) {
        const float p = cpu::exp_of(row[w] * scale - most[w]);
        row[w] = w >= begin && w < end ? p : 0.0F;
      }
      for (int w = 0; w < kWidth; ++w) sum[w] += row[w];
    }
    if (args.sink > -std::numeric_limits<float>::infinity()) {
      for (int w = 0; w < kWidth; ++w) sum[w] += cpu::exp_of(args.sink - most[w]);
    }
    for (int w = 0; w < kWidth; ++w) {
      args.largest[w] = most[w];
      args.sum[w] = sum[w];
    }
  });
}
template <int kWidth>
struct Softmax {
  static void run(const ColumnsArgs& args) { softmax_columns<kWidth>(args); }
};
void forward_head(const AttentionArgs& args, std::int64_t task) {
  const AttentionHead head(args, task);
  const std::int64_t width = head.width(), panel = head.dim() * width;
  const std::int64_t scores_size = head.keys() * width;
  Memory memory(buffer_of_thread(),
                {head.packed_floats(), head.packed_floats(), panel, panel, scores_size});
  float* const k_rows = memory.take(head.packed_floats());
  float* const v_columns = memory.take(head.packed_floats());
  float* const q_panel = memory.take(panel);
  float* const out_panel = memory.take(panel);
  float* const scores = memory.take(scores_size);
  head.pack_rows(args.k, k_rows);
  head.pack_columns(args.v, v_columns);
  const std::int64_t before = args.shape.keys - args.shape.queries;
  const std::int64_t window = args.window > 0 ? args.window : args.shape.keys + kMostWidth;
  float largest[kMostWidth], sum[kMostWidth], factor[kMostWidth];
  for (std::int64_t n = head.kv_head() * head.group(); n < (head.kv_head() + 1) * head.group();
       ++n) {
    const float sink =
        args.sinks == nullptr ? -std::numeric_limits<float>::infinity() : args.sinks[n];
    for (std::int64_t first = 0; first < args.shape.queries; first += width) {
      const std::int64_t count = std::min(width, args.shape.queries - first);
      const std::int64_t keys = head.keys_for(before + first + count - 1);
      head.panel_of(args.q, n, first, count, q_panel);
      head.times_rows(k_rows, keys, q_panel, scores);
      for_width<Softmax>(width, ColumnsArgs{.scores = scores,
                                            .keys = keys,
                                            .visible = before + first,
                                            .window = window,
                                            .scale = args.scale > 0 ? args.scale : head.scale(),
                                            .sink = sink,
                                            .largest = largest,
                                            .sum = sum});
      head.times_columns(v_columns, keys, scores, out_panel);
      for (std::int64_t w = 0; w < count; ++w) factor[w] = 1.0F / sum[w];
      head.rows_of(out_panel, factor, n, first, count, args.out);
      if (args.lse == nullptr) continue;
      float* const lse =
          args.lse + (head.sequence() * args.shape.heads + n) * args.shape.queries + first;
      for (std::int64_t w = 0; w < count; ++w) lse[w] = largest[w] + std::log(sum[w]);
    }
  }
}

}  // namespace

void attention(const AttentionArgs& args) {
  parallel_for(args.pool, args.shape.batch * args.shape.kv_heads,
               [&](std::int64_t task, int) { forward_head(args, task); });
}

}  // namespace switchyard::models

// Attention backward: the panels of scores are made again, one after the other.
#include "core/cpu/vector_loops.hpp"
#include "models/cpu/attention_head.hpp"

namespace switchyard::models {
namespace {

/// Scores into probabilities p, dp into the gradient of the scores before their scale, in place.
struct ColumnGradientsArgs {
  float* scores;
  float* dp;
  std::int64_t keys, visible;
  float scale;
  const float* lse;    ///< [kWidth].
  const float* delta;  ///< [kWidth] dout . out.
};
template <int kWidth>
void column_gradients(const ColumnGradientsArgs& args) {
  cpu::vectorized([&]() SWITCHYARD_INLINE {
    for (std::int64_t key = 0; key < args.keys; ++key) {
      float* const row = args.scores + key * kWidth;
      float* const dp = args.dp + key * kWidth;
      const auto hidden = static_cast<int>(std::max<std::int64_t>(key - args.visible, 0));
      for (int w = 0; w < kWidth; ++w) {
        const float p = cpu::exp_of(row[w] * args.scale - args.lse[w]);
        row[w] = w >= hidden ? p : 0.0F;
        dp[w] = row[w] * (dp[w] - args.delta[w]) * args.scale;
      }
    }
  });
}

template <int kWidth>
struct Gradients {
  static void run(const ColumnGradientsArgs& args) { column_gradients<kWidth>(args); }
};

/// Sums over the queries that share a head of keys: dk or dv.
class KeyGradient {
 public:
  KeyGradient(const AttentionHead& head, float* sums, float* rows, float* product)
      : head_(head), sums_(sums), rows_(rows), product_(product) {
    std::fill_n(sums, head.keys() * head.dim(), 0.0F);
  }
  static std::int64_t panels(const AttentionHead& head) {
    return round_up(head.dim(), head.width()) / head.width();
  }

  /// sums [keys][D] += columns [keys][width] times `right` [panels][width queries][width of D].
  void add(const float* columns, std::int64_t keys, const float* right) {
    const cpu::Kernels& kernels = head_.kernels();
    const std::int64_t width = head_.width(), dim = head_.dim();
    const std::byte* pointers[kMostWidth];
    for (std::int64_t first = 0; first < keys; first += kernels.max_rows) {
      const std::int64_t count = std::min(kernels.max_rows, keys - first);
      for (std::int64_t r = 0; r < count; ++r) {
        pointers[r] = reinterpret_cast<const std::byte*>(columns + (first + r) * width);
      }
      kernels.pack_rows(
          {.rows = pointers, .count = count, .cols = width, .depth = width, .out = rows_});
      kernels.product({.a = rows_,
                       .blocks = kernels.blocks(count),
                       .steps = width,
                       .weights = reinterpret_cast<const std::byte*>(right),
                       .panel_bytes = 4 * width * width,
                       .panels = panels(head_),
                       .out = product_});
      cpu::vectorized([&]() SWITCHYARD_INLINE {
        for (std::int64_t col = 0; col < dim; col += width) {
          const std::int64_t cols = std::min(width, dim - col);
          const float* from = product_ + col * count;
          for (std::int64_t r = 0; r < count; ++r, from += width) {
            float* const to = sums_ + (first + r) * dim + col;
            for (std::int64_t d = 0; d < cols; ++d) to[d] += from[d];
          }
        }
      });
    }
  }
  void write(const HeadRows<float>& out) const {
    for (std::int64_t key = 0; key < head_.keys(); ++key) {
      std::copy_n(sums_ + key * head_.dim(), head_.dim(),
                  out.at(head_.sequence(), key) + head_.kv_head() * head_.dim());
    }
  }

 private:
  const AttentionHead& head_;
  float* sums_;
  float* rows_;
  float* product_;
};

/// Rows of a head as [panels][width rows][width of D], zeros where there are none.
void panels_of_rows(const AttentionHead& head, const HeadRows<const float>& rows, std::int64_t n,
                    std::int64_t first, std::int64_t count, float* out) {
  const std::int64_t width = head.width(), dim = head.dim();
  std::fill_n(out, KeyGradient::panels(head) * width * width, 0.0F);
  for (std::int64_t q = 0; q < count; ++q) {
    const float* const row = rows.at(head.sequence(), first + q) + n * dim;
    for (std::int64_t col = 0; col < dim; col += width) {
      std::copy_n(row + col, std::min(width, dim - col), out + (col + q) * width);
    }
  }
}

void backward_head(const AttentionBackwardArgs& args, std::int64_t task) {
  const AttentionArgs& forward = args.forward;
  const AttentionHead head(forward, task);
  const std::int64_t width = head.width(), panel = head.dim() * width;
  const std::int64_t packed = head.packed_floats(), scores_size = head.keys() * width;
  const std::int64_t square = KeyGradient::panels(head) * width * width;
  const std::int64_t sums_size = head.keys() * head.dim();
  const std::int64_t block = head.kernels().max_rows * width;
  const std::int64_t product_size = KeyGradient::panels(head) * block;
  Memory memory(buffer_of_thread(),
                {packed, packed, packed, panel, panel, panel, scores_size, scores_size, square,
                 square, sums_size, sums_size, block, product_size});
  float* const k_rows = memory.take(packed);
  float* const v_rows = memory.take(packed);
  float* const k_columns = memory.take(packed);
  float* const q_panel = memory.take(panel);
  float* const dout_panel = memory.take(panel);
  float* const dq_panel = memory.take(panel);
  float* const scores = memory.take(scores_size);
  float* const dp = memory.take(scores_size);
  float* const q_rows = memory.take(square);
  float* const dout_rows = memory.take(square);
  float* const dk_sums = memory.take(sums_size);
  float* const dv_sums = memory.take(sums_size);
  float* const rows = memory.take(block);
  float* const product = memory.take(product_size);
  KeyGradient dk(head, dk_sums, rows, product), dv(head, dv_sums, rows, product);
  head.pack_rows(forward.k, k_rows);
  head.pack_rows(forward.v, v_rows);
  head.pack_columns(forward.k, k_columns);
  float ones[kMostWidth];
  std::fill_n(ones, kMostWidth, 1.0F);
  const std::int64_t queries = forward.shape.queries;
  for (std::int64_t n = head.kv_head() * head.group(); n < (head.kv_head() + 1) * head.group();
       ++n) {
    for (std::int64_t first = 0; first < queries; first += width) {
      const std::int64_t count = std::min(width, queries - first);
      const std::int64_t keys = head.keys_for(first + count - 1);
      float lse[kMostWidth] = {}, delta[kMostWidth] = {};
      for (std::int64_t w = 0; w < count; ++w) {
        lse[w] = forward.lse[(head.sequence() * forward.shape.heads + n) * queries + first + w];
        delta[w] =
            cpu::dot_of(args.dout.at(head.sequence(), first + w) + n * head.dim(),
                        forward.out.at(head.sequence(), first + w) + n * head.dim(), head.dim());
      }
      head.panel_of(forward.q, n, first, count, q_panel);
      head.panel_of(args.dout, n, first, count, dout_panel);
      panels_of_rows(head, forward.q, n, first, count, q_rows);
      panels_of_rows(head, args.dout, n, first, count, dout_rows);
      head.times_rows(k_rows, keys, q_panel, scores);
      head.times_rows(v_rows, keys, dout_panel, dp);
      for_width<Gradients>(width, ColumnGradientsArgs{.scores = scores,
                                                      .dp = dp,
                                                      .keys = keys,
                                                      .visible = first,
                                                      .scale = head.scale(),
                                                      .lse = lse,
                                                      .delta = delta});
      head.times_columns(k_columns, keys, dp, dq_panel);
      head.rows_of(dq_panel, ones, n, first, count, args.dq);
      dv.add(scores, keys, dout_rows);
      dk.add(dp, keys, q_rows);
    }
  }
  dk.write(args.dk);
  dv.write(args.dv);
}

}  // namespace

void attention_backward(const AttentionBackwardArgs& args) {
  parallel_for(args.forward.pool, args.forward.shape.batch * args.forward.shape.kv_heads,
               [&](std::int64_t task, int) { backward_head(args, task); });
}

}  // namespace switchyard::models

// The stages of a token step on a GPU against plain loops in double.
#include <algorithm>
#include <cmath>

#include "models/gpu/generation/stages.hpp"
#include "models/gpu/stages.hpp"
#include "tests/cuda/models/typed.hpp"

namespace switchyard::models::gpu {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

Doubles product(const Doubles& x, const Typed& w, std::int64_t rows, std::int64_t in,
                std::int64_t out) {
  Doubles y;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t o = 0; o < out; ++o) {
      double sum = 0;
      for (std::int64_t i = 0; i < in; ++i) sum += x[at(r * in + i)] * w[o * in + i];
      y.push_back(sum);
    }
  }
  return y;
}

// Fails with: a delta left out of the norm or the sum, rows that are taken for another's.
void expect_normed_product(std::int64_t rows, std::int64_t in, std::int64_t out, bool bf16) {
  SCOPED_TRACE(testing::Message() << rows << " x " << in << " x " << out << " bf16 " << bf16);
  const std::vector<float> x = random_floats(rows * in, 1), weight = random_floats(in, 2);
  const Typed delta(bf16, random_floats(rows * in, 3)), w(bf16, random_floats(out * in, 4));
  const DeviceArray<float> device_x(x), device_weight(weight), sum(at(rows * in));
  for (const bool with_delta : {false, true}) {
    Doubles added, normed;
    for (std::int64_t r = 0; r < rows; ++r) {
      double squares = 0;
      for (std::int64_t i = r * in; i < (r + 1) * in; ++i) {
        added.push_back(x[at(i)] + (with_delta ? delta[i] : 0));
        squares += added.back() * added.back();
      }
      const double scale = 1 / std::sqrt(squares / static_cast<double>(in) + 1e-5);
      for (std::int64_t i = 0; i < in; ++i) {
        normed.push_back(added[at(r * in + i)] * scale * weight[at(i)]);
      }
    }
    Typed y(bf16, rows * out);
    row_product({.x = device_x.data(),
                 .delta = with_delta ? delta.data() : nullptr,
                 .sum = with_delta ? sum.data() : nullptr,
                 .norm_weight = device_weight.data(),
                 .epsilon = 1e-5F,
                 .w = w.data(),
                 .y = y.data(),
                 .rows = rows,
                 .in = in,
                 .out = out,
                 .bf16 = bf16});
    expect_close(y.get(), product(normed, w, rows, in, out), bf16 ? 0.05 : 1e-4, "y");
    if (with_delta) expect_close(sum.get(), added, 1e-6, "sum");
    Typed alone(bf16, rows * in);
    const DeviceArray<float> of_all(std::vector<float>(added.begin(), added.end()));
    norm_rows({.x = of_all.data(),
               .weight = device_weight.data(),
               .y = alone.data(),
               .rows = rows,
               .size = in,
               .epsilon = 1e-5F,
               .bf16 = bf16,
               .stream = nullptr});
    expect_close(alone.get(), normed, bound_of(bf16), "norm");
  }
}

TEST(ModelStages, SmallProductsOfFewNormedRows) {
  for (const bool bf16 : {false, true}) {
    for (const std::int64_t rows : {1, 2, 3, 4, 7, 8}) {
      expect_normed_product(rows, 64, 37, bf16);
      expect_normed_product(rows, 8, 5, bf16);
    }
    expect_normed_product(1, 512, 1536, bf16);
    expect_normed_product(8, 2048, 200, bf16);
    expect_normed_product(5, 1032, 33, bf16);
  }
}

struct Case {
  std::int64_t batch, positions, before;
  std::int32_t heads, kv_heads, dim;
  bool bf16;
};

/// A cache filled up to `before`, and rows behind it, as attend() has them.
struct Rows {
  explicit Rows(const Case& c)
      : capacity(c.before + c.positions + 3),
        row(cache_row(c.dim, c.bf16)),
        rows(c.batch * c.positions),
        qkv(c.bf16, random_floats(rows * (c.heads + 2 * c.kv_heads) * c.dim, 1)),
        turned(c.bf16, rows * (c.heads + c.kv_heads) * c.dim),
        mixed(c.bf16, rows * c.heads * c.dim),
        keys(c.bf16, padded(c, 2)),
        values(c.bf16, padded(c, 3)),
        q_weight(random_floats(c.dim, 4)),
        k_weight(random_floats(c.dim, 5)),
        cosine(random_floats(capacity * c.dim / 2, 6)),
        sine(random_floats(capacity * c.dim / 2, 7)),
        scales(at(rows * (c.heads + c.kv_heads))),
        place(std::vector<CachePlace>{{static_cast<std::int32_t>(c.before), 0}}) {}

  [[nodiscard]] std::vector<float> padded(const Case& c, unsigned seed) const {
    std::vector<float> numbers = random_floats(c.batch * c.kv_heads * capacity * row, seed);
    for (std::int64_t i = 0; i < std::ssize(numbers); ++i) {
      if (i % row >= c.dim) numbers[at(i)] = 0;
    }
    return numbers;
  }
  [[nodiscard]] CacheLayer cache() const { return {keys.data(), values.data(), capacity, row}; }

  std::int64_t capacity, row, rows;
  Typed qkv, turned, mixed, keys, values;
  DeviceArray<float> q_weight, k_weight, cosine, sine, scales;
  DeviceArray<CachePlace> place;
};

/// softmax(q k / sqrt(D)) v of each row over all positions up to its own.
Doubles attended(const Case& c, const Rows& a, const std::vector<float>& turned) {
  const std::vector<float> k = a.keys.get(), v = a.values.get();
  Doubles out;
  for (std::int64_t r = 0; r < a.rows; ++r) {
    const std::int64_t length = c.before + r % c.positions + 1, b = r / c.positions;
    for (std::int32_t h = 0; h < c.heads; ++h) {
      const float* const q = turned.data() + (r * (c.heads + c.kv_heads) + h) * c.dim;
      const std::int64_t head = (b * c.kv_heads + h / (c.heads / c.kv_heads)) * a.capacity * a.row;
      Doubles weights, sums(at(c.dim));
      double most = -1e30, total = 0;
      for (std::int64_t i = 0; i < length; ++i) {
        double dot = 0;
        for (std::int32_t d = 0; d < c.dim; ++d) {
          dot += double{q[d]} * double{k[at(head + i * a.row + d)]};
        }
        weights.push_back(dot / std::sqrt(double(c.dim)));
        most = std::max(most, weights.back());
      }
      for (std::int64_t i = 0; i < length; ++i) {
        const double share = std::exp(weights[at(i)] - most);
        total += share;
        for (std::int32_t d = 0; d < c.dim; ++d) {
          sums[at(d)] += share * double{v[at(head + i * a.row + d)]};
        }
      }
      for (const double sum : sums) out.push_back(sum / total);
    }
  }
  return out;
}

void expect_attention(const Case& c) {
  SCOPED_TRACE(testing::Message() << c.batch << " x " << c.positions << " behind " << c.before
                                  << ", " << c.heads << "/" << c.kv_heads << " x " << c.dim
                                  << ", bf16 " << c.bf16);
  const Rows a(c);
  rope({.qkv = a.qkv.data(),
        .q_weight = a.q_weight.data(),
        .k_weight = a.k_weight.data(),
        .cosine = a.cosine.data(),
        .sine = a.sine.data(),
        .turned = a.turned.data(),
        .scales = a.scales.data(),
        .rows = a.rows,
        .positions = c.positions,
        .first = c.before,
        .heads = c.heads,
        .kv_heads = c.kv_heads,
        .head_dim = c.dim,
        .epsilon = 1e-5F,
        .bf16 = c.bf16,
        .stream = nullptr});
  AttendArgs args{.q_weight = a.q_weight.data(),
                  .k_weight = a.k_weight.data(),
                  .cosine = a.cosine.data(),
                  .sine = a.sine.data(),
                  .epsilon = 1e-5F,
                  .cache = a.cache(),
                  .rows = a.rows,
                  .positions = c.positions,
                  .heads = c.heads,
                  .kv_heads = c.kv_heads,
                  .head_dim = c.dim,
                  .mixed = a.mixed.data(),
                  .bf16 = c.bf16};
  if (c.positions > 1) {
    append({.turned = a.turned.data(),
            .qkv = a.qkv.data(),
            .cache = a.cache(),
            .rows = a.rows,
            .positions = c.positions,
            .first = c.before,
            .heads = c.heads,
            .kv_heads = c.kv_heads,
            .head_dim = c.dim,
            .bf16 = c.bf16,
            .stream = nullptr});
    args.turned = a.turned.data();
    args.first = c.before;
  } else {  // keys and values go into the cache by the way
    args.qkv = a.qkv.data();
    args.place = a.place.data();
  }
  attend(args);
  const std::vector<float> turned = a.turned.get();
  const Doubles want = attended(c, a, turned);
  expect_close(a.mixed.get(), want, bound_of(c.bf16), "mixed");

  // What has been appended is what rope() and the product have left. A key that attention has
  // turned itself has the squares' sum in another order: both of its pair are off by up to head_dim
  // 2^-24 of themselves, which are 8 at most here, and in bf16 it is off by a rounding then.
  const bool same = c.positions > 1;
  const float relative = same || !c.bf16 ? 0.0F : 0x1p-7F;
  const float absolute = same ? 0.0F : 0x1p-24F * 8.0F * static_cast<float>(c.dim);
  const std::vector<float> keys = a.keys.get(), qkv = a.qkv.get(), values = a.values.get();
  for (std::int64_t r = 0; r < a.rows; ++r) {
    for (std::int64_t i = 0; i < std::int64_t{c.kv_heads} * c.dim; ++i) {
      const std::int64_t head = r / c.positions * c.kv_heads + i / c.dim;
      const std::int64_t to = (head * a.capacity + c.before + r % c.positions) * a.row + i % c.dim;
      const std::int64_t of_q = std::int64_t{c.heads} * c.dim,
                         of_kv = std::int64_t{c.kv_heads} * c.dim;
      const float key = turned[at(r * (of_q + of_kv) + of_q + i)];
      ASSERT_NEAR(keys[at(to)], key, relative * std::abs(key) + absolute) << r << " " << i;
      ASSERT_EQ(values[at(to)], qkv[at(r * (of_q + 2 * of_kv) + of_q + of_kv + i)])
          << r << " " << i;
    }
  }

  // By splits, put together by the product behind them.
  const std::int64_t of_q = std::int64_t{c.heads} * c.dim, out = 12;
  if (a.rows > kFewRows || of_q % (c.bf16 ? 8 : 4) != 0) return;
  const Typed w(c.bf16, random_floats(out * of_q, 8));
  const std::vector<float> before = random_floats(a.rows * out, 9);
  const DeviceArray<float> add(before), y(at(a.rows * out));
  for (const std::int32_t splits : {1, 2, 5, 16}) {
    const DeviceArray<float> parts(at(a.rows * of_q * splits)),
        stats(at(2 * a.rows * c.heads * splits));
    args.splits = splits;
    args.parts = parts.data();
    args.stats = stats.data();
    attend(args);
    row_product({.mixed = a.mixed.data(),
                 .parts = parts.data(),
                 .stats = stats.data(),
                 .splits = splits,
                 .heads = c.heads,
                 .w = w.data(),
                 .add = add.data(),
                 .y = y.data(),
                 .y_is_f32 = true,
                 .rows = a.rows,
                 .in = of_q,
                 .out = out,
                 .bf16 = c.bf16});
    Doubles sums = product(want, w, a.rows, of_q, out);
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += before[i];
    expect_close(y.get(), sums, c.bf16 ? 0.1 : 1e-4, "product of what is attended");
  }
}

// Fails with: a position too many or too few, a head of another key, a split twice, an angle of
// another position, padding that is read.
TEST(ModelStages, SmallAttentionOverACache) {
  for (const bool bf16 : {false, true}) {
    for (const std::int64_t before : {0, 1, 15, 70}) {
      expect_attention({2, 1, before, 2, 2, 32, bf16});
      expect_attention({1, 1, before, 4, 2, 64, bf16});
      expect_attention({3, 1, before, 3, 1, 128, bf16});
      expect_attention({2, 5, before, 6, 1, 64, bf16});
    }
  }
  expect_attention({2, 1, 19, 2, 1, 24, false});
  expect_attention({2, 4, 19, 2, 2, 6, false});
}
TEST(ModelStages, AttentionOverALongCache) {
  for (const bool bf16 : {false, true}) {
    expect_attention({1, 1, 600, 8, 8, 64, bf16});
    expect_attention({20, 1, 300, 4, 4, 64, bf16});
    expect_attention({2, 33, 300, 10, 2, 32, bf16});
  }
}

// Fails with: the last of equal logits, a NaN that is passed over, a row's end that is not looked
// at.
TEST(ModelStages, SmallLikeliestTokens) {
  for (const std::int64_t vocabulary : {1, 37, 256, 2000}) {
    const std::int64_t rows = 5;
    std::vector<float> logits = random_floats(rows * vocabulary, 1);
    const auto row = [&](std::int64_t r) { return logits.begin() + r * vocabulary; };
    row(1)[vocabulary - 1] = 50;
    row(2)[vocabulary / 3] = row(2)[vocabulary / 2] = 60;
    std::fill(row(3), row(4), -INFINITY);
    row(4)[vocabulary - 1] = NAN;
    const DeviceArray<float> device(logits);
    const DeviceArray<std::int32_t> ids(at(rows)), told(at(4 * rows));
    const DeviceArray<CachePlace> place(std::vector<CachePlace>{{6, 7}});
    likeliest({.logits = device.data(),
               .rows = rows,
               .vocabulary = vocabulary,
               .ids = ids.data(),
               .told = told.data(),
               .place = place.data(),
               .ring = 4,
               .stream = nullptr});
    const auto first = static_cast<std::int32_t>(std::max_element(row(0), row(1)) - row(0));
    const std::vector<std::int32_t> want = {first, static_cast<std::int32_t>(vocabulary - 1),
                                            static_cast<std::int32_t>(vocabulary / 3), 0, -1};
    const std::vector<std::int32_t> all = told.get();
    EXPECT_EQ(std::vector<std::int32_t>(all.begin() + 2 * rows, all.begin() + 3 * rows), want);
    EXPECT_EQ(ids.get(), (std::vector<std::int32_t>{want[0], want[1], want[2], 0, 0}));
  }
}

TEST(ModelStages, SmallStepsBeginWithRowsOfTheTableAndCount) {
  const std::vector<float> table = random_floats(7 * 12, 1);
  const DeviceArray<float> device(table), x(std::size_t{3 * 12});
  const DeviceArray<std::int32_t> ids(std::vector<std::int32_t>{6, 0, 3});
  const DeviceArray<CachePlace> place(std::vector<CachePlace>{{0, 41}});
  begin_step({.ids = ids.data(),
              .table = device.data(),
              .x = x.data(),
              .place = place.data(),
              .rows = 3,
              .hidden = 12,
              .stream = nullptr});
  const std::vector<float> got = x.get();
  for (std::size_t i = 0; i < 12; ++i) {
    EXPECT_EQ(got[i], table[6 * 12 + i]);
    EXPECT_EQ(got[12 + i], table[i]);
    EXPECT_EQ(got[24 + i], table[3 * 12 + i]);
  }
  EXPECT_EQ(place.get()[0].position, 41);
  EXPECT_EQ(place.get()[0].next, 42);
}

}  // namespace
}  // namespace switchyard::models::gpu

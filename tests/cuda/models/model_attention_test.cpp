// Causal attention on a GPU, forward and back, against plain loops in double.
#include "models/gpu/stages.hpp"

#include <algorithm>
#include "tests/cuda/models/typed.hpp"

namespace switchyard::models::gpu {
namespace {

struct Case {
  std::int64_t batch, positions;
  std::int32_t heads, kv_heads, dim;
  bool bf16;
  float size = 1;  ///< Of queries and keys: large ones make sharp probabilities.
  bool portable = false;
};

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

/// Arrays on the GPU: q and k beside each other, v with rows of qkv, as a model has them.
struct Arrays {
  explicit Arrays(const Case& c)
      : rows(c.batch * c.positions),
        of_q(c.heads * c.dim),
        of_k(c.kv_heads * c.dim),
        turned(c.bf16, random_floats(rows * (of_q + of_k), 1, c.size)),
        qkv(c.bf16, random_floats(rows * (of_q + 2 * of_k), 2)),
        dout(c.bf16, random_floats(rows * of_q, 3)),
        out(c.bf16, rows * of_q),
        dqkv(c.bf16, rows * (of_q + 2 * of_k)),
        lse(at(rows * c.heads)),
        delta(at(rows * c.heads)) {}

  std::int64_t rows, of_q, of_k;
  Typed turned, qkv, dout, out, dqkv;
  DeviceArray<float> lse, delta;
};

Heads shifted(const Typed& array, std::int64_t by, std::int64_t row, bool bf16) {
  return {static_cast<std::byte*>(array.data()) + by * size_of(type_of(bf16)), row};
}

AttentionBackwardArgs args_of(const Case& c, const Arrays& a) {
  const std::int64_t qk = a.of_q + a.of_k, qkv = qk + a.of_k;
  return {.forward = {.q = {a.turned.data(), qk},
                      .k = shifted(a.turned, a.of_q, qk, c.bf16),
                      .v = shifted(a.qkv, qk, qkv, c.bf16),
                      .out = {a.out.data(), a.of_q},
                      .lse = a.lse.data(),
                      .batch = c.batch,
                      .positions = c.positions,
                      .heads = c.heads,
                      .kv_heads = c.kv_heads,
                      .head_dim = c.dim,
                      .bf16 = c.bf16,
                      .stream = nullptr,
                      .portable = c.portable},
          .dout = {a.dout.data(), a.of_q},
          .dq = {a.dqkv.data(), qkv},
          .dk = shifted(a.dqkv, a.of_q, qkv, c.bf16),
          .dv = shifted(a.dqkv, qk, qkv, c.bf16),
          .delta = a.delta.data()};
}

/// What attention is, in double.
struct Want {
  Doubles out, lse, dqkv;
};

/// One query of one head: all of it, forward and back.
void add_query(const Case& c, const Arrays& a, std::int64_t b, std::int64_t h, std::int64_t i,
               Want& want) {
  const std::int64_t qk = a.of_q + a.of_k, qkv = qk + a.of_k, m = h / (c.heads / c.kv_heads);
  const double scale = 1 / std::sqrt(double(c.dim));
  const std::int64_t row = b * c.positions + i;
  const auto q = [&](int d) { return a.turned[row * qk + h * c.dim + d]; };
  const auto k = [&](std::int64_t j, int d) {
    return a.turned[(b * c.positions + j) * qk + a.of_q + m * c.dim + d];
  };
  const auto v = [&](std::int64_t j, int d) {
    return a.qkv[(b * c.positions + j) * qkv + qk + m * c.dim + d];
  };
  const auto dout = [&](int d) { return a.dout[row * a.of_q + h * c.dim + d]; };
  Doubles p;
  double most = -INFINITY, total = 0;
  for (std::int64_t j = 0; j <= i; ++j) {
    double dot = 0;
    for (int d = 0; d < c.dim; ++d) dot += q(d) * k(j, d);
    p.push_back(dot * scale);
    most = std::max(most, p.back());
  }
  for (double& x : p) total += x = std::exp(x - most);
  for (double& x : p) x /= total;
  want.lse[at((b * c.heads + h) * c.positions + i)] = most + std::log(total);
  double delta = 0;
  for (int d = 0; d < c.dim; ++d) {
    double sum = 0;
    for (std::int64_t j = 0; j <= i; ++j) sum += p[at(j)] * v(j, d);
    want.out[at(row * a.of_q + h * c.dim + d)] = sum;
    delta += sum * dout(d);
  }
  for (std::int64_t j = 0; j <= i; ++j) {
    double dp = 0;
    for (int d = 0; d < c.dim; ++d) dp += dout(d) * v(j, d);
    const double ds = p[at(j)] * (dp - delta) * scale;
    double* const dqkv = want.dqkv.data();
    const std::int64_t key = (b * c.positions + j) * qkv;
    for (int d = 0; d < c.dim; ++d) {
      dqkv[row * qkv + h * c.dim + d] += ds * k(j, d);
      dqkv[key + a.of_q + m * c.dim + d] += ds * q(d);
      dqkv[key + qk + m * c.dim + d] += p[at(j)] * dout(d);
    }
  }
}

void expect_attention(const Case& c) {
  SCOPED_TRACE(testing::Message() << c.batch << " x " << c.positions << " heads " << c.heads << "/"
                                  << c.kv_heads << " of " << c.dim << (c.bf16 ? " bf16" : " f32")
                                  << (c.portable ? " portable" : ""));
  ASSERT_TRUE(attention_takes(c.dim, c.bf16));
  const Arrays a(c);
  Want want{Doubles(at(a.rows * a.of_q)), Doubles(at(a.rows * c.heads)),
            Doubles(at(a.rows * (a.of_q + 2 * a.of_k)))};
  for (std::int64_t b = 0; b < c.batch; ++b) {
    for (std::int64_t h = 0; h < c.heads; ++h) {
      for (std::int64_t i = 0; i < c.positions; ++i) add_query(c, a, b, h, i, want);
    }
  }
  const AttentionBackwardArgs args = args_of(c, a);
  attention(args.forward);
  expect_close(a.out.get(), want.out, c.bf16 ? 0.03 : 1e-4, "out");
  expect_close(a.lse.get(), want.lse, 1e-4, "lse");
  attention_backward(args);
  // The outputs that delta is made of are rounded, and keys of size 3 make much of it.
  expect_close(a.dqkv.get(), want.dqkv, c.bf16 ? 0.06 * double{c.size} : 2e-4, "dqkv");
  const std::vector<std::byte> first = a.dqkv.bytes();
  attention_backward(args);
  EXPECT_EQ(a.dqkv.bytes(), first);
}

TEST(ModelAttention, SmallHeadsInF32AreThoseInDouble) {
  expect_attention({1, 1, 1, 1, 2, false});
  expect_attention({2, 5, 4, 2, 6, false});
  expect_attention({1, 33, 3, 1, 40, false});
}
TEST(ModelAttention, SmallHeadsInBf16AreThoseInDouble) {
  expect_attention({1, 1, 1, 1, 32, true});
  for (const bool portable : {false, true}) {
    expect_attention({2, 5, 4, 2, 64, true, 1, portable});
    expect_attention({1, 70, 2, 1, 128, true, 1, portable});
  }
}
TEST(ModelAttention, HeadsOfAllSizesAreThoseInDouble) {
  for (const bool bf16 : {false, true}) {
    for (const std::int32_t dim : {32, 64, 128}) {
      expect_attention({2, 64, 2, 2, dim, bf16});
      expect_attention({1, 129, 4, 1, dim, bf16});
      expect_attention({1, 200, 2, 2, dim, bf16, 3.0F});
    }
  }
  for (const std::int32_t dim : {64, 128}) {
    expect_attention({1, 129, 4, 1, dim, true, 1, true});
    expect_attention({1, 200, 2, 2, dim, true, 3.0F, true});
  }
}

}  // namespace
}  // namespace switchyard::models::gpu

// The layer functions of a model on a GPU but attention and the loss, each against plain
// loops in double.
#include "models/gpu/stages.hpp"
#include "tests/cuda/models/typed.hpp"

namespace switchyard::models::gpu {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// ---- embedding ---------------------------------------------------------------------------------

std::vector<std::int32_t> random_ids(std::int64_t count, std::int64_t vocabulary, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::int32_t> ids;
  for (std::int64_t i = 0; i < count; ++i) {
    // Half of them one id: a list that is longer than a chunk's share.
    ids.push_back(i % 2 == 0 ? 0 : static_cast<std::int32_t>(random() % unsigned(vocabulary)));
  }
  return ids;
}

void expect_embedding(std::int64_t tokens, std::int64_t vocabulary, std::int64_t hidden) {
  SCOPED_TRACE(testing::Message() << tokens << " x " << hidden << " of " << vocabulary);
  const std::vector<std::int32_t> ids = random_ids(tokens, vocabulary, 3);
  const std::vector<float> table = random_floats(vocabulary * hidden, 1);
  const std::vector<float> dx = random_floats(tokens * hidden, 2);
  const DeviceArray<std::int32_t> device_ids(ids);
  const DeviceArray<float> device_table(table), device_dx(dx);
  const DeviceArray<float> x(at(tokens * hidden)), dtable(at(vocabulary * hidden));
  embed({.ids = device_ids.data(),
         .table = device_table.data(),
         .x = x.data(),
         .tokens = tokens,
         .vocabulary = vocabulary,
         .hidden = hidden,
         .stream = nullptr});
  const std::vector<float> got = x.get();
  Doubles sums(at(vocabulary * hidden));
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t c = 0; c < hidden; ++c) {
      const std::int64_t of_id = ids[at(t)] * hidden + c;
      ASSERT_EQ(got[at(t * hidden + c)], table[at(of_id)]);
      sums[at(of_id)] += dx[at(t * hidden + c)];
    }
  }
  std::vector<float> first;
  for (const bool accumulate : {false, true}) {
    embed_backward({.ids = device_ids.data(),
                    .dx = device_dx.data(),
                    .dtable = dtable.data(),
                    .tokens = tokens,
                    .vocabulary = vocabulary,
                    .hidden = hidden,
                    .accumulate = accumulate,
                    .stream = nullptr});
    Doubles want = sums;
    for (double& value : want) value *= accumulate ? 2 : 1;
    expect_close(dtable.get(), want, 1e-4, "dtable");
  }
}

TEST(ModelStages, SmallEmbeddingsAreRowsOfTheTableAndTheirGradientsTheSumsOfRows) {
  expect_embedding(1, 1, 4);
  expect_embedding(7, 5, 20);
  expect_embedding(65, 3, 132);
}
TEST(ModelStages, EmbeddingsOfManyTokensSumRowsOverChunksOfIds) {
  expect_embedding(2049, 256, 64);
  expect_embedding(5000, 37, 200);
}
TEST(ModelStages, SmallEmbeddingsOfWideVocabulariesSumRowsOfManyIdsABlock) {
  expect_embedding(300, 2049, 20);
  expect_embedding(4100, 5000, 132);
}

// ---- norms -------------------------------------------------------------------------------------

void expect_norm(std::int64_t rows, std::int64_t size, bool bf16, bool delta) {
  SCOPED_TRACE(testing::Message() << rows << " x " << size << (bf16 ? " bf16" : " f32"));
  constexpr float kEpsilon = 1e-5F;
  const std::vector<float> x = random_floats(rows * size, 1), weight = random_floats(size, 2);
  const std::vector<float> before = random_floats(rows * size, 5);
  const Typed added(bf16, random_floats(rows * size, 3));
  const Typed dy(bf16, random_floats(rows * size, 4));
  const DeviceArray<float> device_x(x), device_weight(weight), dx(before);
  const DeviceArray<float> sum(x.size()), scale(at(rows)), dweight(at(size));
  const DeviceArray<float> parts(at(norm_parts(rows, size)));
  const Typed y(bf16, rows * size), dx_typed(bf16, rows * size);
  rms_norm({.x = device_x.data(),
            .delta = delta ? added.data() : nullptr,
            .sum = delta ? sum.data() : nullptr,
            .weight = device_weight.data(),
            .y = y.data(),
            .scale = scale.data(),
            .rows = rows,
            .size = size,
            .epsilon = kEpsilon,
            .bf16 = bf16,
            .stream = nullptr});
  Doubles want_y, want_sum, want_dx, want_dweight(at(size));
  for (std::int64_t r = 0; r < rows; ++r) {
    Doubles row;
    double squares = 0;
    for (std::int64_t c = 0; c < size; ++c) {
      const float value = x[at(r * size + c)];
      row.push_back(delta ? value + float(added[r * size + c]) : value);
      squares += row.back() * row.back();
    }
    const double factor = 1 / std::sqrt(squares / double(size) + double{kEpsilon});
    double dot = 0;
    for (std::int64_t c = 0; c < size; ++c) {
      want_sum.push_back(row[at(c)]);
      want_y.push_back(row[at(c)] * factor * weight[at(c)]);
      dot += dy[r * size + c] * weight[at(c)] * row[at(c)];
      want_dweight[at(c)] += dy[r * size + c] * row[at(c)] * factor;
    }
    for (std::int64_t c = 0; c < size; ++c) {
      const double through =
          dy[r * size + c] * weight[at(c)] - row[at(c)] * dot * factor * factor / double(size);
      want_dx.push_back(before[at(r * size + c)] + factor * through);
    }
  }
  expect_close(y.get(), want_y, bound_of(bf16), "y");
  if (delta) expect_close(sum.get(), want_sum, 1e-6, "sum");
  for (const bool accumulate : {false, true}) {
    dx.set(before);
    rms_norm_backward({.x = delta ? sum.data() : device_x.data(),
                       .weight = device_weight.data(),
                       .scale = scale.data(),
                       .dy = dy.data(),
                       .dx = dx.data(),
                       .add = true,
                       .dx_typed = dx_typed.data(),
                       .dweight = dweight.data(),
                       .accumulate = accumulate,
                       .parts = parts.data(),
                       .rows = rows,
                       .size = size,
                       .bf16 = bf16,
                       .stream = nullptr});
    expect_close(dx.get(), want_dx, 1e-4, "dx");
    expect_close(dx_typed.get(), want_dx, bound_of(bf16) + 1e-4, "dx in the compute type");
    Doubles twice = want_dweight;
    for (double& value : twice) value *= accumulate ? 2 : 1;
    expect_close(dweight.get(), twice, 2e-4, "dweight");
  }
}

TEST(ModelStages, SmallNormsAreThoseInDouble) {
  for (const bool bf16 : {false, true}) {
    expect_norm(1, 4, bf16, false);
    expect_norm(9, 20, bf16, true);
    expect_norm(5, 512, bf16, true);
  }
}
TEST(ModelStages, NormsOfAllWidthsAreThoseInDouble) {
  for (const bool bf16 : {false, true}) {
    expect_norm(1000, 64, bf16, true);
    expect_norm(37, 192, bf16, true);
    expect_norm(301, 768, bf16, false);
    expect_norm(17, 2048, bf16, true);
    expect_norm(4200, 136, bf16, true);  // more rows than parts have blocks
  }
}

// ---- rope --------------------------------------------------------------------------------------

struct RopeCase {
  std::int64_t batch, positions;
  std::int32_t heads, kv_heads, dim;
  bool norm, bf16;
};

/// One head forward: `y` of `x`; and back: `dx` of `dy`, `dw` added to.
void rope_in_double(const RopeCase& c, std::int64_t position, const Doubles& weight,
                    const Doubles& x, const Doubles& dy, Doubles& y, Doubles& dx, double* dw) {
  const auto dim = std::size_t(c.dim), half = dim / 2;
  double squares = 0;
  for (const double value : x) squares += value * value;
  const double scale = c.norm ? 1 / std::sqrt(squares / double(c.dim) + 1e-6) : 1;
  Doubles normed(dim), dn(dim);
  for (std::size_t i = 0; i < dim; ++i) normed[i] = x[i] * scale * (c.norm ? weight[i] : 1);
  y.resize(dim);
  dx.resize(dim);
  for (std::size_t i = 0; i < half; ++i) {
    const double angle = double(position) * std::pow(10000.0, -2.0 * double(i) / double(c.dim));
    const double cosine = std::cos(angle), sine = std::sin(angle);
    y[i] = normed[i] * cosine - normed[half + i] * sine;
    y[half + i] = normed[half + i] * cosine + normed[i] * sine;
    dn[i] = dy[i] * cosine + dy[half + i] * sine;
    dn[half + i] = dy[half + i] * cosine - dy[i] * sine;
  }
  double dot = 0;
  for (std::size_t i = 0; i < dim && c.norm; ++i) {
    dw[i] += dn[i] * x[i] * scale;
    dn[i] *= weight[i];
    dot += dn[i] * x[i];
  }
  for (std::size_t i = 0; i < dim; ++i) {
    dx[i] = scale * (dn[i] - (c.norm ? x[i] * dot * scale * scale / double(c.dim) : 0));
  }
}

void expect_rope(const RopeCase& c) {
  SCOPED_TRACE(testing::Message() << c.positions << " heads " << c.heads << "/" << c.kv_heads
                                  << " of " << c.dim << (c.bf16 ? " bf16" : " f32"));
  const std::int64_t rows = c.batch * c.positions, both = c.heads + c.kv_heads;
  const std::int64_t cols = (both + c.kv_heads) * c.dim;
  const Typed qkv(c.bf16, random_floats(rows * cols, 1));
  const std::vector<float> dturned = random_floats(rows * cols, 2);
  const Typed dqkv(c.bf16, dturned);
  const std::vector<float> q_weight = random_floats(c.dim, 3), k_weight = random_floats(c.dim, 4);
  std::vector<float> cosine, sine;
  for (std::int64_t position = 0; position < c.positions; ++position) {
    for (int i = 0; i < c.dim / 2; ++i) {
      const double angle = double(position) * std::pow(10000.0, -2.0 * i / c.dim);
      cosine.push_back(float(std::cos(angle)));
      sine.push_back(float(std::sin(angle)));
    }
  }
  const DeviceArray<float> device_q(q_weight), device_k(k_weight);
  const DeviceArray<float> device_cosine(cosine), device_sine(sine);
  const DeviceArray<float> scales(at(rows * both)), dq_weight(at(c.dim)), dk_weight(at(c.dim));
  const DeviceArray<float> parts(at(rope_parts(rows, c.dim)));
  const Typed turned(c.bf16, rows * both * c.dim);
  const RopeArgs args{.qkv = qkv.data(),
                      .q_weight = c.norm ? device_q.data() : nullptr,
                      .k_weight = c.norm ? device_k.data() : nullptr,
                      .cosine = device_cosine.data(),
                      .sine = device_sine.data(),
                      .turned = turned.data(),
                      .scales = scales.data(),
                      .rows = rows,
                      .positions = c.positions,
                      .heads = c.heads,
                      .kv_heads = c.kv_heads,
                      .head_dim = c.dim,
                      .epsilon = 1e-6F,
                      .bf16 = c.bf16,
                      .stream = nullptr};
  rope(args);
  rope_backward({.forward = args,
                 .dqkv = dqkv.data(),
                 .dq_weight = dq_weight.data(),
                 .dk_weight = dk_weight.data(),
                 .accumulate = false,
                 .parts = parts.data()});
  Doubles want_turned, want_dx, dw(at(2 * c.dim));
  const Doubles of_q(q_weight.begin(), q_weight.end()), of_k(k_weight.begin(), k_weight.end());
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t head = 0; head < both + c.kv_heads; ++head) {
      Doubles x, dy, y, dx;
      for (int i = 0; i < c.dim; ++i) {
        x.push_back(qkv[row * cols + head * c.dim + i]);
        dy.push_back(dqkv[row * cols + head * c.dim + i]);
      }
      if (head >= both) {  // values: nobody touches them
        want_dx.insert(want_dx.end(), dy.begin(), dy.end());
        continue;
      }
      const bool is_key = head >= c.heads;
      rope_in_double(c, row % c.positions, is_key ? of_k : of_q, x, dy, y, dx,
                     dw.data() + (is_key ? c.dim : 0));
      want_turned.insert(want_turned.end(), y.begin(), y.end());
      want_dx.insert(want_dx.end(), dx.begin(), dx.end());
    }
  }
  expect_close(turned.get(), want_turned, bound_of(c.bf16), "turned");
  expect_close(dqkv.get(), want_dx, bound_of(c.bf16), "dqkv");
  if (!c.norm) return;
  expect_close(dq_weight.get(), Doubles(dw.begin(), dw.begin() + c.dim), 5e-4, "dq_weight");
  expect_close(dk_weight.get(), Doubles(dw.begin() + c.dim, dw.end()), 5e-4, "dk_weight");
}

TEST(ModelStages, SmallQueriesAndKeysAreTurnedAsInDouble) {
  for (const bool bf16 : {false, true}) {
    expect_rope({1, 1, 1, 1, 2, true, bf16});
    expect_rope({2, 5, 4, 2, 6, true, bf16});
    expect_rope({1, 9, 3, 1, 64, false, bf16});
    expect_rope({1, 11, 2, 1, 16, true, bf16});
    expect_rope({2, 3, 11, 2, 32, true, bf16});
  }
}
TEST(ModelStages, QueriesAndKeysOfAllHeadSizesAreTurnedAsInDouble) {
  for (const bool bf16 : {false, true}) {
    expect_rope({3, 200, 4, 4, 32, true, bf16});
    expect_rope({2, 77, 8, 2, 64, true, bf16});
    expect_rope({1, 130, 2, 1, 128, true, bf16});
    expect_rope({2, 31, 3, 3, 66, true, bf16});
  }
}

}  // namespace
}  // namespace switchyard::models::gpu

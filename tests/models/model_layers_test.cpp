// Each layer function of the models against loops in double, and its gradient against finite
// differences of these loops.
#include <gtest/gtest.h>

#include <functional>

#include "models/cpu/attention.hpp"
#include "models/cpu/cross_entropy.hpp"
#include "models/cpu/embedding.hpp"
#include "models/cpu/linear.hpp"
#include "models/cpu/rms_norm.hpp"
#include "models/cpu/rope.hpp"
#include "testkit/random_values.hpp"
#include "testkit/sanitized.hpp"
#include "tests/models/double_model.hpp"

namespace switchyard::test {
namespace {

using Floats = std::vector<float>;

Doubles doubles(const Floats& x) { return {x.begin(), x.end()}; }

void expect_close(const Floats& have, const Doubles& want, double bound, const char* what) {
  ASSERT_EQ(have.size(), want.size()) << what;
  double largest = 0.1;
  for (const double x : want) largest = std::max(largest, std::abs(x));
  for (std::size_t i = 0; i < have.size(); ++i) {
    ASSERT_NEAR(double{have[i]}, want[i], bound * largest) << what << ", number " << i;
  }
}

/// d(sum of y * dy)/dx of y(x), number by number.
Doubles differences(const std::function<Doubles(const Doubles&)>& function, Doubles x,
                    const Doubles& dy) {
  const auto value = [&] {
    const Doubles y = function(x);
    return std::inner_product(y.begin(), y.end(), dy.begin(), 0.0);
  };
  Doubles gradient;
  for (double& number : x) {
    const double at = number, step = 1e-5;
    number = at + step;
    const double above = value();
    number = at - step;
    gradient.push_back((above - value()) / (2 * step));
    number = at;
  }
  return gradient;
}

TEST(ModelLayers, RmsNormAndItsGradientsAreThoseOfTheFormula) {
  constexpr std::int64_t kRows = 67, kSize = 21;  // two tasks, a size of no vector
  constexpr float kEpsilon = 1e-5F;
  const Floats x = random_floats(kRows * kSize, 1), weight = random_floats(kSize, 2);
  const Floats dy = random_floats(kRows * kSize, 3);
  Floats y(x.size()), scale(kRows), dx(x.size(), 0.5F), dweight(kSize, 7.0F);
  models::rms_norm({x.data(), weight.data(), kRows, kSize, kEpsilon, y.data(), scale.data(), {}});
  expect_close(y, in_double::rms_norm(doubles(x), doubles(weight), double{kEpsilon}), 2e-6, "y");
  models::rms_norm_backward({x.data(), weight.data(), scale.data(), kRows, kSize, dy.data(),
                             dx.data(), dweight.data(), false, nullptr});
  Doubles want = differences(
      [&](const Doubles& v) { return in_double::rms_norm(v, doubles(weight), double{kEpsilon}); },
      doubles(x), doubles(dy));
  for (double& number : want) number += 0.5;  // it is added
  expect_close(dx, want, 3e-6, "dx");
  want = differences(
      [&](const Doubles& v) { return in_double::rms_norm(doubles(x), v, double{kEpsilon}); },
      doubles(weight), doubles(dy));
  expect_close(dweight, want, 3e-6, "dweight");
  models::rms_norm_backward({x.data(), weight.data(), scale.data(), kRows, kSize, dy.data(),
                             dx.data(), dweight.data(), true, nullptr});
  for (double& number : want) number *= 2;
  expect_close(dweight, want, 3e-6, "dweight, accumulated");
}

/// What bf16 makes of them.
Floats rounded(Floats numbers) {
  for (float& number : numbers) number = bf16_to_float(float_to_bf16(number));
  return numbers;
}

class LinearLayer : public testing::TestWithParam<DType> {};

TEST_P(LinearLayer, AndItsGradientsAreTheThreeProducts) {
  ThreadPool pool(2);
  for (const std::int64_t rows : {1, 13, 130, 1030}) {  // 1030: two pieces of the weights' gradient
    constexpr std::int64_t kIn = 19, kOut = 45;
    Floats x = random_floats(rows * kIn, 4), w = random_floats(kOut * kIn, 5);
    Floats dy = random_floats(rows * kOut, 6);
    models::Linear linear(kIn, kOut, GetParam());
    linear.pack(w.data(), nullptr);
    linear.pack_backward(w.data(), nullptr);
    Floats y(dy.size()), dx(x.size()), dw(w.size()), by_threads(dy.size());
    linear.forward(x.data(), rows, y.data(), false, nullptr);
    linear.forward(x.data(), rows, by_threads.data(), false, &pool);
    EXPECT_EQ(y, by_threads);
    if (GetParam() == DType::kBF16) {
      // Operands are rounded, sums are not: of f32 the same numbers would be off by 2^-9.
      x = rounded(x), w = rounded(w), dy = rounded(dy);
    }
    Doubles want = in_double::linear(doubles(x), doubles(w), kIn);
    expect_close(y, want, 2e-6, "y");
    linear.forward(x.data(), rows, y.data(), true, nullptr);
    for (double& number : want) number *= 2;
    expect_close(y, want, 2e-6, "y, added");
    linear.backward_input(dy.data(), rows, dx.data(), nullptr);
    Doubles dx_want(x.size()), dw_want(w.size());
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t o = 0; o < kOut; ++o) {
        const auto d = double{dy[std::size_t(r * kOut + o)]};
        for (std::int64_t i = 0; i < kIn; ++i) {
          dx_want[std::size_t(r * kIn + i)] += d * double{w[std::size_t(o * kIn + i)]};
          dw_want[std::size_t(o * kIn + i)] += d * double{x[std::size_t(r * kIn + i)]};
        }
      }
    }
    expect_close(dx, dx_want, 2e-6, "dx");
    linear.backward_weights(dy.data(), x.data(), rows, dw.data(), false, nullptr);
    expect_close(dw, dw_want, 4e-6, "dw");
    linear.backward_weights(dy.data(), x.data(), rows, dw.data(), true, nullptr);
    for (double& number : dw_want) number *= 2;
    expect_close(dw, dw_want, 4e-6, "dw, accumulated");
  }
}

INSTANTIATE_TEST_SUITE_P(Types, LinearLayer, testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& of) { return std::string(to_string(of.param)); });

TEST(ModelLayers, QueriesAndKeysAreNormalisedAndTurnedAndTheirGradientsGoBack) {
  for (const models::QkNorm norm :
       {models::QkNorm::kNone, models::QkNorm::kHead, models::QkNorm::kWhole}) {
    SCOPED_TRACE(to_string(norm));
    models::ModelConfig config;
    config.heads = 4, config.kv_heads = 2, config.head_dim = 6, config.sequence = 9;
    config.qk_norm = norm, config.rope_theta = 100;
    const models::QueryKeyRows rows(config);
    constexpr std::int64_t kBatch = 2, kPositions = 9, kQ = 24, kK = 12;
    const std::int64_t tokens = kBatch * kPositions;
    const Floats qkv = random_floats(tokens * (kQ + 2 * kK), 7);
    const bool whole = norm == models::QkNorm::kWhole, none = norm == models::QkNorm::kNone;
    const Floats q_weight = random_floats(whole ? kQ : 6, 8),
                 k_weight = random_floats(whole ? kK : 6, 9);
    Floats turned(std::size_t(tokens * (kQ + kK))), scales(std::size_t(tokens * 6));
    const models::QueryKeyRows::Args args{.batch = kBatch,
                                          .positions = kPositions,
                                          .first = 0,
                                          .qkv = qkv.data(),
                                          .q_weight = none ? nullptr : q_weight.data(),
                                          .k_weight = none ? nullptr : k_weight.data(),
                                          .turned = turned.data(),
                                          .scales = scales.data(),
                                          .pool = nullptr};
    rows.forward(args);
    const auto formula = [&](const Doubles& x, const Doubles& wq, const Doubles& wk) {
      Doubles q, k, out;
      for (std::int64_t t = 0; t < tokens; ++t) {
        const auto row = x.begin() + t * (kQ + 2 * kK);
        q.insert(q.end(), row, row + kQ);
        k.insert(k.end(), row + kQ, row + kQ + kK);
      }
      if (!none) {
        q = in_double::rms_norm(q, wq, double{config.norm_epsilon});
        k = in_double::rms_norm(k, wk, double{config.norm_epsilon});
      }
      q = in_double::rope(q, kPositions, 4, 6, 100);
      k = in_double::rope(k, kPositions, 2, 6, 100);
      for (std::int64_t t = 0; t < tokens; ++t) {
        out.insert(out.end(), q.begin() + t * kQ, q.begin() + (t + 1) * kQ);
        out.insert(out.end(), k.begin() + t * kK, k.begin() + (t + 1) * kK);
      }
      return out;
    };
    const Doubles x = doubles(qkv), wq = doubles(q_weight), wk = doubles(k_weight);
    expect_close(turned, formula(x, wq, wk), 2e-6, "turned");
    const Floats dturned = random_floats(tokens * (kQ + kK), 10);
    Floats dqkv(qkv.size(), 3.0F), dq_weight(q_weight.size()), dk_weight(k_weight.size());
    for (std::int64_t t = 0; t < tokens; ++t) {
      std::copy_n(dturned.begin() + t * (kQ + kK), kQ + kK, dqkv.begin() + t * (kQ + 2 * kK));
    }
    rows.backward({.forward = args,
                   .dqkv = dqkv.data(),
                   .dq_weight = dq_weight.data(),
                   .dk_weight = dk_weight.data(),
                   .accumulate = false});
    Doubles want =
        differences([&](const Doubles& v) { return formula(v, wq, wk); }, x, doubles(dturned));
    for (std::int64_t t = 0; t < tokens; ++t) {  // those of v are not touched
      std::fill_n(want.begin() + t * (kQ + 2 * kK) + kQ + kK, kK, 3.0);
    }
    expect_close(dqkv, want, 5e-6, "dqkv");
    if (none) continue;
    expect_close(
        dq_weight,
        differences([&](const Doubles& v) { return formula(x, v, wk); }, wq, doubles(dturned)),
        5e-6, "dq_weight");
    expect_close(
        dk_weight,
        differences([&](const Doubles& v) { return formula(x, wq, v); }, wk, doubles(dturned)),
        5e-6, "dk_weight");
  }
}

struct AttentionCase {
  std::int64_t batch, positions, heads, kv_heads, dim;
};

TEST(ModelLayers, AttentionAndItsGradientsAreThoseOfTheFormula) {
  // One position; grouped heads; more queries than a panel has columns; no multiple of anything.
  for (const AttentionCase c : {AttentionCase{2, 1, 2, 1, 4}, AttentionCase{1, 17, 4, 2, 6},
                                AttentionCase{2, 35, 2, 2, 6}, AttentionCase{1, 70, 2, 1, 36}}) {
    SCOPED_TRACE(c.positions);
    const in_double::AttentionSizes sizes{std::size_t(c.batch), std::size_t(c.positions),
                                          std::size_t(c.heads), std::size_t(c.kv_heads),
                                          std::size_t(c.dim)};
    const std::int64_t of_q = c.heads * c.dim, of_k = c.kv_heads * c.dim;
    const std::int64_t tokens = c.batch * c.positions;
    const Floats q = random_floats(tokens * of_q, 11, 2), k = random_floats(tokens * of_k, 12, 2);
    const Floats v = random_floats(tokens * of_k, 13), dout = random_floats(tokens * of_q, 14);
    Floats out(q.size()), lse(std::size_t(tokens * c.heads)), dq(q.size()), dk(k.size()),
        dv(v.size());
    const models::AttentionArgs args{
        .shape = {c.batch, c.positions, c.positions, c.heads, c.kv_heads, c.dim},
        .q = {q.data(), of_q, c.positions * of_q},
        .k = {k.data(), of_k, c.positions * of_k},
        .v = {v.data(), of_k, c.positions * of_k},
        .out = {out.data(), of_q, c.positions * of_q},
        .lse = lse.data(),
        .pool = nullptr};
    models::attention(args);
    const Doubles q2 = doubles(q), k2 = doubles(k), v2 = doubles(v);
    expect_close(out, in_double::attention(q2, k2, v2, sizes), 3e-6, "out");
    models::attention_backward({.forward = args,
                                .dout = {dout.data(), of_q, c.positions * of_q},
                                .dq = {dq.data(), of_q, c.positions * of_q},
                                .dk = {dk.data(), of_k, c.positions * of_k},
                                .dv = {dv.data(), of_k, c.positions * of_k}});
    if (c.positions > (kSanitized ? 17 : 35)) continue;  // differences of differences take too long
    const auto gradient = [&](const Doubles& of, const auto& function) {
      return differences(function, of, doubles(dout));
    };
    expect_close(
        dq, gradient(q2, [&](const Doubles& x) { return in_double::attention(x, k2, v2, sizes); }),
        1e-5, "dq");
    expect_close(
        dk, gradient(k2, [&](const Doubles& x) { return in_double::attention(q2, x, v2, sizes); }),
        1e-5, "dk");
    expect_close(
        dv, gradient(v2, [&](const Doubles& x) { return in_double::attention(q2, k2, x, sizes); }),
        1e-5, "dv");
  }
}

/// By the definition, in double: each key that a position sees, and a logit without a value.
Doubles windowed(const Floats& q, const Floats& k, const Floats& v, const AttentionCase& c,
                 double scale, std::int64_t window, const Floats& sinks) {
  Doubles out;
  for (std::int64_t i = 0; i < c.positions; ++i) {
    for (std::int64_t n = 0; n < c.heads; ++n) {
      const std::int64_t m = n / (c.heads / c.kv_heads);
      const auto number = [&](const Floats& of, std::int64_t heads, std::int64_t at, std::int64_t h,
                              std::int64_t d) {
        return double{of[size_t((at * heads + h) * c.dim + d)]};
      };
      Doubles sums(std::size_t(c.dim));
      double all = sinks.empty() ? 0 : std::exp(double{sinks[std::size_t(n)]});
      for (std::int64_t j = window == 0 ? 0 : std::max<std::int64_t>(0, i - window + 1); j <= i;
           ++j) {
        double score = 0;
        for (std::int64_t d = 0; d < c.dim; ++d) {
          score += number(q, c.heads, i, n, d) * number(k, c.kv_heads, j, m, d);
        }
        const double weight = std::exp(score * scale);
        all += weight;
        for (std::int64_t d = 0; d < c.dim; ++d) {
          sums[std::size_t(d)] += weight * number(v, c.kv_heads, j, m, d);
        }
      }
      for (const double sum : sums) out.push_back(sum / all);
    }
  }
  return out;
}

TEST(ModelLayers, AttentionWithWindowsSinksAndAScaleIsThatOfTheFormula) {
  for (const AttentionCase c : {AttentionCase{1, 17, 4, 2, 6}, AttentionCase{1, 70, 2, 1, 10}}) {
    const std::int64_t of_q = c.heads * c.dim, of_k = c.kv_heads * c.dim;
    const Floats q = random_floats(c.positions * of_q, 31, 2);
    const Floats k = random_floats(c.positions * of_k, 32, 2);
    const Floats v = random_floats(c.positions * of_k, 33);
    Floats sinks{-30, 0.5, 4, 60};  // no share, some, most, nearly all
    sinks.resize(std::size_t(c.heads));
    for (const std::int64_t window : {0, 1, 5, 16, 33, 100}) {
      for (const bool sink : {false, true}) {
        SCOPED_TRACE(window);
        Floats out(q.size());
        models::attention({.shape = {1, c.positions, c.positions, c.heads, c.kv_heads, c.dim},
                           .q = {q.data(), of_q, 0},
                           .k = {k.data(), of_k, 0},
                           .v = {v.data(), of_k, 0},
                           .out = {out.data(), of_q, 0},
                           .lse = nullptr,
                           .pool = nullptr,
                           .scale = 0.3F,
                           .window = window,
                           .sinks = sink ? sinks.data() : nullptr});
        expect_close(out, windowed(q, k, v, c, 0.3F, window, sink ? sinks : Floats{}), 3e-6, "out");
      }
    }
  }
}

TEST(ModelLayers, AttentionOfLaterPositionsAloneHasTheBitsOfTheWholeSequence) {
  constexpr std::int64_t kPositions = 45, kHeads = 2, kDim = 12, kRow = kHeads * kDim;
  const Floats q = random_floats(kPositions * kRow, 15), k = random_floats(kPositions * kRow, 16);
  const Floats v = random_floats(kPositions * kRow, 17);
  const auto run = [&](std::int64_t first) {
    const std::int64_t queries = kPositions - first;
    Floats out(std::size_t(queries * kRow));
    models::attention({.shape = {1, queries, kPositions, kHeads, kHeads, kDim},
                       .q = {q.data() + first * kRow, kRow, 0},
                       .k = {k.data(), kRow, 0},
                       .v = {v.data(), kRow, 0},
                       .out = {out.data(), kRow, 0},
                       .lse = nullptr,
                       .pool = nullptr});
    return out;
  };
  const Floats whole = run(0);
  for (const std::int64_t first : {1, 31, 44}) {
    EXPECT_EQ(run(first), Floats(whole.begin() + first * kRow, whole.end())) << first;
  }
}

TEST(ModelLayers, CrossEntropyAndItsGradientAreThoseOfTheFormula) {
  for (const std::int64_t vocabulary : {3, 16, 53}) {
    constexpr std::int64_t kRows = 19;
    Floats logits = random_floats(kRows * vocabulary, 18, 5);
    logits[1] = 300;  // far from the others
    const Doubles x = doubles(logits);
    Ids targets;
    for (std::int32_t row = 0; row < kRows; ++row) {
      targets.push_back(row % 5 == 4 ? -1 : row % static_cast<std::int32_t>(vocabulary));
    }
    std::vector<double> nll(kRows);
    const auto run = [&](bool backward) {
      models::cross_entropy({.logits = logits.data(),
                             .targets = targets.data(),
                             .rows = kRows,
                             .vocabulary = vocabulary,
                             .nll = nll.data(),
                             .backward = backward,
                             .scale = 0.25F,
                             .pool = nullptr});
    };
    run(true);
    const Doubles want = in_double::nll(x, targets, std::size_t(vocabulary));
    for (std::size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(nll[i], want[i], 1e-5) << i;
    const auto formula = [&](const Doubles& of) {
      return in_double::nll(of, targets, std::size_t(vocabulary));
    };
    expect_close(logits, differences(formula, x, Doubles(kRows, 0.25)), 2e-6, "dlogits");
  }
}

TEST(ModelLayers, AnEmbeddingsGradientAddsUpTheRowsOfEachTokenAndClearsTheOthers) {
  const Ids ids = {4, 0, 4, 4, 2, 0};
  constexpr std::int64_t kHidden = 5, kVocabulary = 37;
  const Floats table = random_floats(kVocabulary * kHidden, 19), dout = random_floats(30, 20);
  Floats out(30), dtable(table.size(), 9.0F);
  const models::EmbeddingArgs args{ids.data(), 6, kVocabulary, kHidden, nullptr};
  models::embed(args, table.data(), out.data());
  Doubles want(table.size());
  for (std::size_t t = 0; t < ids.size(); ++t) {
    for (std::size_t i = 0; i < kHidden; ++i) {
      EXPECT_EQ(out[t * kHidden + i], table[std::size_t(ids[t]) * kHidden + i]);
      want[std::size_t(ids[t]) * kHidden + i] += double{dout[t * kHidden + i]};
    }
  }
  models::embed_backward(args, dout.data(), dtable.data(), false);
  expect_close(dtable, want, 1e-6, "dtable");
  models::embed_backward(args, dout.data(), dtable.data(), true);
  for (double& number : want) number *= 2;
  expect_close(dtable, want, 1e-6, "dtable, accumulated");
}

}  // namespace
}  // namespace switchyard::test

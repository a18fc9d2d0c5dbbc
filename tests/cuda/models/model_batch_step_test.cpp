// The stages of a token step of some dozens of sequences, against plain loops in double.
#include "models/gpu/generation/batch/stages.hpp"

#include "models/gpu/generation/batch/whole_experts.hpp"
#include "tests/cuda/models/typed.hpp"

namespace switchyard::models::gpu {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// Fails with: a part left out, one without its weight, a sum that is written without its parts.
void expect_sums(std::int64_t rows, std::int64_t hidden, std::int32_t top_k, bool weighed,
                 std::int32_t splits = 1) {
  SCOPED_TRACE(testing::Message() << rows << " x " << hidden << " K " << top_k << " x " << splits);
  const std::vector<float> x = random_floats(rows * hidden, 1), weight = random_floats(hidden, 2),
                           parts = random_floats(splits * rows * top_k * hidden, 3),
                           share = random_floats(rows * top_k, 4);
  const DeviceArray<float> device_x(x), device_weight(weight), device_parts(parts),
      device_share(share), sum(at(rows * hidden));
  const Typed y(true, rows * hidden);
  sum_norm({.x = device_x.data(),
            .parts = top_k > 0 ? device_parts.data() : nullptr,
            .share = weighed ? device_share.data() : nullptr,
            .top_k = top_k,
            .splits = splits,
            .sum = sum.data(),
            .weight = device_weight.data(),
            .y = y.data(),
            .rows = rows,
            .hidden = hidden,
            .epsilon = 1e-5F});
  Doubles want, normed;
  for (std::int64_t r = 0; r < rows; ++r) {
    double squares = 0;
    for (std::int64_t i = 0; i < hidden; ++i) {
      double value = x[at(r * hidden + i)];
      for (std::int64_t slot = r * top_k; slot < (r + 1) * top_k; ++slot) {
        for (std::int64_t split = 0; split < splits; ++split) {
          const double part = parts[at((split * rows * top_k + slot) * hidden + i)];
          value += (weighed ? share[at(slot)] : 1.0) * part;
        }
      }
      want.push_back(value);
      squares += value * value;
    }
    const double scale = 1 / std::sqrt(squares / static_cast<double>(hidden) + 1e-5);
    for (std::int64_t i = 0; i < hidden; ++i) {
      normed.push_back(want[at(r * hidden + i)] * scale * weight[at(i)]);
    }
  }
  expect_close(sum.get(), want, 1e-5, "sum");
  expect_close(y.get(), normed, bound_of(true), "norm");
}

TEST(ModelStages, SmallSumsOfABatchsExperts) {
  expect_sums(9, 8, 0, false);
  expect_sums(64, 512, 2, true);
  expect_sums(13, 72, 5, true);
  expect_sums(33, 1032, 1, false);
  expect_sums(2, 4096, 3, true);
  expect_sums(64, 512, 2, true, 16);
  expect_sums(5, 36, 3, true, 11);
}

// Fails with: columns behind the last whole block, a warp's part left out, rows of another tile.
void expect_product(std::int64_t rows, std::int64_t in, std::int64_t out, bool f32) {
  SCOPED_TRACE(testing::Message() << rows << " x " << in << " x " << out << " f32 " << f32);
  const Typed x(true, random_floats(rows * in, 1)), w(true, random_floats(out * in, 2));
  const std::vector<float> add = random_floats(rows * out, 3);
  const DeviceArray<float> device_add(add);
  const Typed y(!f32, rows * out);
  batch_product({.x = x.data(),
                 .w = w.data(),
                 .add = f32 ? device_add.data() : nullptr,
                 .y = y.data(),
                 .y_is_f32 = f32,
                 .rows = rows,
                 .in = in,
                 .out = out});
  Doubles want;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t o = 0; o < out; ++o) {
      double sum = f32 ? add[at(r * out + o)] : 0;
      for (std::int64_t i = 0; i < in; ++i) sum += x[r * in + i] * w[o * in + i];
      want.push_back(sum);
    }
  }
  expect_close(y.get(), want, bound_of(!f32), "y");
}

TEST(ModelStages, SmallProductsOfABatchsRows) {
  for (const std::int64_t rows : {1, 8, 9, 16, 17, 32, 33, 64}) {
    expect_product(rows, 64, 37, rows % 2 == 0);
    expect_product(rows, 8, 5, rows % 2 != 0);
  }
  expect_product(64, 512, 96, false);
  expect_product(50, 1048, 33, true);   // more than a chunk of columns
  expect_product(20, 4096, 256, true);  // four of them
  expect_product(64, 72, 5000, false);  // blocks of two tiles of outputs
  expect_product(33, 40, 5003, true);
}

struct Experts {
  std::int64_t rows, h, i;
  std::int32_t experts, top_k;
  /// Row -> the first of the top_k neighbouring experts that it has chosen.
  std::int32_t (*first)(std::int64_t row);
  bool is_whole = false;  ///< One kernel.
};

double silu(double x) { return x / (1 + std::exp(-x)); }

// Fails with: a row that an expert has not found, rows beyond those that are gathered at a time,
// columns or outputs that are no whole tile, gates times another one's up, a part of the sums that
// a block does not write, inner columns of a block's neighbour.
void expect_experts(const Experts& c) {
  SCOPED_TRACE(testing::Message() << c.rows << " H " << c.h << " I " << c.i << " E " << c.experts
                                  << " K " << c.top_k);
  const Typed x(true, random_floats(c.rows * c.h, 1)),
      w13(true, random_floats(c.experts * 2 * c.i * c.h, 2)),
      w2(true, random_floats(c.experts * c.h * c.i, 3));
  const bool dense = c.first == nullptr;
  std::vector<std::int32_t> expert;
  for (std::int64_t r = 0; r < c.rows; ++r) {
    for (std::int32_t k = 0; k < c.top_k; ++k) {
      expert.push_back(dense ? 0 : (c.first(r) + k) % c.experts);
    }
  }
  const DeviceArray<std::int32_t> device_expert(expert);
  const std::int64_t slots = c.rows * c.top_k;
  const Typed inner(true, slots * c.i);
  const std::int32_t splits = batch_expert_splits(c.experts, c.h, c.i);
  const DeviceArray<float> parts(std::vector<float>(at(splits * slots * c.h), NAN));
  const BatchExpertsArgs args{.w13 = w13.data(),
                              .w2 = w2.data(),
                              .expert = dense ? nullptr : device_expert.data(),
                              .num_experts = c.experts,
                              .top_k = c.top_k,
                              .x = x.data(),
                              .inner = inner.data(),
                              .parts = parts.data(),
                              .rows = c.rows,
                              .h = c.h,
                              .i = c.i};
  ASSERT_TRUE(batch_experts_fit(c.h, c.i));
  batch_experts(args);
  Doubles activated;
  std::vector<float> least, most;  // what sums in f32 may come to, before it is rounded to bf16
  for (std::int64_t s = 0; s < slots; ++s) {
    const std::int64_t row = s / c.top_k, e = expert[at(s)];
    for (std::int64_t i = 0; i < c.i; ++i) {
      double gate = 0, up = 0, of_gate = 0, of_up = 0;
      for (std::int64_t j = 0; j < c.h; ++j) {
        const double to_gate = x[row * c.h + j] * w13[(2 * e * c.i + i) * c.h + j];
        const double to_up = x[row * c.h + j] * w13[((2 * e + 1) * c.i + i) * c.h + j];
        gate += to_gate;
        up += to_up;
        of_gate += std::abs(to_gate);
        of_up += std::abs(to_up);
      }
      const double value = silu(gate) * up;
      const double error = 1e-5 * (1.1 * of_gate * std::abs(up) + std::abs(silu(gate)) * of_up);
      activated.push_back(value);
      least.push_back(static_cast<float>(value - error));
      most.push_back(static_cast<float>(value + error));
    }
  }
  // Inner values of one kernel stay there: two of bf16 where it may have rounded to either.
  const bool is_whole = has_whole_experts(c.experts, c.h, c.i);
  EXPECT_EQ(is_whole, c.is_whole);
  if (is_whole) {
    least = loaded_as_floats(DType::kBF16, stored_as(DType::kBF16, least));
    most = loaded_as_floats(DType::kBF16, stored_as(DType::kBF16, most));
  } else {
    expect_close(inner.get(), activated, bound_of(true), "inner");
    least = most = inner.get();
  }
  const std::vector<float> got = parts.get();
  for (std::int64_t s = 0; s < slots; ++s) {
    const std::int64_t e = expert[at(s)];
    for (std::int64_t j = 0; j < c.h; ++j) {
      double want = 0, error = 0, magnitude = 0, sum = 0;
      for (std::int64_t i = 0; i < c.i; ++i) {
        const double w = w2[(e * c.h + j) * c.i + i];
        const double low = least[at(s * c.i + i)], high = most[at(s * c.i + i)];
        want += (low + high) / 2 * w;
        error += (high - low) / 2 * std::abs(w);
        magnitude += std::abs(high * w);
      }
      for (std::int64_t split = 0; split < splits; ++split) {
        sum += got[at((split * slots + s) * c.h + j)];
      }
      ASSERT_NEAR(sum, want, error + 1e-5 * magnitude) << "slot " << s << ", output " << j;
    }
  }
}

TEST(ModelStages, SmallExpertsOfABatchsRows) {
  const auto spread = [](std::int64_t row) { return static_cast<std::int32_t>(row * 7 % 31); };
  const auto one = [](std::int64_t) { return 2; };
  expect_experts({9, 64, 32, 4, 2, spread});
  expect_experts({16, 40, 24, 5, 5, spread});  // all experts, no whole block of columns
  expect_experts({64, 72, 56, 7, 1, one});     // all rows to one: more than are gathered at once
  expect_experts({64, 72, 56, 8, 1, one, true});
  expect_experts({33, 264, 216, 40, 3, spread, true});  // a tile more than warps
  expect_experts({33, 264, 200, 40, 3, spread});  // a warp would fall behind by more than a ring
  expect_experts({64, 16, 8, 150, 4, spread, true});   // more experts than multiprocessors
  expect_experts({60, 136, 520, 8, 3, spread, true});  // a last tile of eight outputs
  expect_experts({50, 104, 1032, 1, 1, nullptr});      // a dense layer, a tile of several warps
}

TEST(ModelStages, ExpertsOfABatchsRowsThatAreLarge) {
  const auto spread = [](std::int64_t row) { return static_cast<std::int32_t>(row * 5 % 7); };
  expect_experts({12, 2048, 72, 4, 2, spread});
  expect_experts({12, 64, 4096, 2, 1, spread});  // few rows fit
  expect_experts({64, 512, 1024, 8, 2, spread, true});
  expect_experts({64, 768, 768, 32, 4, spread, true});
  expect_experts({20, 1024, 128, 64, 8, spread, true});  // tiles of w2 are more than of w13
  expect_experts({12, 40, 1040, 130, 2, spread});        // more inner columns than lanes that copy
}

TEST(ModelStages, SmallExpertsOfABatchThatDoNotFit) {
  EXPECT_TRUE(batch_experts_fit(4096, 1024));
  EXPECT_FALSE(batch_experts_fit(512, 8192));
  EXPECT_FALSE(batch_experts_fit(8192, 512));
}

}  // namespace
}  // namespace switchyard::models::gpu

// The norm before the experts together with their router, against plain loops in double.
#include "models/gpu/generation/stages.hpp"
#include "tests/cuda/models/typed.hpp"

namespace switchyard::models::gpu {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// Fails with: a tie to the higher expert, a bias in the weights, an expert that is chosen twice; a
// delta left out of the norm or the sum.
void expect_routing(std::int64_t rows, std::int64_t size, std::int32_t experts, std::int32_t top_k,
                    bool biased, bool renormalize, bool adds = false) {
  SCOPED_TRACE(testing::Message() << rows << " x " << size << " E " << experts << " K " << top_k);
  std::vector<float> x = random_floats(rows * size, 1);
  const std::vector<float> gate = random_floats(experts * size, 2, 0.1F),
                           bias = random_floats(experts, 3, 0.2F);
  const DeviceArray<float> device_x(x), weight(std::vector<float>(at(size), 1.5F)),
      device_gate(gate), device_bias(bias), share(at(rows * top_k));
  const DeviceArray<std::int32_t> expert(at(rows * top_k));
  const Typed y(true, rows * size);
  const Typed delta(true, random_floats(rows * size, 4));
  const DeviceArray<float> sum(at(rows * size));
  norm_route({.x = device_x.data(),
              .delta = adds ? delta.data() : nullptr,
              .sum = adds ? sum.data() : nullptr,
              .weight = weight.data(),
              .y = y.data(),
              .gate = device_gate.data(),
              .bias = biased ? device_bias.data() : nullptr,
              .expert = expert.data(),
              .share = share.data(),
              .rows = rows,
              .size = size,
              .experts = experts,
              .top_k = top_k,
              .renormalize = renormalize,
              .scale = 2.5F,
              .epsilon = 1e-5F,
              .bf16 = true,
              .stream = nullptr});
  for (std::int64_t i = 0; adds && i < rows * size; ++i) x[at(i)] += static_cast<float>(delta[i]);
  if (adds) {
    EXPECT_EQ(sum.get(), x);
  }
  const std::vector<float> normed = y.get(), shares = share.get();
  const std::vector<std::int32_t> chosen = expert.get();
  for (std::int64_t r = 0; r < rows; ++r) {
    Doubles probability;
    double total = 0, of_chosen = 0, squares = 0;
    for (std::int64_t i = r * size; i < (r + 1) * size; ++i) squares += double{x[at(i)]} * x[at(i)];
    const double scale = 1.5 / std::sqrt(squares / static_cast<double>(size) + 1e-5);
    for (std::int64_t e = 0; e < experts; ++e) {
      double logit = 0;
      for (std::int64_t i = 0; i < size; ++i) {
        const float of_row = normed[at(r * size + i)];
        ASSERT_NEAR(of_row, x[at(r * size + i)] * scale, 0.01 * std::abs(of_row) + 1e-6);
        logit += double{of_row} * double{gate[at(e * size + i)]};
      }
      probability.push_back(std::exp(logit));
      total += probability.back();
    }
    std::vector<bool> taken(at(experts));
    for (std::int32_t k = 0; k < top_k; ++k) {
      const std::int32_t id = chosen[at(r * top_k + k)];
      ASSERT_TRUE(id >= 0 && id < experts && !taken[at(id)]) << id;
      taken[at(id)] = true;
      of_chosen += probability[at(id)];
      const auto key = [&](std::int32_t e) {
        return biased ? probability[at(e)] / total + double{bias[at(e)]}
                      : std::log(probability[at(e)]);
      };
      for (std::int32_t e = 0; e < experts; ++e) {
        if (!taken[at(e)]) {
          ASSERT_LE(key(e), key(id) + 1e-4) << "row " << r << " choice " << k;
        }
      }
    }
    for (std::int32_t k = 0; k < top_k; ++k) {
      const double want =
          2.5 * probability[at(chosen[at(r * top_k + k)])] / (renormalize ? of_chosen : total);
      ASSERT_NEAR(shares[at(r * top_k + k)], want, 1e-3 * want + 1e-6);
    }
  }
}

TEST(ModelStages, SmallRoutersOfNormedRows) {
  expect_routing(1, 64, 8, 2, false, true);
  expect_routing(8, 64, 5, 5, true, true);
  expect_routing(3, 72, 32, 4, true, false);
  expect_routing(2, 200, 256, 32, false, false);
  expect_routing(5, 768, 33, 1, true, true);
  expect_routing(70, 72, 8, 2, false, true, true);
  expect_routing(9, 264, 40, 3, true, true, true);
}

TEST(ModelStages, SmallEqualLogitsGoToTheLowerExperts) {
  const DeviceArray<float> x(std::vector<float>(64, 1.0F)),
      gate(std::vector<float>(64 * 40, 0.25F));
  const DeviceArray<float> weight(std::vector<float>(64, 1.0F)), share(std::size_t{3});
  const DeviceArray<std::int32_t> expert(std::size_t{3});
  const Typed y(false, 64);
  norm_route({.x = x.data(),
              .weight = weight.data(),
              .y = y.data(),
              .gate = gate.data(),
              .bias = nullptr,
              .expert = expert.data(),
              .share = share.data(),
              .rows = 1,
              .size = 64,
              .experts = 40,
              .top_k = 3,
              .renormalize = true,
              .scale = 1,
              .epsilon = 1e-5F,
              .bf16 = false,
              .stream = nullptr});
  EXPECT_EQ(expert.get(), (std::vector<std::int32_t>{0, 1, 2}));
  for (const float one : share.get()) EXPECT_NEAR(one, 1.0 / 3, 1e-6);
}

}  // namespace
}  // namespace switchyard::models::gpu

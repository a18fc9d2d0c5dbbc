// What a router's logits are made of, against definitions in double, and the way back against
// differences of these.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <numbers>
#include <string>
#include <vector>

#include "switchyard/layer.hpp"
#include "switchyard/routing/router_kinds.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/random_values.hpp"

namespace switchyard {
namespace {

using Doubles = std::vector<double>;
using Kind = RouterNetwork::Kind;

constexpr std::int64_t kTokens = 7, kExperts = 6, kHidden = 11, kInner = 5;
constexpr const char* kNetworks[] = {"cosine", "mlp", "hadamard"};

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

/// y [rows] = W x + b, from place `first` of the numbers on; b follows W where there is one.
Doubles product(const Doubles& numbers, std::int64_t first, std::int64_t rows, const Doubles& x,
                bool bias) {
  const std::int64_t cols = std::ssize(x);
  Doubles y;
  for (std::int64_t r = 0; r < rows; ++r) {
    double sum = bias ? numbers[at(first + rows * cols + r)] : 0;
    for (std::int64_t c = 0; c < cols; ++c) sum += numbers[at(first + r * cols + c)] * x[at(c)];
    y.push_back(sum);
  }
  return y;
}

double gelu(double x) { return 0.5 * x * (1 + std::erf(x / std::numbers::sqrt2)); }

Doubles unit(const Doubles& x) {
  double sum = kCosineEpsilon;
  for (const double v : x) sum += v * v;
  Doubles y;
  for (const double v : x) y.push_back(v / std::sqrt(sum));
  return y;
}

/// All that a router's logits are a function of.
struct Inputs {
  Doubles tokens, gate, network, bias;

  [[nodiscard]] Doubles logits(Kind kind, std::int64_t width) const {
    Doubles out;
    for (std::int64_t t = 0; t < kTokens; ++t) {
      const Doubles x(tokens.begin() + t * kHidden, tokens.begin() + (t + 1) * kHidden);
      Doubles z = x;
      if (kind != Kind::kLinear) z = product(network, 0, width, x, kind != Kind::kCosine);
      if (kind == Kind::kCosine) z = unit(z);
      if (kind == Kind::kMlp || kind == Kind::kHadamard) {
        for (double& v : z) v = gelu(v);
      }
      if (kind == Kind::kHadamard) {
        z = product(network, width * (kHidden + 1), kHidden, z, true);
        for (std::size_t h = 0; h < z.size(); ++h) z[h] *= x[h];
      }
      for (std::int64_t e = 0; e < kExperts; ++e) {
        const std::int64_t size = std::ssize(z);
        Doubles row(gate.begin() + e * size, gate.begin() + (e + 1) * size);
        double scale = 1;
        if (kind == Kind::kCosine) {
          row = unit(row);
          scale = std::min(std::exp(network.back()), 100.0);
        }
        double sum = bias[at(e)];
        for (std::size_t i = 0; i < z.size(); ++i) sum += scale * row[i] * z[i];
        out.push_back(sum);
      }
    }
    return out;
  }
};

Doubles widened(const std::vector<float>& values) { return {values.begin(), values.end()}; }

std::vector<float> sized(std::int64_t size, unsigned seed, float by) {
  std::vector<float> values = random_floats(size, seed);
  for (float& value : values) value *= by;
  return values;
}

class RouterNetworks : public testing::Test {
 protected:
  void use(const std::string& words, float log_scale = 0.7F) {
    RouterConfig base{.num_experts = kExperts};
    base.kind = TopKRouter{.top_k = 2};
    model.config.router = parse_router(words, base);
    model.config.experts = {.num_experts = kExperts, .hidden = kHidden, .inner = kInner};
    model.experts = make_memory_source(model.config.experts, DType::kF32, w13.data(), w2.data());
    const RouterNetwork& network = model.config.router.network;
    gate = sized(kExperts * network.features(kHidden), 5, 1);
    parameters = sized(network.size(kHidden), 6, 0.5F);
    if (network.kind == Kind::kCosine) parameters.back() = log_scale;
    point();
  }
  /// The layer's parameters are this object's, where they lie.
  void point() {
    const auto view = [](const std::vector<float>& values) {
      return values.empty()
                 ? Parameter()
                 : Parameter(values.data(), DType::kF32, std::ssize(values), Backend::kCpu);
    };
    model.gate = view(gate);
    model.router_network = view(parameters);
    model.router_bias = view(bias);
  }
  [[nodiscard]] std::int64_t width() const { return model.config.router.network.inner(kHidden); }
  [[nodiscard]] Inputs inputs() const {
    return {widened(x), widened(gate), widened(parameters), widened(bias)};
  }
  static RawMatrix raw(std::vector<float>& values, std::int64_t rows) {
    return {reinterpret_cast<std::byte*>(values.data()), DType::kF32, rows,
            std::ssize(values) / rows};
  }
  static ConstRawMatrix raw(const std::vector<float>& values, std::int64_t rows) {
    return {reinterpret_cast<const std::byte*>(values.data()), DType::kF32, rows,
            std::ssize(values) / rows};
  }

  /// One forward that saves; the logits.
  std::vector<float> forward(MoeLayer& layer, SavedForward& saved) const {
    std::vector<float> out(x.size());
    layer.forward({.tokens = raw(x, kTokens), .out = raw(out, kTokens), .saved = &saved});
    const Matrix<const float> logits = saved.logits();
    return {logits.data, logits.data + logits.size()};
  }

  struct Gradients {
    std::vector<float> tokens, gate, bias, network;
    bool operator==(const Gradients&) const = default;
  };
  /// Of sum of dlogits * logits. `start` is what is added to.
  Gradients backward(int threads, const Gradients* start = nullptr) const {
    MoeLayer layer(model, {.num_threads = threads});
    SavedForward saved;
    (void)forward(layer, saved);
    const auto memory = [](std::size_t size) { return std::vector<float>(size, NAN); };
    Gradients g{memory(x.size()), memory(gate.size()), memory(bias.size()),
                memory(parameters.size())};
    if (start != nullptr) g = *start;
    const std::vector<float> dout(x.size());
    layer.backward({.saved = &saved,
                    .dout = raw(dout, kTokens),
                    .dlogits = {dlogits.data(), {kTokens, kExperts}},
                    .dtokens = raw(g.tokens, kTokens),
                    .dgate = raw(g.gate, kExperts),
                    .drouter_bias = {g.bias.data(), {kExperts}},
                    .drouter_network = {parameters.empty() ? nullptr : g.network.data(),
                                        {std::ssize(parameters)}},
                    .accumulate = start != nullptr});
    return g;
  }

  std::vector<float> x = sized(kTokens * kHidden, 1, 1);
  std::vector<float> w13 = random_floats(kExperts * 2 * kInner * kHidden, 2);
  std::vector<float> w2 = random_floats(kExperts * kHidden * kInner, 3);
  std::vector<float> bias = random_floats(kExperts, 4);
  std::vector<float> dlogits = random_floats(kTokens * kExperts, 7);
  std::vector<float> gate, parameters;
  LayerModel model;
};

TEST_F(RouterNetworks, HaveTheLogitsOfTheirDefinitions) {
  for (const char* name : kNetworks) {
    for (const char* width_word : {"", ",width=1", ",width=9"}) {
      use(std::string("top-k:network=") + name + width_word);
      MoeLayer layer(model, {});
      SavedForward saved;
      const std::vector<float> have = forward(layer, saved);
      const Doubles want = inputs().logits(model.config.router.network.kind, width());
      for (std::size_t i = 0; i < want.size(); ++i) {
        ASSERT_NEAR(double{have[i]}, want[i], 1e-5 * (1 + std::abs(want[i]))) << name << i;
      }
    }
  }
}

TEST_F(RouterNetworks, HaveTheGradientsOfDifferences) {
  for (const char* name : kNetworks) {
    use(std::string("top-k:network=") + name + ",width=9");
    const Kind kind = model.config.router.network.kind;
    const Gradients have = backward(1);
    EXPECT_TRUE(have == backward(2)) << name;
    Inputs at_point = inputs();
    const auto loss = [&] {
      double sum = 0;
      const Doubles logits = at_point.logits(kind, width());
      for (std::size_t i = 0; i < logits.size(); ++i) sum += double{dlogits[i]} * logits[i];
      return sum;
    };
    const auto check = [&](const char* of, Doubles& numbers, const std::vector<float>& gradient) {
      ASSERT_EQ(numbers.size(), gradient.size());
      for (std::size_t i = 0; i < numbers.size(); ++i) {
        const double before = numbers[i], h = 1e-5;
        numbers[i] = before + h;
        const double above = loss();
        numbers[i] = before - h;
        const double want = (above - loss()) / (2 * h);
        numbers[i] = before;
        ASSERT_NEAR(double{gradient[i]}, want, 2e-5 * (1 + std::abs(want)))
            << name << ": " << of << " " << i;
      }
    };
    check("tokens", at_point.tokens, have.tokens);
    check("gate", at_point.gate, have.gate);
    check("bias", at_point.bias, have.bias);
    check("network", at_point.network, have.network);

    Gradients twice = backward(1, &have);
    EXPECT_TRUE(twice.tokens == have.tokens) << name;  // written, not added
    const auto expect_twice = [&](const std::vector<float>& sums, const std::vector<float>& once) {
      for (std::size_t i = 0; i < once.size(); ++i) {
        ASSERT_NEAR(sums[i], 2 * once[i], 1e-5F * (1 + std::abs(once[i]))) << name << i;
      }
    };
    expect_twice(twice.gate, have.gate);
    expect_twice(twice.bias, have.bias);
    expect_twice(twice.network, have.network);
  }
}

TEST_F(RouterNetworks, LinearIsTheGateAloneByItsBits) {
  use("top-k");
  MoeLayer plain(model, {});
  SavedForward saved;
  const std::vector<float> logits = forward(plain, saved);
  const Gradients gradients = backward(1);
  use("top-k:network=linear");
  EXPECT_EQ(model.config.router.network.size(kHidden), 0);
  MoeLayer linear(model, {});
  EXPECT_TRUE(forward(linear, saved) == logits);
  EXPECT_TRUE(backward(1) == gradients);
}

TEST_F(RouterNetworks, AScaleBeyondItsClampLearnsNothingAndZerosHaveNoDirection) {
  use("top-k:network=cosine,width=3", 5.0F);
  EXPECT_EQ(backward(1).network.back(), 0);
  const Doubles want = inputs().logits(Kind::kCosine, 3);
  MoeLayer layer(model, {});
  SavedForward saved;
  EXPECT_NEAR(double{forward(layer, saved)[0]}, want[0], 1e-3);
  std::fill(x.begin(), x.begin() + kHidden, 0.0F);
  const std::vector<float> logits = forward(layer, saved);
  for (std::size_t e = 0; e < at(kExperts); ++e) EXPECT_EQ(logits[e], bias[e]);
  for (const float g : backward(1).tokens) EXPECT_TRUE(std::isfinite(g));
}

TEST_F(RouterNetworks, HaveAsManyParametersAsTheySay) {
  const auto size = [](Kind kind, std::int32_t width, std::int64_t hidden) {
    const RouterNetwork network{.kind = kind, .width = width};
    return std::pair(network.size(hidden), network.features(hidden));
  };
  EXPECT_EQ(size(Kind::kLinear, 0, 40), std::pair(std::int64_t{0}, std::int64_t{40}));
  EXPECT_EQ(size(Kind::kMlp, 0, 40), std::pair(std::int64_t{64 * 40 + 64}, std::int64_t{64}));
  EXPECT_EQ(size(Kind::kMlp, 0, 200), std::pair(std::int64_t{100 * 200 + 100}, std::int64_t{100}));
  EXPECT_EQ(size(Kind::kCosine, 3, 40), std::pair(std::int64_t{3 * 40 + 1}, std::int64_t{3}));
  EXPECT_EQ(size(Kind::kHadamard, 3, 40),
            std::pair(std::int64_t{2 * 3 * 40 + 3 + 40}, std::int64_t{40}));
}

TEST_F(RouterNetworks, WhatIsWrongIsNamed) {
  const auto bad = [&](const char* words, const std::function<void()>& call) {
    test::expect_error(ErrorCode::kInvalidArgument, words, call);
  };
  bad("width=4 with network=linear", [&] { use("top-k:width=4"); });
  bad("network='deep' is not one of", [&] { use("top-k:network=deep"); });
  bad("no option 'network'", [&] { use("hash:network=mlp"); });
  bad("no option 'network'", [&] { use("chain:network=mlp"); });
  RouterConfig chain{.num_experts = 4};
  chain.kind = TopKRouter{.top_k = 1};
  chain.chain.iterations = 2;
  chain.network.kind = Kind::kMlp;
  bad("network=mlp with a chain", [&] { check(chain); });
  use("top-k:network=mlp,width=4");
  parameters.pop_back();
  point();
  bad("router_network has 47 values, want 48", [&] { MoeLayer layer(model, {}); });
  use("top-k:network=mlp,width=4");
  RouterConfig other = model.config.router;
  other.network.kind = Kind::kCosine;
  bad("the router has network=cosine, the layer's parameters are of network=mlp",
      [&] { use_router(model, other); });
  test::expect_error(ErrorCode::kUnsupported,
                     "the router top-k with network=mlp of width=4 on CUDA: its kernels take "
                     "multiples of 8",
                     [&] { MoeLayer layer(model, {.backend = Backend::kCuda}); });
  use("top-k");
  MoeLayer layer(model, {});
  SavedForward saved;
  (void)forward(layer, saved);
  std::vector<float> dout(x.size()), one(1);
  bad("drouter_network is asked for, but the router's network is linear", [&] {
    layer.backward({.saved = &saved,
                    .dout = raw(std::as_const(dout), kTokens),
                    .drouter_network = {one.data(), {1}}});
  });
}

}  // namespace
}  // namespace switchyard

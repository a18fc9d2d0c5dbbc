#include "reference/reference.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>

#include "verify/plain_source.hpp"

// The oracle's own tests: right results computed in fp32, in several orders, lie within its bounds;
// wrong ones do not. The fp32 layer here is the plainest one can write.

namespace switchyard::reference {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

struct Problem {
  LayerModel model;
  std::shared_ptr<verify::PlainSource> source;
  std::shared_ptr<verify::PlainSource> shared;
  LayerRun run;
  std::int64_t num_tokens = 0;
  std::vector<float> tokens;
  std::vector<std::int32_t> expert;
  std::vector<float> weight;

  Assignments assignments() const {
    return {.expert = expert, .weight = weight, .top_k = model.config.router.top_k()};
  }
  std::vector<Bounded> expected() const {
    return layer_output(model, run, as_computed(tokens, run.precision.compute), assignments());
  }
};

void fill(std::vector<float>& values, std::mt19937& random, DType dtype, float size) {
  std::normal_distribution<float> normal(0.0F, size);
  for (float& value : values) value = round_to(dtype, normal(random));
}

Problem make_problem(unsigned seed, Activation activation, bool gated, DType compute) {
  std::mt19937 random(seed);
  Problem p;
  LayerConfig& config = p.model.config;
  config.router.num_experts = 5;
  config.router.as_top_k().top_k = 2;
  config.experts = {.num_experts = 5,
                    .hidden = 19,
                    .inner = 29,
                    .gated = gated,
                    .activation = activation,
                    .bias = seed % 2 == 0};
  config.shared = config.experts;
  config.shared.num_experts = seed % 3 == 0 ? 1 : 0;
  config.shared_gated = true;
  p.run.precision.compute = compute;
  p.num_tokens = 7;
  const auto fill_source = [&](const ExpertConfig& experts) {
    auto source = std::make_shared<verify::PlainSource>(experts, DType::kF32);
    for (auto* part : {&source->gate, &source->up, &source->down}) {
      fill(*part, random, compute, 0.3F);
    }
    for (auto* part : {&source->gate_bias, &source->up_bias, &source->down_bias}) {
      fill(*part, random, DType::kF32, 0.1F);
    }
    return source;
  };
  p.source = fill_source(config.experts);
  p.model.experts = p.source;
  if (config.shared.num_experts > 0) {
    p.shared = fill_source(config.shared);
    p.model.shared = p.shared;
    std::vector<float> gate(19);
    fill(gate, random, DType::kF32, 0.3F);
    p.model.shared_gate = std::move(gate);
  }
  p.tokens.resize(7 * 19);
  fill(p.tokens, random, compute, 1.0F);
  for (int t = 0; t < 7; ++t) {
    p.expert.push_back(t % 5);
    p.expert.push_back((t + 1 + t / 3) % 5);
    p.weight.push_back(0.75F);
    p.weight.push_back(0.25F);
  }
  return p;
}

float activate(const ExpertConfig& config, float g, float u) {
  float a = 0;
  switch (config.activation) {
    case Activation::kSilu: a = g / (1.0F + std::exp(-g)); break;
    case Activation::kGelu: a = 0.5F * g * (1.0F + std::erf(g * 0.70710678F)); break;
    case Activation::kGeluTanh:
      a = 0.5F * g * (1.0F + std::tanh(0.79788456F * (g + 0.044715F * g * g * g)));
      break;
    case Activation::kRelu: a = std::max(g, 0.0F); break;
    case Activation::kIdentity: a = g; break;
    case Activation::kRelu2: a = std::max(g, 0.0F) * std::max(g, 0.0F); break;
    case Activation::kClampedSwiglu:
      g = std::min(g, config.limit);
      return g / (1.0F + std::exp(-config.alpha * g)) *
             (std::clamp(u, -config.limit, config.limit) + 1.0F);
  }
  return config.gated ? a * u : a;
}

/// A wrong turn that an implementation may take.
enum class Mutation { kNone, kSwapGateUp, kNoBias, kWrongRow, kNoLastInner, kNoLastHidden };

std::vector<float> row_in_f32(const Problem& p, const verify::PlainSource& s,
                              const ExpertConfig& config, std::int32_t e, const float* x,
                              Mutation mutation) {
  const std::int64_t hidden = config.hidden;
  const std::int64_t inner = config.inner;
  const auto& w1 = mutation == Mutation::kSwapGateUp ? s.up : s.gate;
  const auto& w3 = mutation == Mutation::kSwapGateUp ? s.gate : s.up;
  const bool bias = config.bias && mutation != Mutation::kNoBias;
  const std::int64_t used_hidden = hidden - (mutation == Mutation::kNoLastHidden ? 1 : 0);
  const std::int64_t used_inner = inner - (mutation == Mutation::kNoLastInner ? 1 : 0);
  std::vector<float> a;
  for (std::int64_t i = 0; i < inner; ++i) {
    float g = bias ? s.gate_bias[at(e * inner + i)] : 0.0F;
    float u = bias && config.gated ? s.up_bias[at(e * inner + i)] : 0.0F;
    for (std::int64_t h = 0; h < used_hidden; ++h) {
      g += w1[at((e * inner + i) * hidden + h)] * x[h];
      if (config.gated) u += w3[at((e * inner + i) * hidden + h)] * x[h];
    }
    a.push_back(round_to(p.run.precision.compute, activate(config, g, u)));
  }
  std::vector<float> y;
  for (std::int64_t h = 0; h < hidden; ++h) {
    float sum = bias ? s.down_bias[at(e * hidden + h)] : 0.0F;
    for (std::int64_t i = 0; i < used_inner; ++i) {
      sum += s.down[at((e * hidden + h) * inner + i)] * a[at(i)];
    }
    y.push_back(sum);
  }
  return y;
}

/// The layer in fp32, one rank: experts in ascending order.
std::vector<float> layer_in_f32(const Problem& p, DType out_dtype,
                                Mutation mutation = Mutation::kNone) {
  const std::int64_t hidden = p.model.config.experts.hidden;
  const std::int64_t top_k = p.model.config.router.top_k();
  std::vector<float> out(p.tokens.size());
  for (std::int64_t t = 0; t < p.num_tokens; ++t) {
    float* token_out = out.data() + t * hidden;
    for (std::int32_t e = 0; e < p.model.config.experts.num_experts; ++e) {
      for (std::int64_t k = 0; k < top_k; ++k) {
        if (p.expert[at(t * top_k + k)] != e) continue;
        const std::int64_t row = mutation == Mutation::kWrongRow && t == 3 ? 4 : t;
        const auto y = row_in_f32(p, *p.source, p.model.config.experts, e,
                                  p.tokens.data() + row * hidden, mutation);
        for (std::int64_t h = 0; h < hidden; ++h) {
          token_out[h] = std::fma(p.weight[at(t * top_k + k)], y[at(h)], token_out[h]);
        }
      }
    }
    const float* x = p.tokens.data() + t * hidden;
    if (p.shared != nullptr) {
      const auto y = row_in_f32(p, *p.shared, p.model.config.shared, 0, x, mutation);
      const float logit =
          std::inner_product(x, x + hidden, p.model.shared_gate.floats().begin(), 0.0F);
      for (std::int64_t h = 0; h < hidden; ++h) token_out[h] += y[at(h)] / (1 + std::exp(-logit));
    }
    for (std::int64_t h = 0; h < hidden; ++h) token_out[h] = round_to(out_dtype, token_out[h]);
  }
  return out;
}

struct Kind {
  Activation activation;
  bool gated;
};
constexpr Kind kKinds[] = {
    {Activation::kSilu, true},          {Activation::kSilu, false},
    {Activation::kGelu, true},          {Activation::kGelu, false},
    {Activation::kRelu, true},          {Activation::kRelu, false},
    {Activation::kRelu2, true},         {Activation::kRelu2, false},
    {Activation::kGeluTanh, true},      {Activation::kGeluTanh, false},
    {Activation::kClampedSwiglu, true}, {Activation::kIdentity, false},
};
constexpr DType kComputes[] = {DType::kF32, DType::kBF16, DType::kF16};

/// Calls body(problem, out dtype) for all activations and types, some seeds each.
void for_each_problem(const auto& body) {
  for (const Kind& kind : kKinds) {
    for (const DType compute : kComputes) {
      for (unsigned seed = 0; seed < 6; ++seed) {
        SCOPED_TRACE(testing::Message()
                     << static_cast<int>(kind.activation) << " gated " << kind.gated << " "
                     << static_cast<int>(compute) << " seed " << seed);
        const Problem p = make_problem(seed, kind.activation, kind.gated, compute);
        body(p, compute);
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

TEST(ReferenceLayer, AdmitsWhatPlainFp32Computes) {
  for_each_problem([](const Problem& p, DType dtype) {
    EXPECT_EQ(check_output(p.expected(), 19, dtype, layer_in_f32(p, dtype)), "");
  });
}

TEST(ReferenceLayer, AdmitsAnyOrderOfTheHiddenSize) {
  for_each_problem([](const Problem& p, DType dtype) {
    const std::vector<Bounded> expected = p.expected();
    Problem turned = p;
    const std::int64_t hidden = 19;
    const auto reverse_rows = [&](std::vector<float>& values) {
      for (std::size_t i = 0; i + at(hidden) <= values.size(); i += at(hidden)) {
        std::reverse(values.begin() + static_cast<std::ptrdiff_t>(i),
                     values.begin() + static_cast<std::ptrdiff_t>(i + at(hidden)));
      }
    };
    reverse_rows(turned.tokens);
    reverse_rows(turned.source->gate);  // The source is shared with p, whose bounds are known.
    reverse_rows(turned.source->up);
    if (turned.shared != nullptr) {
      reverse_rows(turned.shared->gate);
      reverse_rows(turned.shared->up);
      std::vector<float> gate = turned.model.shared_gate.widened();
      reverse_rows(gate);
      turned.model.shared_gate = std::move(gate);
    }
    EXPECT_EQ(check_output(expected, hidden, dtype, layer_in_f32(turned, dtype)), "");
  });
}

TEST(ReferenceLayer, MissesASwappedGateAndUp) {
  for_each_problem([](const Problem& p, DType dtype) {
    if (!p.model.config.experts.gated) return;
    EXPECT_NE(check_output(p.expected(), 19, dtype, layer_in_f32(p, dtype, Mutation::kSwapGateUp)),
              "");
  });
}

TEST(ReferenceLayer, MissesAForgottenBias) {
  for_each_problem([](const Problem& p, DType dtype) {
    if (!p.model.config.experts.bias) return;
    EXPECT_NE(check_output(p.expected(), 19, dtype, layer_in_f32(p, dtype, Mutation::kNoBias)), "");
  });
}

TEST(ReferenceLayer, MissesAnotherTokensRow) {
  for_each_problem([](const Problem& p, DType dtype) {
    EXPECT_NE(check_output(p.expected(), 19, dtype, layer_in_f32(p, dtype, Mutation::kWrongRow)),
              "");
  });
}

TEST(ReferenceLayer, MissesSumsThatStopOneEarly) {
  for_each_problem([](const Problem& p, DType dtype) {
    for (const Mutation mutation : {Mutation::kNoLastInner, Mutation::kNoLastHidden}) {
      EXPECT_NE(check_output(p.expected(), 19, dtype, layer_in_f32(p, dtype, mutation)), "");
    }
  });
}

TEST(ReferenceLayer, MissesAWrongExpert) {
  for_each_problem([](const Problem& p, DType dtype) {
    Problem wrong = p;
    wrong.expert[4] = (wrong.expert[4] + 1) % 5;
    EXPECT_NE(check_output(p.expected(), 19, dtype, layer_in_f32(wrong, dtype)), "");
  });
}

TEST(ReferenceLayer, MissesAMissingExpert) {
  for_each_problem([](const Problem& p, DType dtype) {
    Problem wrong = p;
    wrong.expert[9] = -1;
    EXPECT_NE(check_output(p.expected(), 19, dtype, layer_in_f32(wrong, dtype)), "");
  });
}

TEST(ReferenceLayer, MissesOneWeightThatIsOffByOnePercent) {
  for_each_problem([](const Problem& p, DType dtype) {
    Problem wrong = p;
    wrong.weight[6] *= 1.01F;
    EXPECT_NE(check_output(p.expected(), 19, dtype, layer_in_f32(wrong, dtype)), "");
  });
}

TEST(ReferenceLayer, MissesAnIntermediateThatIsNotRounded) {
  for_each_problem([](const Problem& p, DType dtype) {
    if (dtype == DType::kF32) return;
    Problem wrong = p;
    wrong.run.precision.compute = DType::kF32;
    EXPECT_NE(check_output(p.expected(), 19, DType::kF32, layer_in_f32(wrong, DType::kF32)), "");
  });
}

TEST(ReferenceLayer, RoundsPartialSumsWhereTheContractDoes) {
  Problem p = make_problem(1, Activation::kSilu, true, DType::kF32);
  const auto outputs = [&](std::int32_t ranks, DType wire, bool rank_invariant) {
    p.run.ranks = ranks;
    p.run.wire = wire;
    p.run.rank_invariant = rank_invariant;
    return p.expected();
  };
  const auto same = [](const std::vector<Bounded>& a, const std::vector<Bounded>& b) {
    for (std::size_t i = 0; i < a.size(); ++i) {
      if (std::abs(a[i].value - b[i].value) > 1e-6) return false;
    }
    return true;
  };
  const auto plain = outputs(1, DType::kF32, false);
  EXPECT_TRUE(same(plain, outputs(1, DType::kBF16, false)));  // One rank has no wire.
  EXPECT_TRUE(same(plain, outputs(4, DType::kF32, false)));
  EXPECT_TRUE(same(plain, outputs(3, DType::kF32, true)));
  EXPECT_FALSE(same(plain, outputs(2, DType::kBF16, false)));
  EXPECT_FALSE(same(outputs(2, DType::kBF16, false), outputs(4, DType::kBF16, false)));
  const auto invariant = outputs(1, DType::kBF16, true);
  EXPECT_FALSE(same(plain, invariant));
  for (const std::int32_t ranks : {2, 4, 8}) {
    EXPECT_TRUE(same(invariant, outputs(ranks, DType::kBF16, true))) << ranks;
  }
}

}  // namespace
}  // namespace switchyard::reference

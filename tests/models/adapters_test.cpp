// Adapters beside the MoE layers of a model: counts, names, where they begin, bits. Their gradients
// are model_gradient_test's, runs adapter_runs_test's.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "switchyard/models/trainer.hpp"
#include "testkit/expect_error.hpp"
#include "tests/models/small_adapters.hpp"

namespace switchyard::models {
namespace {

using test::expect_error;

std::vector<Group> all_but_adapters() {
  return frozen_groups({.model = model_with(every_kind()[0])});
}

const ParameterTensor& tensor_of(const Model& model, const std::string& name) {
  for (const ParameterTensor& tensor : model.parameters()) {
    if (tensor.name == name) return tensor;
  }
  throw std::out_of_range(name);
}

double make_gradients(Model& model, StepStats* stats = nullptr) {
  const std::vector<std::int32_t> ids = some_ids(33);
  return model.loss_and_gradients({.tokens = {ids.data(), {2, 16}},
                                   .targets = {ids.data() + 1, {2, 16}},
                                   .step = 3,
                                   .stats = stats});
}

/// As after steps: B is not 0 any more.
void fill_b(Model& model) {
  for (const ParameterTensor& tensor : model.parameters()) {
    if (!tensor.name.ends_with("lora_B")) continue;
    for (std::int64_t i = 0; i < tensor.size(); ++i) {
      tensor.value[i] = 0.3F * std::sin(static_cast<float>(i + 1));
    }
  }
  model.parameters_changed();
}

TEST(Adapters, AreCountedExactly) {
  const ModelCounts base = count(small_bytes_model());
  EXPECT_EQ(base.adapters, 0);
  // Two layers of H 16; of each adapter A and B, routed a gate [N, H].
  const std::int64_t all[] = {2 * (3 * 2 * 4 * 16 + 3 * 16), 2 * 4 * 2 * 3 * 16, 2 * 2 * 2 * 5 * 16,
                              2 * 2 * 8 * 16};
  const std::int64_t active[] = {2 * (2 * 2 * 4 * 16 + 3 * 16), 2 * 2 * 2 * 3 * 16,
                                 2 * 2 * 2 * 5 * 16, 2 * 2 * 8 * 16};
  for (std::size_t i = 0; i < every_kind().size(); ++i) {
    SCOPED_TRACE(to_string(every_kind()[i].kind));
    const ModelConfig config = model_with(every_kind()[i]);
    const ModelCounts counts = count(config);
    EXPECT_EQ(counts.adapters, all[i]);
    EXPECT_EQ(counts.parameters, base.parameters + all[i]);
    EXPECT_EQ(counts.active, base.active + active[i]);
    EXPECT_EQ(counts.routed, base.routed);
    const double attention = 2.0 * 2 * 16 * 2 * 8;  // 2 L S N D
    EXPECT_EQ(counts.forward_flops_per_token, 2.0 * double(counts.active) + attention);
    EXPECT_EQ(counts.flops_per_token,
              4.0 * double(base.active) + 6.0 * double(active[i]) + 3 * attention);
    EXPECT_GT(counts.token_bytes, base.token_bytes);
    const Model model(config);
    EXPECT_EQ(model.num_parameters(), counts.parameters);
    std::int64_t learning = 0;
    for (const ParameterTensor& tensor : model.parameters()) {
      if (is_adapter(tensor)) learning += tensor.size();
    }
    EXPECT_EQ(learning, counts.adapters);
  }
  ModelConfig dense = model_with(every_kind()[3]);
  dense.first_dense = 1, dense.dense_inner = 8;
  EXPECT_EQ(count(dense).adapters, all[3] / 2);  // dense layers have none
}

TEST(Adapters, HaveNamesAndBeginWithoutAnEffect) {
  const Model model(model_with(every_kind()[0]), {.seed = 3});
  const std::string prefix = "model.layers.1.mlp.adapters.";
  const ParameterTensor& a = tensor_of(model, prefix + "lora_A");
  const ParameterTensor& b = tensor_of(model, prefix + "lora_B");
  EXPECT_EQ(a.shape, (std::vector<std::int64_t>{3, 4, 16}));
  EXPECT_EQ(b.shape, (std::vector<std::int64_t>{3, 16, 4}));
  EXPECT_EQ(tensor_of(model, prefix + "gate.weight").shape, (std::vector<std::int64_t>{3, 16}));
  EXPECT_EQ(a.parts[2].name, prefix + "2.lora_A.weight");
  EXPECT_EQ(a.parts[2].shape, (std::vector<std::int64_t>{4, 16}));
  EXPECT_EQ(a.parts[2].offset, 2 * 4 * 16);
  EXPECT_EQ(b.parts[1].name, prefix + "1.lora_B.weight");
  double squares = 0;
  for (std::int64_t i = 0; i < a.size(); ++i) squares += double{a.value[i]} * double{a.value[i]};
  EXPECT_NEAR(squares / double(a.size()), 1.0 / (3 * 16), 0.25 / (3 * 16));
  for (std::int64_t i = 0; i < b.size(); ++i) ASSERT_EQ(b.value[i], 0);
  // By the stream of its own name: adapter 0's is that of another kind too.
  const Model other(model_with(every_kind()[2]), {.seed = 3});
  EXPECT_TRUE(equal_bits(a.value, tensor_of(other, prefix + "lora_A").value, 4 * 16));
  EXPECT_FALSE(equal_bits(a.value, a.value + 64, 64));
}

TEST(Adapters, BeforeTheFirstStepHaveTheBitsOfTheirBase) {
  for (const char* router : {"top-k", "switch", "top-p:threshold=0.5", "relu", "hash"}) {
    ModelConfig plain = small_bytes_model();
    plain.router = router;
    Model base(plain, {.seed = 3});
    StepStats of_base;
    const std::vector<float> want = logits_of(base);
    const double loss = make_gradients(base, &of_base);
    for (const AdapterConfig& adapters : every_kind()) {
      SCOPED_TRACE(std::string(router) + " " + to_string(adapters.kind));
      Model model(model_with(adapters, router), {.seed = 3});
      EXPECT_TRUE(logits_of(model) == want);
      StepStats stats;
      EXPECT_EQ(make_gradients(model, &stats), loss);
      EXPECT_EQ(stats.loss, loss);  // relu: without the penalty that would move its router
      EXPECT_EQ(stats.layers[1].counts, of_base.layers[1].counts);
      fill_b(model);
      EXPECT_FALSE(logits_of(model) == want);
    }
  }
}

/// Differences of the loss along the gradient of the embedding, on whose way back all gates are. By
/// a seed for which no choice changes that near.
TEST(Adapters, EmbeddedOnesGoBackThroughAFrozenGateOfEveryRouter) {
  for (const char* router :
       {"top-k:top-k=4", "top-k:top-k=4,score=sigmoid", "top-k:top-k=4,network=cosine,width=9",
        "noisy-top-k:top-k=4", "v-moe:top-k=4", "switch", "gshard:sampled=yes,second=threshold",
        "top-p:threshold=1", "relu", "expert-choice"}) {
    SCOPED_TRACE(router);
    Model model(model_with(every_kind()[1], router), {.seed = 4});
    for (const ParameterTensor& tensor : model.parameters()) {
      for (std::int64_t i = 0; i < tensor.size() && tensor.shape.size() > 1; ++i) {
        tensor.value[i] *= 8;
      }
    }
    fill_b(model);
    make_gradients(model);
    const ParameterTensor& table = model.parameters()[0];
    const std::vector<float> gradient(table.gradient, table.gradient + table.size());
    double square = 0;
    for (const float g : gradient) square += double{g} * double{g};
    const auto step = static_cast<float>(2e-4 / std::sqrt(square));
    const auto moved = [&](float by) {
      for (std::size_t i = 0; i < gradient.size(); ++i) table.value[i] += by * gradient[i];
      model.parameters_changed();
      const double loss = make_gradients(model);
      for (std::size_t i = 0; i < gradient.size(); ++i) table.value[i] -= by * gradient[i];
      return loss;
    };
    const double slope = (moved(step) - moved(-step)) / (2 * double{step});
    EXPECT_NEAR(slope / square, 1, 5e-3);
  }
}

/// Of one token the gradient of B is of rank one: its 2 x 2 determinants are 0.
TEST(Adapters, EmbeddedOnesHaveNoneOfWhatTheirLayerHasDropped) {
  ModelConfig config = model_with(every_kind()[1]);
  for (const bool drops : {false, true}) {
    if (drops) config.capacity_factor = 0.01;  // one token an expert
    Model model(config, {.seed = 3});
    fill_b(model);
    make_gradients(model);
    const ParameterTensor& b = tensor_of(model, "model.layers.1.mlp.adapters.lora_B");
    double largest = 0, determinants = 0;
    for (std::int64_t j = 0; j < 4; ++j) {
      const float* const g = b.gradient + j * 16 * 3;
      for (std::int64_t h = 1; h < 16; ++h) {
        const double det = double{g[0]} * double{g[h * 3 + 1]} - double{g[1]} * double{g[h * 3]};
        largest = std::max(largest, std::abs(double{g[0]} * double{g[h * 3 + 1]}));
        determinants = std::max(determinants, std::abs(det));
      }
    }
    EXPECT_GT(largest, 0);
    EXPECT_EQ(determinants < 1e-5 * largest, drops) << determinants << " of " << largest;
  }
}

TEST(Adapters, HaveTheSameBitsFrozenBesideOrNotAndForAnyNumberOfThreads) {
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    for (const AdapterConfig& adapters : every_kind()) {
      SCOPED_TRACE(std::string(to_string(adapters.kind)) + " " + to_string(compute));
      Model free(model_with(adapters), {.seed = 3, .compute = compute});
      Model frozen(model_with(adapters), {.num_threads = 3,
                                          .seed = 3,
                                          .compute = compute,
                                          .recompute = true,
                                          .frozen = all_but_adapters()});
      fill_b(free);
      fill_b(frozen);
      EXPECT_EQ(make_gradients(free), make_gradients(frozen));
      EXPECT_TRUE(logits_of(free) == logits_of(frozen));
      for (std::size_t i = 0; i < free.parameters().size(); ++i) {
        const ParameterTensor& own = frozen.parameters()[i];
        const std::vector<float> zeros(static_cast<std::size_t>(own.size()));
        const float* const theirs = is_adapter(own) ? free.parameters()[i].gradient : zeros.data();
        EXPECT_EQ(own.frozen, !is_adapter(own));
        EXPECT_TRUE(equal_bits(own.gradient, theirs, own.size())) << own.name;
        EXPECT_FALSE(equal_bits(free.parameters()[i].gradient, zeros.data(), own.size()))
            << own.name;
      }
    }
  }
}

TEST(Adapters, DecodeTokenByTokenWithTheBitsOfAForward) {
  for (const AdapterConfig& adapters : every_kind()) {
    SCOPED_TRACE(to_string(adapters.kind));
    Model model(model_with(adapters), {.seed = 3});
    fill_b(model);
    const std::vector<std::int32_t> ids = some_ids(32);
    const std::vector<float> want = logits_of(model);
    Cache cache = model.make_cache(2, 16);
    std::vector<float> have(2 * 256);
    for (std::int64_t i = 0; i < 16; ++i) {
      const std::int32_t column[] = {ids[std::size_t(i)], ids[std::size_t(16 + i)]};
      model.decode({column, {2, 1}}, cache, {have.data(), {2, 256}});
      for (std::int64_t b = 0; b < 2; ++b) {
        ASSERT_TRUE(equal_bits(have.data() + b * 256, want.data() + (b * 16 + i) * 256, 256)) << i;
      }
    }
  }
}

TEST(Adapters, AreWhatAConfigurationSaysOfThem) {
  for (const AdapterConfig& adapters : every_kind()) {
    const ModelConfig config = model_with(adapters);
    const nlohmann::json json = nlohmann::json::parse(to_json(config));
    EXPECT_EQ(json["model_type"], "switchyard");
    EXPECT_EQ(json["switchyard"]["adapters"]["kind"], to_string(adapters.kind));
    EXPECT_EQ(json["switchyard"]["adapters"]["rank"], adapters.rank);
    EXPECT_EQ(json["switchyard"]["adapters"].contains("top_k"),
              adapters.kind == PerftKind::kRouted);
    EXPECT_EQ(parse_model_config(to_json(config), "here").adapters, config.adapters);
  }
  const auto parsed = [](const nlohmann::json& adapters) {
    nlohmann::json json = nlohmann::json::parse(to_json(small_bytes_model()));
    EXPECT_FALSE(json["switchyard"].contains("adapters"));
    json["switchyard"]["adapters"] = adapters;
    return parse_model_config(json.dump(), "here").adapters;
  };
  EXPECT_EQ(parsed({{"kind", "embedded"}})->num_adapters, 4);
  EXPECT_EQ(parsed({{"kind", "shared"}, {"rank", 3}})->num_adapters, 1);
  EXPECT_EQ(parsed(nlohmann::json::object()), AdapterConfig{});
  EXPECT_FALSE(parsed(nullptr));
  for (const auto& wrong : std::vector<std::pair<nlohmann::json, const char*>>{
           {{{"kind", "mixed"}}, "'mixed'"},
           {{{"width", 3}}, "unknown key 'width'"},
           {{{"rank", "3"}}, "'rank' is not a whole number"},
           {{{"kind", "dense"}, {"top_k", 2}}, "unknown key 'top_k'"},
           {3, "'adapters' is not an object"}}) {
    expect_error(ErrorCode::kBadFile, wrong.second, [&] { (void)parsed(wrong.first); });
  }
}

TEST(Adapters, ThatCannotBeAreNamed) {
  const auto refuse = [](std::size_t kind, const char* words,
                         const std::function<void(ModelConfig&)>& spoil) {
    ModelConfig config = model_with(every_kind()[kind]);
    spoil(config);
    expect_error(ErrorCode::kInvalidArgument, words, [&] { check(config); });
  };
  refuse(0, "rank=0 is not in 1 to", [](ModelConfig& c) { c.adapters->rank = 0; });
  refuse(0, "top_k=4, want 1 to num_adapters=3", [](ModelConfig& c) { c.adapters->top_k = 4; });
  refuse(0, "top_k=0, want 1 to num_adapters=3", [](ModelConfig& c) { c.adapters->top_k = 0; });
  refuse(2, "num_adapters=0", [](ModelConfig& c) { c.adapters->num_adapters = 0; });
  refuse(1, "num_adapters=3 of kind embedded, want the 4",
         [](ModelConfig& c) { c.adapters->num_adapters = 3; });
  refuse(3, "num_adapters=2 of kind shared", [](ModelConfig& c) { c.adapters->num_adapters = 2; });
  refuse(0, "alpha=0", [](ModelConfig& c) { c.adapters->alpha = 0; });
  refuse(0, "alpha=inf", [](ModelConfig& c) { c.adapters->alpha = HUGE_VALF; });
  refuse(0, "clamped_swiglu",
         [](ModelConfig& c) { c.adapters->activation = Activation::kClampedSwiglu; });
  refuse(3, "all 2 layers are dense", [](ModelConfig& c) { c.first_dense = 2, c.dense_inner = 8; });
  expect_error(ErrorCode::kUnsupported, "adapters of kind shared run on a CPU",
               [] { const Model model(model_with(every_kind()[3]), {.backend = Backend::kCuda}); });
  expect_error(ErrorCode::kUnsupported, "adapters over 2 ranks",
               [] { check_ranks(model_with(every_kind()[0]), 2); });
}

}  // namespace
}  // namespace switchyard::models

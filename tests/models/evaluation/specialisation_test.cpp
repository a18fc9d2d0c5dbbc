// What routers choose on held-out text, beside the model in double and sums by definition.
#include "switchyard/models/specialisation.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>

#include "switchyard/error.hpp"
#include "testkit/expect_error.hpp"
#include "tests/models/evaluation/made_model.hpp"
#include "tests/models/text_files.hpp"

namespace switchyard::models {
namespace {

using Sets = std::vector<std::set<std::int32_t>>;

/// Of each token of a layer.
Sets sets_of(const LayerRouting& layer) {
  Sets sets(static_cast<std::size_t>(layer.num_tokens()));
  for (std::size_t i = 0; i < layer.expert.size(); ++i) {
    if (layer.expert[i] >= 0)
      sets[i / static_cast<std::size_t>(layer.top_k)].insert(layer.expert[i]);
  }
  return sets;
}

/// The same by the model in double, layer by layer, of texts read in windows of their own.
std::vector<Sets> sets_in_double(const Model& model, const std::vector<std::string>& texts) {
  test::DoubleModel twin(model);
  std::vector<Sets> layers(static_cast<std::size_t>(model.config().layers));
  twin.on_choices = [&](std::int32_t l, test::DoubleModel::Choices& choices) {
    for (const auto& token : choices) {
      layers[std::size_t(l)].emplace_back();
      for (const auto& [e, weight] : token) layers[std::size_t(l)].back().insert(int(e));
    }
  };
  for (const std::string& text : texts) {
    for (const DoubleWindow& window : double_windows(text, std::size_t(model.config().sequence))) {
      (void)twin.logits(window.tokens, window.tokens.size());
    }
  }
  return layers;
}

const std::string kFirst = small_text(75), kSecond = small_text(400).substr(333);

TEST(Specialisation, ReadsTheExpertsOfEveryTokenAndOfNoPadding) {
  const TestFolder folder;
  const Text text({folder.file("a", kFirst), folder.file("b", kSecond)});
  Model model = made_model(small_bytes_model());
  const TextRouting found = route_text(model, text, {.sequences = 3});
  ASSERT_EQ(found.num_tokens(), 74 + 66);
  for (std::size_t t = 0; t < 140; ++t) {
    EXPECT_EQ(found.documents[t], t < 74 ? 0 : 1);
    EXPECT_EQ(found.token_types[t], t < 74 ? kFirst[t] : kSecond[t - 74]);
  }
  const std::vector<Sets> wanted = sets_in_double(model, {kFirst, kSecond});
  ASSERT_EQ(found.layers.size(), 2U);
  for (std::size_t l = 0; l < 2; ++l) {
    EXPECT_EQ(found.layers[l].layer, std::int32_t(l));
    EXPECT_EQ(sets_of(found.layers[l]), wanted[l]);
    EXPECT_EQ(found.layers[l].weight.size(), 280U);
  }
}

/// Mutual information of pairs, by its definition.
double information_of(const std::vector<std::pair<std::int64_t, std::int64_t>>& pairs) {
  std::map<std::int64_t, double> a, b;
  std::map<std::pair<std::int64_t, std::int64_t>, double> both;
  const double share = 1 / double(pairs.size());
  for (const auto& pair : pairs) {
    a[pair.first] += share, b[pair.second] += share, both[pair] += share;
  }
  double sum = 0;
  for (const auto& [pair, p] : both) sum += p * std::log(p / a[pair.first] / b[pair.second]);
  return sum;
}

TEST(Specialisation, IsInformationLoadAndCoactivationByDefinition) {
  const TestFolder folder;
  const Text text({folder.file("a", kFirst), folder.file("b", kSecond)});
  Model model = made_model(small_bytes_model());
  const auto found = specialisation(route_text(model, text), 20, 7);
  const std::vector<Sets> choices = sets_in_double(model, {kFirst, kSecond});
  ASSERT_EQ(found.size(), 2U);
  for (std::size_t l = 0; l < 2; ++l) {
    std::vector<std::pair<std::int64_t, std::int64_t>> of_type, of_document;
    std::vector<double> loads(4), both(16);
    std::set<std::pair<std::int64_t, std::int64_t>> joint;
    std::set<std::int64_t> types, used;
    for (std::size_t t = 0; t < 140; ++t) {
      const std::int64_t type = t < 74 ? kFirst[t] : kSecond[t - 74];
      for (const std::int32_t e : choices[l][t]) {
        of_type.emplace_back(type, e), of_document.emplace_back(t < 74 ? 0 : 1, e);
        joint.emplace(type, e), types.insert(type), used.insert(e);
        loads[std::size_t(e)] += 1;
        for (const std::int32_t other : choices[l][t]) both[std::size_t(e * 4 + other)] += 1;
      }
    }
    const LayerSpecialisation& of = found[l];
    EXPECT_NEAR(of.token_type.plug_in, information_of(of_type), 1e-12);
    const double bias = double(joint.size()) - double(types.size()) - double(used.size()) + 1;
    EXPECT_NEAR(of.token_type.corrected, of.token_type.plug_in - bias / (2 * 280), 1e-12);
    ASSERT_TRUE(of.token_type.null_mean && of.document);
    EXPECT_LT(*of.token_type.null_mean, of.token_type.plug_in);
    EXPECT_NEAR(of.document->plug_in, information_of(of_document), 1e-12);
    EXPECT_EQ(std::vector<double>(of.counts.begin(), of.counts.end()), loads);
    double squares = 0;
    for (const double n : loads) squares += (n - 70) * (n - 70) / 4;
    EXPECT_NEAR(of.load.cv, std::sqrt(squares) / 70, 1e-12);
    for (std::size_t i = 0; i < 16; ++i) {
      const double n = loads[i / 4];
      EXPECT_NEAR(of.coactivation[i], n > 0 ? both[i] / n : 0, 1e-12);
    }
  }
}

TEST(Specialisation, OfOneDocumentSaysNothingOfDocuments) {
  const TestFolder folder;
  const Text text({folder.file("a", kFirst)});
  Model model = made_model(small_bytes_model());
  EXPECT_FALSE(specialisation(route_text(model, text), 0)[0].document);
}

TEST(Specialisation, SaturationAndChurnAreSharesOfCommonExperts) {
  const TestFolder folder;
  const Text text({folder.file("a", kFirst)});
  for (const char* router : {"top-k", "top-p:threshold=0.6"}) {
    ModelConfig config = small_bytes_model();
    config.router = router;
    Model first = made_model(config, 3);
    Model second = made_model(config, 4);
    const TextRouting before = route_text(first, text), after = route_text(second, text);
    for (std::size_t l = 0; l < 2; ++l) {
      const Sets a = sets_of(before.layers[l]), b = sets_of(after.layers[l]);
      double common = 0, of_a = 0, of_b = 0;
      for (std::size_t t = 0; t < a.size(); ++t) {
        for (const std::int32_t e : a[t]) common += b[t].contains(e) ? 1 : 0;
        of_a += double(a[t].size()), of_b += double(b[t].size());
      }
      EXPECT_NEAR(saturation(before, after)[l], common / of_b, 1e-12) << router;
      EXPECT_NEAR(churn(before, after)[l], 1 - common / of_a, 1e-12) << router;
      EXPECT_GT(common, 0);
      EXPECT_LT(common, of_b);
    }
    EXPECT_EQ(saturation(after, after), (std::vector<double>{1, 1}));
    const Text other({folder.file("b", kSecond)});
    test::expect_error(ErrorCode::kInvalidArgument, "74 tokens in 2 layers and of 66",
                       [&] { (void)saturation(before, route_text(first, other)); });
  }
}

TEST(Specialisation, ReadsWindowsAtEvenDistancesWhereThereAreTooMany) {
  const TestFolder folder;
  const Text text({folder.file("a", small_text(161))});  // ten windows of 16
  const auto firsts = [&](std::int64_t most) {
    std::vector<std::int64_t> places;
    for (const Window& window : sampled_windows(text, 16, most)) places.push_back(window.first);
    return places;
  };
  EXPECT_EQ(firsts(63), (std::vector<std::int64_t>{0, 48, 96}));
  EXPECT_EQ(firsts(160).size(), 10U);
  EXPECT_EQ(firsts(159).size(), 9U);
  EXPECT_EQ(firsts(1), (std::vector<std::int64_t>{0}));
  EXPECT_THROW((void)firsts(0), Error);
  Model model = made_model(small_bytes_model());
  EXPECT_EQ(route_text(model, text, {.max_tokens = 48}).num_tokens(), 48);
}

TEST(Specialisation, OfADenseModelIsRefusedAndOfSoftMoe) {
  const TestFolder folder;
  const Text text({folder.file("a", kFirst)});
  ModelConfig config = small_bytes_model();
  config.router = "soft-moe";
  Model soft(config);
  test::expect_error(ErrorCode::kUnsupported, "the router soft-moe gives no token to an expert",
                     [&] { (void)route_text(soft, text); });
  config = small_bytes_model();
  config.first_dense = 2, config.dense_inner = 8;
  Model model(config);
  test::expect_error(ErrorCode::kInvalidArgument, "no MoE layer",
                     [&] { (void)route_text(model, text); });
}

std::map<std::string, std::vector<float>> values_of_model(const Model& model) {
  std::map<std::string, std::vector<float>> values;
  for (const auto tensors : {model.parameters(), model.buffers()}) {
    for (const ParameterTensor& tensor : tensors) {
      values[tensor.name] = {tensor.value, tensor.value + tensor.size()};
    }
  }
  return values;
}

TEST(ResetRouters, GivesWhatChoosesExpertsTheValuesOfANewModel) {
  for (const char* router : {"top-k", "noisy-top-k", "expert-threshold"}) {
    ModelConfig config = small_bytes_model();
    config.router = router;
    config.shared_inner = 8, config.shared_gated = true;
    if (config.router == "top-k") config.bias_rate = 0.01;
    Model model = made_model(config);
    for (const ParameterTensor& buffer : model.buffers()) *buffer.value += 1;
    for (const ParameterTensor& tensor : model.parameters()) {
      if (tensor.group == Group::kRouter) *tensor.value += 1;
    }
    const auto before = values_of_model(model);
    model.reset_routers(11);
    const auto after = values_of_model(model);
    const auto wanted = values_of_model(Model(config, {.seed = 11}));
    int reset = 0;
    for (const auto& [name, values] : after) {
      const bool chooses = name.find(".mlp.gate.") != std::string::npos;
      EXPECT_EQ(values, (chooses ? wanted : before).at(name)) << name;
      if (chooses) {
        EXPECT_NE(values, before.at(name)) << name;
        ++reset;
      }
    }
    EXPECT_EQ(reset, 4) << router;  // two tensors a layer
  }
}

TEST(ResetRouters, TheNextCallRoutesByThem) {
  const TestFolder folder;
  const Text text({folder.file("a", kFirst)});
  Model model = made_model(small_bytes_model());
  const TextRouting before = route_text(model, text);
  model.reset_routers(11);
  EXPECT_EQ(sets_of(route_text(model, text).layers[1]), sets_in_double(model, {kFirst})[1]);
  EXPECT_NE(sets_of(route_text(model, text).layers[1]), sets_of(before.layers[1]));
}

/// [1, S] of the text's first window.
struct OneWindow {
  DoubleWindow window = double_windows(kFirst, 16)[0];
  std::vector<float> nll = std::vector<float>(16);

  double evaluate(Model& model) {
    return model.evaluate({window.tokens.data(), {1, 16}}, {window.targets.data(), {1, 16}},
                          {nll.data(), {1, 16}});
  }
  double evaluate(Model& model, const RoutingHook& hook) {
    return model.evaluate({window.tokens.data(), {1, 16}}, {window.targets.data(), {1, 16}},
                          {nll.data(), {1, 16}}, hook);
  }
};

TEST(RoutingHook, ThatChangesNothingLeavesAllBits) {
  for (const char* router : {"top-k", "hash", "expert-choice", "relu", "adamoe"}) {
    ModelConfig config = small_bytes_model();
    config.router = router;
    config.first_dense = 1, config.dense_inner = 8, config.layers = 3;
    config.capacity_factor.reset();
    Model model = made_model(config);
    OneWindow window;
    const double plain = window.evaluate(model);
    std::vector<std::int32_t> layers;
    EXPECT_EQ(window.evaluate(model,
                              [&](LayerRouting& routing) {
                                layers.push_back(routing.layer);
                                return false;
                              }),
              plain)
        << router;
    EXPECT_EQ(layers, (std::vector<std::int32_t>{1, 2}));
    EXPECT_EQ(window.evaluate(model, [](LayerRouting&) { return true; }), plain) << router;
  }
}

TEST(RoutingHook, OfAChainSeesTheExpertsOfAllIterationsAndMayNotChangeThem) {
  ModelConfig config = small_bytes_model();
  config.router = "chain:iterations=2,top-k=1";
  config.capacity_factor.reset();
  Model model = made_model(config);
  OneWindow window;
  const double plain = window.evaluate(model);
  test::DoubleModel in_double(model);
  std::vector<test::DoubleModel::Choices> want;  // layer after layer, iteration after iteration
  in_double.on_choices = [&](std::int32_t, auto& choices) { want.push_back(choices); };
  (void)in_double.logits(window.window.tokens, 16);
  std::size_t layer = 0;
  EXPECT_EQ(
      window.evaluate(model,
                      [&](LayerRouting& routing) {
                        EXPECT_EQ(routing.top_k, 2);
                        EXPECT_EQ(routing.num_tokens(), 16);
                        for (std::size_t t = 0; t < 16; ++t) {
                          for (std::size_t c = 0; c < 2; ++c) {
                            EXPECT_EQ(routing.expert[2 * t + c], want[2 * layer + c][t][0].first)
                                << "layer " << layer << ", iteration " << c;
                          }
                        }
                        ++layer;
                        return false;
                      }),
      plain);
  EXPECT_EQ(2 * layer, want.size());
  test::expect_error(ErrorCode::kUnsupported,
                     "changed the routing of layer 0: the router chain decides in each of 2",
                     [&] { window.evaluate(model, [](LayerRouting&) { return true; }); });
}

TEST(RoutingHook, WhatCannotBeComputedIsRefused) {
  Model model = made_model(small_bytes_model());
  OneWindow window;
  test::expect_error(ErrorCode::kInvalidArgument,
                     "layer 0 has left 31 experts and 32 weights, want [16, 2]", [&] {
                       window.evaluate(model, [](LayerRouting& routing) {
                         routing.expert.pop_back();
                         return true;
                       });
                     });
  test::expect_error(ErrorCode::kInvalidArgument, "expert[1, 1]", [&] {
    window.evaluate(model, [](LayerRouting& routing) {
      routing.expert[3] = 4;
      return true;
    });
  });
  ModelConfig config = small_bytes_model();
  config.router = "soft-moe";
  Model soft(config);
  test::expect_error(ErrorCode::kUnsupported, "a hook has no routing",
                     [&] { window.evaluate(soft, [](LayerRouting&) { return false; }); });
  EXPECT_THROW(window.evaluate(model, RoutingHook()), Error);
  EXPECT_TRUE(std::isfinite(window.evaluate(model)));
}

}  // namespace
}  // namespace switchyard::models

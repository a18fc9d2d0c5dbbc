// Models whose routers have a network: sizes, names, gradients, and runs.
#include <gtest/gtest.h>

#include <cmath>

#include "switchyard/models/files.hpp"
#include "switchyard/models/optimizer.hpp"
#include "testkit/expect_error.hpp"
#include "tests/models/small_run.hpp"
#include "tests/models/text_files.hpp"

namespace switchyard::models {
namespace {

constexpr const char* kRouters[] = {"top-k:network=cosine,width=9", "top-k:network=mlp",
                                    "top-k:renormalize=no,network=hadamard,width=5",
                                    "noisy-top-k:network=mlp,width=7"};

ModelConfig with_router(const char* router) {
  ModelConfig config = small_bytes_model();
  config.router = router;
  config.layers = 1;
  config.losses.z = 0.5;
  return config;
}

double loss_of(Model& model, const std::vector<std::int32_t>& ids, StepStats& stats) {
  (void)model.loss_and_gradients({.tokens = {ids.data(), {2, 16}},
                                  .targets = {ids.data() + 1, {2, 16}},
                                  .step = 3,
                                  .stats = &stats});
  return stats.loss;
}

TEST(ModelNetworks, CountTheirParameters) {
  for (const char* router : kRouters) {
    const ModelConfig config = with_router(router);
    EXPECT_EQ(Model(config).num_parameters(), count(config).parameters) << router;
  }
  // [E, M] and [M, H + 1] instead of [E, H].
  const auto linear = count(with_router("top-k")), mlp = count(with_router("top-k:network=mlp"));
  EXPECT_EQ(mlp.parameters - linear.parameters, 4 * 64 + 64 * 17 - 4 * 16);
  EXPECT_EQ(mlp.active - linear.active, mlp.parameters - linear.parameters);
}

TEST(ModelNetworks, AreRefusedOnAGpuByName) {
  test::expect_error(ErrorCode::kUnsupported, "network=mlp", [] {
    const Model model(with_router("top-k:network=mlp"), {.backend = Backend::kCuda});
  });
}

TEST(ModelNetworks, AreNamedAndBeginAsTheySay) {
  Model model(with_router("top-k:network=cosine,width=9"));
  std::vector<std::string> names;
  for (const ParameterTensor& tensor : model.parameters()) {
    if (tensor.group != Group::kRouter) continue;
    names.push_back(tensor.name.substr(tensor.name.find("gate.")));
    if (tensor.name.ends_with("log_scale")) {
      EXPECT_FLOAT_EQ(tensor.value[0], std::log(2.0F));
      EXPECT_FALSE(tensor.decay);
    }
  }
  EXPECT_EQ(names, (std::vector<std::string>{"gate.network.out.weight", "gate.network.w1.weight",
                                             "gate.network.log_scale"}));
}

/// In float: differences of the loss along the gradient itself. By all experts, so that no choice
/// changes on the way.
TEST(ModelNetworks, HaveGradientsThatTheLossFollows) {
  std::vector<std::int32_t> ids(33);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(37 * i % 256);
  for (const char* router : {"top-k:top-k=4,network=cosine,width=9", "top-k:top-k=4,network=mlp",
                             "top-k:top-k=4,renormalize=no,network=hadamard,width=5",
                             "noisy-top-k:top-k=4,network=mlp,width=7"}) {
    ModelConfig config = with_router(router);
    config.top_k = 4;
    Model model(config);
    for (const ParameterTensor& tensor : model.parameters()) {
      for (std::int64_t i = 0; i < tensor.size() && tensor.shape.size() > 1; ++i) {
        tensor.value[i] *= 8;
      }
    }
    model.parameters_changed();
    StepStats stats;
    (void)loss_of(model, ids, stats);
    for (const ParameterTensor& tensor : model.parameters()) {
      if (tensor.group != Group::kRouter) continue;
      const std::vector<float> gradient(tensor.gradient, tensor.gradient + tensor.size());
      double square = 0;
      for (const float g : gradient) square += double{g} * double{g};
      ASSERT_GT(square, 0) << router << ": " << tensor.name;
      const auto step = static_cast<float>(1e-2 / std::sqrt(square));
      const auto moved = [&](float by) {
        for (std::size_t i = 0; i < gradient.size(); ++i) tensor.value[i] += by * gradient[i];
        model.parameters_changed();
        const double loss = loss_of(model, ids, stats);
        for (std::size_t i = 0; i < gradient.size(); ++i) tensor.value[i] -= by * gradient[i];
        return loss;
      };
      const double slope = (moved(step) - moved(-step)) / (2 * double{step});
      EXPECT_NEAR(slope / square, 1, 0.1) << router << ": " << tensor.name;
    }
  }
}

TEST(ModelNetworks, RunsResumeWithTheSameBytesAndAFrozenRouterIsAllOfIt) {
  const TestFolder folder;
  const Text text{{folder.file("text", small_text())}};
  int number = 0;
  for (const char* router : kRouters) {
    TrainConfig config = small_run();
    config.model = with_router(router);
    config.schedule.steps = 6;
    config.schedule.warmup = 1;
    const std::string name = std::to_string(number++);
    const TrainResult whole =
        train(config, text, nullptr, {.directory = folder.path() / (name + "-whole")});
    TrainOptions cut{.directory = folder.path() / (name + "-cut")};
    std::int64_t seen = 0;
    cut.on_step = [&](const StepRecord& record) { seen = record.step; };
    cut.stop = [&] { return seen == 3; };
    (void)train(config, text, nullptr, cut);
    cut.resume = true;
    cut.num_threads = 2;
    const TrainResult resumed = train(config, text, nullptr, cut);
    const Model one = load_model(whole.checkpoint), other = load_model(resumed.checkpoint);
    for (std::size_t i = 0; i < one.parameters().size(); ++i) {
      const ParameterTensor& tensor = one.parameters()[i];
      EXPECT_TRUE(
          std::equal(tensor.value, tensor.value + tensor.size(), other.parameters()[i].value))
          << router << ": " << tensor.name;
    }
    config.freeze = {Group::kRouter};
    config.model.losses = {};
    const Model begin(config.model, {.seed = config.seed});
    const Model frozen = load_model(
        train(config, text, nullptr, {.directory = folder.path() / (name + "-frozen")}).checkpoint);
    for (std::size_t i = 0; i < begin.parameters().size(); ++i) {
      const ParameterTensor& tensor = begin.parameters()[i];
      EXPECT_EQ(
          std::equal(tensor.value, tensor.value + tensor.size(), frozen.parameters()[i].value),
          tensor.group == Group::kRouter)
          << router << ": " << tensor.name;
    }
  }
}

}  // namespace
}  // namespace switchyard::models

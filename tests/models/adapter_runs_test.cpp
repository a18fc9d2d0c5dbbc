// Runs that train adapters beside a base, which stays as it is.
#include <gtest/gtest.h>

#include <functional>

#include "switchyard/models/evaluate.hpp"
#include "switchyard/models/files.hpp"
#include "switchyard/models/generate.hpp"
#include "switchyard/models/trainer.hpp"
#include "testkit/expect_error.hpp"
#include "tests/models/run_files.hpp"
#include "tests/models/small_adapters.hpp"
#include "tests/models/text_files.hpp"

namespace switchyard::models {
namespace {

using test::expect_error;

class AdapterRuns : public testing::Test {
 protected:
  [[nodiscard]] TrainOptions options(const std::string& name) const {
    TrainOptions out;
    out.directory = folder.path() / name;
    return out;
  }
  /// A base of every kind of buffer that its own training would move, and a run beside it.
  [[nodiscard]] TrainConfig base(const char* router = "top-k") const {
    TrainConfig config = small_run();
    config.model.router = router;
    if (std::string(router) == "top-k") config.model.bias_rate = 0.01;
    config.schedule.steps = 4;
    config.schedule.warmup = 1;
    return config;
  }
  [[nodiscard]] TrainConfig beside(TrainConfig config, const AdapterConfig& adapters,
                                   const std::string& name) const {
    config.model.adapters = adapters;
    config.init = folder.path() / name;
    config.seed = 8;
    return config;
  }
  [[nodiscard]] std::filesystem::path made(const TrainConfig& config,
                                           const std::string& name) const {
    return train(config, text, nullptr, options(name)).checkpoint;
  }

  TestFolder folder;
  Text text{{folder.file("text", small_text())}};
};

TEST_F(AdapterRuns, MoveAdaptersAloneAndNoBitOfTheirBase) {
  for (const char* router : {"top-k", "relu", "expert-threshold", "noisy-top-k"}) {
    const TrainConfig of_base = base(router);
    const std::string name = std::string("base-") + router;
    const std::filesystem::path begun = made(of_base, name);
    Model before = load_model(begun);
    for (const AdapterConfig& adapters : every_kind()) {
      SCOPED_TRACE(std::string(router) + " " + to_string(adapters.kind));
      const TrainConfig config = beside(of_base, adapters, name);
      Model after = load_model(made(config, name + "-" + to_string(adapters.kind)));
      EXPECT_EQ(after.config().adapters, config.model.adapters);
      const Model fresh(config.model, {.seed = config.seed});
      std::size_t seen = 0;
      for (std::size_t i = 0; i < after.parameters().size(); ++i) {
        const ParameterTensor& tensor = after.parameters()[i];
        if (is_adapter(tensor)) {
          EXPECT_FALSE(equal_bits(tensor.value, fresh.parameters()[i].value, tensor.size()))
              << tensor.name;
          continue;
        }
        const ParameterTensor& then = before.parameters()[seen++];
        ASSERT_EQ(then.name, tensor.name);
        EXPECT_TRUE(equal_bits(tensor.value, then.value, tensor.size())) << tensor.name;
      }
      EXPECT_EQ(seen, before.parameters().size());
      ASSERT_EQ(after.buffers().size(), before.buffers().size());
      for (std::size_t i = 0; i < after.buffers().size(); ++i) {
        EXPECT_TRUE(equal_bits(after.buffers()[i].value, before.buffers()[i].value,
                               after.buffers()[i].size()))
            << after.buffers()[i].name;
      }
      EXPECT_FALSE(logits_of(after) == logits_of(before));
      // The first loss is the base's of that batch.
      TrainConfig other = of_base;
      other.seed = config.seed, other.init = config.init, other.schedule.steps = 1;
      other.schedule.warmup = 0;
      if (!std::filesystem::exists(folder.path() / (name + "-on"))) (void)made(other, name + "-on");
      EXPECT_EQ(log_of(folder.path() / (name + "-" + to_string(adapters.kind)))[0]["loss"],
                log_of(folder.path() / (name + "-on"))[0]["loss"]);
    }
  }
}

TEST_F(AdapterRuns, ResumeWithTheSameBytesAndAreEvaluatedAndGeneratedWith) {
  (void)made(base(), "base");
  for (const AdapterConfig& adapters : every_kind()) {
    SCOPED_TRACE(to_string(adapters.kind));
    const std::string name = to_string(adapters.kind);
    TrainConfig config = beside(base(), adapters, "base");
    config.schedule.steps = 6;
    const std::filesystem::path whole = made(config, name);
    TrainOptions cut = options(name + "-cut");
    std::int64_t seen = 0;
    cut.on_step = [&](const StepRecord& record) { seen = record.step; };
    cut.stop = [&] { return seen == 3; };
    EXPECT_EQ(train(config, text, nullptr, cut).steps, 3);
    cut.resume = true;
    cut.num_threads = 2;
    const std::filesystem::path resumed = train(config, text, nullptr, cut).checkpoint;
    EXPECT_TRUE(files_below(whole) == files_below(resumed));
    EXPECT_TRUE(log_of(folder.path() / name) == log_of(folder.path() / (name + "-cut")));

    Model model = load_model(whole);
    EXPECT_GT(evaluate(model, text, {}).all.nats, 0);
    EXPECT_EQ(generate(model, {.prompt = {97, 108, 108}, .max_new_tokens = 5}).tokens[0].size(),
              5U);

    TrainConfig other = config;
    other.model.adapters->rank += 1;
    expect_error(ErrorCode::kInvalidArgument, "adapters/rank",
                 [&] { (void)train(other, text, nullptr, cut); });
  }
}

TEST_F(AdapterRuns, GoOnFromTheSameAdaptersAndFromNoOthers) {
  (void)made(base(), "base");
  TrainConfig config = beside(base(), every_kind()[0], "base");
  const std::filesystem::path first = made(config, "first");
  TrainConfig still = beside(base(), every_kind()[0], "first");
  still.schedule.peak = 0;
  EXPECT_TRUE(content_of(made(still, "still") / "model.safetensors") ==
              content_of(first / "model.safetensors"));
  TrainConfig others = beside(base(), every_kind()[1], "first");
  expect_error(ErrorCode::kInvalidArgument, "adapters of kind routed, 3 of rank 4",
               [&] { (void)made(others, "others"); });
  TrainConfig none = base();
  none.init = folder.path() / "first";
  expect_error(ErrorCode::kBadFile, "none of this model's", [&] { (void)made(none, "none"); });
}

TEST_F(AdapterRuns, ThatCannotBeAreNamed) {
  (void)made(base(), "base");
  const auto refuse = [&](const char* words, const std::function<void(TrainConfig&)>& spoil) {
    TrainConfig config = beside(base(), every_kind()[0], "base");
    spoil(config);
    expect_error(ErrorCode::kInvalidArgument, words, [&] { (void)made(config, "refused"); });
  };
  refuse("adapters of kind routed want a base", [](TrainConfig& c) { c.init.clear(); });
  refuse("balance=0.5 is there to move it", [](TrainConfig& c) { c.model.losses.balance = 0.5; });
  refuse("z=0.25 is there to move it", [](TrainConfig& c) { c.model.losses.z = 0.25; });
  refuse("freeze: experts, but beside adapters",
         [](TrainConfig& c) { c.freeze = {Group::kExperts}; });
  refuse("freeze: the model has no parameters of the group adapters", [](TrainConfig& c) {
    c.model.adapters.reset();
    c.freeze = {Group::kAdapters};
  });
  TrainConfig config = beside(base(), every_kind()[0], "base");
  TrainOptions two = options("refused");
  two.ranks = 2;
  expect_error(ErrorCode::kUnsupported, "adapters over 2 ranks",
               [&] { (void)train(config, text, nullptr, two); });
}

}  // namespace
}  // namespace switchyard::models

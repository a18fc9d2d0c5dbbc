// Losses on held-out text, leaks, and continued prompts.
#include "switchyard/models/evaluate.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "switchyard/error.hpp"
#include "switchyard/models/generate.hpp"
#include "testkit/expect_error.hpp"
#include "tests/models/evaluation/made_model.hpp"
#include "tests/models/text_files.hpp"

namespace switchyard::models {
namespace {

TEST(Evaluate, IsTheLossOfEveryWindowByItselfInDouble) {
  const TestFolder folder;
  const std::string a = small_text(70);
  const std::string b = small_text(200).substr(100);
  const Text text({folder.file("a", a), folder.file("b", b)});
  Model model = made_model(small_bytes_model());
  const Evaluation found = evaluate(model, text, {.sequences = 3});
  ASSERT_EQ(found.documents.size(), 2U);
  Score all;
  std::size_t window = 0;
  for (std::size_t d = 0; d < 2; ++d) {
    const std::string& content = d == 0 ? a : b;
    Score wanted;
    for (std::size_t first = 0; first + 1 < content.size(); first += 16) {
      const double before = wanted.nats;
      const std::size_t length = std::min<std::size_t>(16, content.size() - 1 - first);
      std::vector<std::int32_t> tokens(content.begin() + std::ptrdiff_t(first),
                                       content.begin() + std::ptrdiff_t(first + length));
      std::vector<float> logits(length * 256);
      model.forward({tokens.data(), {1, std::int64_t(length)}},
                    {logits.data(), {std::int64_t(length), 256}});
      for (std::size_t i = 0; i < length; ++i) {
        const std::span<const float> row(logits.data() + i * 256, 256);
        const auto target = static_cast<unsigned char>(content[first + i + 1]);
        long double sum = 0;
        for (const float x : row) sum += std::exp(static_cast<long double>(x));
        wanted.nats += static_cast<double>(std::log(sum) - static_cast<long double>(row[target]));
        wanted.correct += std::max_element(row.begin(), row.end()) - row.begin() == target;
        ++wanted.targets;
      }
      ASSERT_LT(window, found.windows.size());
      const WindowScore& one = found.windows[window++];
      EXPECT_EQ(one.window.document, std::int64_t(d));
      EXPECT_EQ(one.window.first, std::int64_t(first));
      EXPECT_EQ(one.score.targets, std::int64_t(length));
      EXPECT_NEAR(one.score.nats, wanted.nats - before, 1e-4);
    }
    const Score& score = found.documents[d].score;
    EXPECT_EQ(score.targets, wanted.targets);
    EXPECT_EQ(score.targets, std::int64_t(content.size()) - 1);
    EXPECT_EQ(score.correct, wanted.correct);
    EXPECT_NEAR(score.nats, wanted.nats, 1e-6 * wanted.nats);
    all.add(wanted);
  }
  EXPECT_NEAR(found.all.nats, all.nats, 1e-6 * all.nats);
  EXPECT_DOUBLE_EQ(found.all.bits_per_byte(), found.all.nats_per_byte() / std::log(2.0));
  EXPECT_DOUBLE_EQ(found.all.perplexity(), std::exp(found.all.nats_per_byte()));
  EXPECT_FALSE(found.at_capacity.has_value());
}

TEST(Evaluate, HowManyWindowsGoTogetherDoesNotShow) {
  const TestFolder folder;
  const Text text({folder.file("a", small_text(300))});
  Model model = made_model(small_bytes_model());
  const double one = evaluate(model, text, {.sequences = 1}).all.nats;
  for (const std::int64_t sequences : {2, 7, 100}) {
    EXPECT_EQ(evaluate(model, text, {.sequences = sequences}).all.nats, one);
  }
}

TEST(Evaluate, ARouterOfGroupsIsGivenWholeOnes) {
  const TestFolder folder;
  const Text text({folder.file("a", small_text(55)), folder.file("b", "one more")});
  ModelConfig config = small_bytes_model();
  config.router = "expert-choice";
  Model model = made_model(config);
  const Evaluation found = evaluate(model, text);
  EXPECT_EQ(found.all.targets, 54 + 7);
  EXPECT_TRUE(std::isfinite(found.all.nats));
}

TEST(Evaluate, AtTheCapacityOfTrainingExpertsDrop) {
  const TestFolder folder;
  const Text text({folder.file("a", small_text(400))});
  ModelConfig config = small_bytes_model();
  Model free_model = made_model(config);
  config.capacity_factor = 0.5;
  Model model = made_model(config);
  const Evaluation found = evaluate(model, text, {.at_capacity = true});
  EXPECT_EQ(found.all.nats, evaluate(free_model, text).all.nats);  // dropless all the same
  ASSERT_TRUE(found.at_capacity.has_value());
  EXPECT_GE(found.at_capacity->drop, 0.5 - 0.05);
  EXPECT_LT(found.at_capacity->drop, 1);
  EXPECT_NE(found.at_capacity->nats_per_byte, found.all.nats_per_byte());
  config.capacity_factor = 4;  // of 4 experts: room for all
  Model roomy = made_model(config);
  const Evaluation all = evaluate(roomy, text, {.at_capacity = true});
  EXPECT_EQ(all.at_capacity->drop, 0);
}

TEST(Leaks, ACausalRouterHasNoneAndExpertChoiceHas) {
  const TestFolder folder;
  const Text text({folder.file("a", small_text(100))});
  for (const char* router : {"top-k", "top-k:top-k=1", "hash", "relu", "chain", "expert-choice",
                             "soft-moe:slots=2", "soft-moe:slots=2,group=4,causal=yes"}) {
    ModelConfig config = small_bytes_model();
    config.router = router;
    Model model = made_model(config);
    const bool causal = has_causal_router(config);
    EXPECT_EQ(causal, config.router != "expert-choice" && config.router != "soft-moe:slots=2");
    const std::vector<LeakProbe> probes = audit_leaks(model, text, 3);
    ASSERT_EQ(probes.size(), 6U);
    bool later_same = true;
    for (const LeakProbe& probe : probes) {
      EXPECT_EQ(probe.same, probe.largest_change == 0) << router;
      if (probe.replaced == LeakProbe::Replaced::kLaterTokens) {
        later_same = later_same && probe.same;
      } else {
        EXPECT_TRUE(probe.same) << router;  // groups are sequences
      }
    }
    EXPECT_EQ(later_same, causal) << router;
  }
}

TEST(Leaks, AGroupOfAllSequencesLeaksBetweenThem) {
  const TestFolder folder;
  const Text text({folder.file("a", small_text(100))});
  ModelConfig config = small_bytes_model();
  config.router = "expert-choice:group=32";
  Model model = made_model(config);
  bool others_same = true;
  for (const LeakProbe& probe : audit_leaks(model, text, 2)) {
    if (probe.replaced == LeakProbe::Replaced::kOtherSequences) {
      others_same = others_same && probe.same;
    }
  }
  EXPECT_FALSE(others_same);
}

TEST(Leaks, ATextOfLessThanTwoWindowsIsRefused) {
  const TestFolder folder;
  const Text text({folder.file("a", small_text(32))});
  Model model(small_bytes_model());
  EXPECT_THROW((void)audit_leaks(model, text, 4), Error);
  EXPECT_THROW((void)audit_leaks(model, text, 1), Error);
}

std::vector<std::int32_t> ids_of(const std::string& text) { return {text.begin(), text.end()}; }

TEST(Generate, GreedyTokensAreTheLargestLogitsOfTheWholeSequence) {
  Model model = made_model(small_bytes_model());
  const std::vector<std::int32_t> prompt = ids_of("all ha");
  const Generation made =
      generate(model, {.prompt = prompt, .max_new_tokens = 8, .sampling = {.temperature = 0}});
  ASSERT_EQ(made.tokens.size(), 1U);
  std::vector<std::int32_t> sequence = prompt;
  for (const std::int32_t token : made.tokens[0]) {
    std::vector<float> logits(sequence.size() * 256);
    model.forward({sequence.data(), {1, std::ssize(sequence)}},
                  {logits.data(), {std::ssize(sequence), 256}});
    const auto last = logits.end() - 256;
    EXPECT_EQ(token, std::max_element(last, logits.end()) - last);
    sequence.push_back(token);
  }
}

TEST(Generate, ASequenceHasTheSameTokensAloneAndInABatch) {
  Model model = made_model(small_bytes_model());
  const std::vector<std::int32_t> prompt = ids_of("each");
  const auto made = [&](std::int64_t batch, std::int64_t count) {
    return generate(model, {.prompt = prompt,
                            .batch = batch,
                            .max_new_tokens = count,
                            .sampling = {.temperature = 1.5, .top_k = 50, .seed = 9}})
        .tokens;
  };
  const auto five = made(5, 10);
  ASSERT_EQ(five.size(), 5U);
  EXPECT_EQ(made(1, 10)[0], five[0]);
  EXPECT_EQ(made(2, 10)[1], five[1]);
  EXPECT_NE(five[0], five[1]);
  const auto fewer = made(1, 4)[0];
  EXPECT_TRUE(std::equal(fewer.begin(), fewer.end(), five[0].begin()));
}

TEST(Generate, FillsThePositionsAndRefusesMore) {
  Model model = made_model(small_bytes_model());
  const std::vector<std::int32_t> prompt = ids_of("0123456789");
  EXPECT_EQ(generate(model, {.prompt = prompt, .max_new_tokens = 7}).tokens[0].size(), 7U);
  for (const GenerateArgs& args :
       {GenerateArgs{.prompt = prompt, .max_new_tokens = 8}, GenerateArgs{.prompt = {}},
        GenerateArgs{.prompt = {256}}, GenerateArgs{.prompt = {-1}},
        GenerateArgs{.prompt = prompt, .batch = 0},
        GenerateArgs{.prompt = prompt, .max_new_tokens = 0}}) {
    EXPECT_THROW((void)generate(model, args), Error);
  }
  int calls = 0;
  const Generation ended =
      generate(model, {.prompt = prompt, .max_new_tokens = 7, .on_token = [&](std::int64_t) {
                         return ++calls == 3;
                       }});
  EXPECT_EQ(ended.tokens[0].size(), 3U);
}

TEST(Generate, ARouterThatLooksAheadIsRefusedByName) {
  for (const char* router : {"expert-choice", "soft-moe:slots=2"}) {
    ModelConfig config = small_bytes_model();
    config.router = router;
    Model model(config);
    test::expect_error(ErrorCode::kUnsupported, router,
                       [&] { (void)generate(model, {.prompt = {65}, .max_new_tokens = 2}); });
  }
}

}  // namespace
}  // namespace switchyard::models

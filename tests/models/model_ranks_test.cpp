// A model over ranks beside the same on one: logits by bits, losses, statistics and every gradient;
// what it refuses; and ranks that fail.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <mutex>
#include <string>

#include "testkit/expect_error.hpp"
#include "tests/models/small_model.hpp"

namespace switchyard::test {
namespace {

using models::Model;
using models::ModelConfig;
using models::ParameterTensor;
using models::StepStats;
using models::TensorPart;

constexpr std::int64_t kLength = 23;

/// Gradients by the names of files, with what ranks have in common compared by bits.
struct Gradient {
  std::vector<float> values{};
  std::int64_t cols = 0;
};
using Gradients = std::map<std::string, Gradient>;

void take_gradients(const Model& model, Gradients& out) {
  for (const ParameterTensor& tensor : model.parameters()) {
    for (const TensorPart& part : tensor.parts) {
      const float* const first = tensor.gradient + part.offset;
      const std::vector<float> values(first, first + part.size());
      const auto [place, is_new] = out.emplace(part.name, Gradient{values, part.shape.back()});
      EXPECT_TRUE(is_new || place->second.values == values)
          << part.name << " differs between ranks";
      EXPECT_TRUE(is_new || !tensor.sharded) << part.name;
    }
  }
}

struct Outcome {
  std::vector<float> logits{};
  double loss = 0;
  StepStats stats{};
  Gradients gradients{};
};

/// Two calls of six sequences. Each rank has neighbouring ones; the first has the fewest targets.
Outcome run(const ModelConfig& config, int num_ranks, bool recompute = false) {
  constexpr std::int64_t kSequences = 12, kCalls = 2;
  Text text(kSequences, kLength, config.vocabulary, 7);
  for (std::size_t i = 0; i < 2 * kLength; i += 3) text.targets[i] = -1;
  Outcome out;
  std::mutex mutex;
  bool is_first = true;
  const std::int64_t rows = kSequences / kCalls / num_ranks;
  const auto body = [&](Communicator* ranks) {
    const int rank = ranks == nullptr ? 0 : ranks->rank();
    Model model(config, {.num_threads = 1,
                         .seed = 3,
                         .max_tokens = rows * kLength,
                         .recompute = recompute,
                         .communicator = ranks});
    const auto part = [&](const std::vector<std::int32_t>& ids, std::int64_t first) {
      return Matrix<const std::int32_t>{ids.data() + first * kLength, {rows, kLength}};
    };
    StepStats stats;
    double loss = 0;
    std::vector<float> logits(static_cast<std::size_t>(rows * kLength * config.vocabulary));
    for (std::int64_t call = 0; call < kCalls; ++call) {
      const std::int64_t first = (call * num_ranks + rank) * rows;
      loss += model.loss_and_gradients({.tokens = part(text.tokens, first),
                                        .targets = part(text.targets, first),
                                        .scale = 0.5,
                                        .accumulate = call > 0,
                                        .step = 4,
                                        .first_token = first * kLength,
                                        .stats = &stats});
    }
    model.sum_gradients();
    model.forward(part(text.tokens, rank * rows),
                  {logits.data(), {rows * kLength, config.vocabulary}});
    const std::lock_guard lock(mutex);
    take_gradients(model, out.gradients);
    if (is_first) out.loss = loss, out.stats = stats;
    EXPECT_EQ(loss, out.loss);
    EXPECT_EQ(stats.loss, out.stats.loss);
    is_first = false;
    out.logits.resize(logits.size() * static_cast<std::size_t>(num_ranks));
    std::ranges::copy(logits, out.logits.begin() + std::ssize(logits) * rank);
  };
  if (num_ranks == 1) {
    body(nullptr);
    return out;
  }
  run_ranks(num_ranks, [&](Communicator& ranks) { body(&ranks); });
  return out;
}

void expect_near(const Outcome& got, const Outcome& want, bool bits) {
  EXPECT_TRUE(!bits || got.logits == want.logits);
  EXPECT_NEAR(got.loss, want.loss, 1e-6);
  EXPECT_NEAR(got.stats.loss, want.stats.loss, 1e-6);
  EXPECT_NEAR(got.stats.nll, want.stats.nll, 1e-5);
  EXPECT_EQ(got.stats.targets, want.stats.targets);
  EXPECT_EQ(got.stats.calls, want.stats.calls);
  ASSERT_EQ(got.stats.layers.size(), want.stats.layers.size());
  for (std::size_t l = 0; l < want.stats.layers.size(); ++l) {
    EXPECT_EQ(got.stats.layers[l].tokens, want.stats.layers[l].tokens);
    EXPECT_EQ(got.stats.layers[l].counts, want.stats.layers[l].counts);
    EXPECT_EQ(got.stats.layers[l].counts_kept, want.stats.layers[l].counts_kept);
    EXPECT_NEAR(got.stats.layers[l].losses.balance, want.stats.layers[l].losses.balance, 1e-6);
    EXPECT_NEAR(got.stats.layers[l].losses.total, want.stats.layers[l].losses.total, 1e-6);
  }
  ASSERT_EQ(got.gradients.size(), want.gradients.size());
  for (const auto& [name, gradient] : want.gradients) {
    expect_gradient_near(name, got.gradients.at(name).values, gradient.values, gradient.cols, 2e-6);
  }
}

TEST(ModelOverRanks, HasTheLogitsLossesAndGradientsOfOneRank) {
  for (const char* const router : {"top-k", "hash", "switch", "gshard", "noisy-top-k", "v-moe",
                                   "top-k:score=sigmoid", "chain"}) {
    SCOPED_TRACE(router);
    ModelConfig config = small_config();
    config.router = router;
    if (config.router != "hash") config.losses = {.balance = 0.3, .z = 0.01, .entropy = 0.02};
    const Outcome one = run(config, 1);
    for (const int ranks : {2, 3}) {
      SCOPED_TRACE(ranks);
      expect_near(run(config, ranks), one, ranks == 2);
    }
  }
}

TEST(ModelOverRanks, DoesSoWithDenseLayersSharedExpertsAndLossesOfSequencesAndDevices) {
  ModelConfig config = small_config();
  config.layers = 3, config.first_dense = 1, config.dense_inner = 14;
  config.shared_inner = 10, config.shared_gated = true, config.tied = true;
  config.experts = 8;
  config.losses = {.balance = 0.3, .scope = LossScope::kSequence, .sequence_length = kLength};
  expect_near(run(config, 2, true), run(config, 1), true);
  config.losses = {.balance = 0.1, .device = 0.2, .devices = 4};
  config.losses.share = BalanceShare::kTokens;
  expect_near(run(config, 6), run(config, 1), false);
  config.losses.share = BalanceShare::kFirstChoice;
  expect_near(run(config, 2), run(config, 1), true);
  config.first_dense = 3;  // no experts at all
  expect_near(run(config, 3), run(config, 1), true);
}

TEST(ModelOverRanks, EvaluatesWhereSomeRanksHaveNothing) {
  const ModelConfig config = small_config();
  const Text text(1, kLength, config.vocabulary);
  Model alone(config, {.seed = 3});
  std::vector<float> nll(kLength), wanted(kLength);
  const double sum = alone.evaluate(text.x(), text.y(), {wanted.data(), {1, kLength}});
  run_ranks(3, [&](Communicator& ranks) {
    Model model(config, {.seed = 3, .max_tokens = kLength, .communicator = &ranks});
    if (ranks.rank() == 1) {
      EXPECT_EQ(model.evaluate(text.x(), text.y(), {nll.data(), {1, kLength}}), sum);
    } else {
      EXPECT_EQ(
          model.evaluate({nullptr, {0, kLength}}, {nullptr, {0, kLength}}, {nullptr, {0, kLength}}),
          0);
    }
  });
  EXPECT_EQ(nll, wanted);
}

TEST(ModelOverRanks, RefusesByNameWhatDependsOnHowTokensLie) {
  const auto refused = [](const char* word, const auto& change) {
    ModelConfig config = small_config();
    change(config);
    expect_error(ErrorCode::kUnsupported, word, [&] { models::check_ranks(config, 2); });
    models::check_ranks(config, 1);
  };
  for (const char* const router :
       {"expert-choice", "expert-threshold", "relu", "top-p", "adamoe"}) {
    refused(router, [&](ModelConfig& c) { c.router = std::string(router); });
  }
  refused("capacity_factor=1.5", [](ModelConfig& c) { c.capacity_factor = 1.5; });
  refused("loss importance", [](ModelConfig& c) { c.losses.importance = 1; });
  refused("loss communication", [](ModelConfig& c) { c.losses.communication = 1; });
  expect_error(ErrorCode::kInvalidArgument, "6 ranks share 5 experts",
               [&] { models::check_ranks(small_config(), 6); });
}

TEST(ModelOverRanks, RoutingIsNotReadOverThem) {
  const ModelConfig config = small_config();
  const Text text(2, kLength, config.vocabulary);
  expect_error(ErrorCode::kUnsupported, "one rank so far, not over ranks", [&] {
    run_ranks(2, [&](Communicator& ranks) {
      Model model(config, {.max_tokens = 2 * kLength, .communicator = &ranks});
      std::vector<float> nll(text.tokens.size());
      model.evaluate(text.x(), text.y(), {nll.data(), {2, kLength}},
                     [](models::LayerRouting&) { return false; });
    });
  });
}

TEST(ModelOverRanks, LeaveTogetherWhereOneFails) {
  const ModelConfig config = small_config();
  // Another number of tokens, an id that there is not, and a rank that never comes.
  for (const int trouble : {0, 1, 2}) {
    SCOPED_TRACE(trouble);
    const Text good(2, kLength, config.vocabulary);
    Text bad(trouble == 0 ? 1 : 2, kLength, config.vocabulary);
    bad.tokens[5] = trouble == 1 ? 99 : 0;
    const auto go = [&] {
      run_ranks(3, [&](Communicator& ranks) {
        Model model(config, {.max_tokens = 2 * kLength, .communicator = &ranks});
        if (ranks.rank() == 1 && trouble == 2) throw Error(ErrorCode::kIo, "gone");
        (void)step(model, ranks.rank() == 1 ? bad : good);
      });
    };
    if (trouble == 0) expect_error(ErrorCode::kInvalidArgument, "tokens of 115", go);
    if (trouble == 1) expect_error(ErrorCode::kInvalidArgument, "tokens[0][5] is 99", go);
    if (trouble == 2) expect_error(ErrorCode::kIo, "gone", go);
  }
}

}  // namespace
}  // namespace switchyard::test

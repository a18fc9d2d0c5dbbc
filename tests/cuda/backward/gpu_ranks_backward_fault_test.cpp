// The way back over ranks on GPUs where ranks die, or are of another mind.
#include <gtest/gtest.h>

#include <algorithm>

#include "testkit/expect_error.hpp"
#include "tests/cuda/backward/gpu_ranks_backward_case.hpp"

namespace switchyard {
namespace {

using std::chrono::milliseconds;
using test::expect_error;
using test::Gradients;
using test::kManyTokens;
using test::layer_config;
using test::on_ranks;
using test::Place;
using test::Trainer;

void expect_timeout(const std::function<void()>& call) {
  expect_error(ErrorCode::kTimeout, "waiting for rank 1", call);
}

TEST(RanksBackwardOnGpu, ARankThatDiesBetweenForwardAndBackwardIsNamedAndTrainingGoesOn) {
  const MadeUp made(layer_config(6), DType::kBF16, false);
  for (const std::int64_t max_tokens : {std::int64_t{0}, kManyTokens}) {
    run_ranks(3, [&](Communicator& ranks) {
      use_gpu_of_rank(0);
      ranks.set_timeout(milliseconds(3000));
      Trainer trainer(made, {.max_tokens = max_tokens}, &ranks, {0, 10, 20, 30});
      ranks.set_timeout(std::chrono::seconds(10));
      SavedForward saved;
      const Gradients want = trainer.step(saved);
      trainer.forward(&saved);
      trainer.layer().check();
      ranks.barrier("before the fault");
      if (ranks.rank() != 1) {
        expect_timeout([&] {
          trainer.backward(saved);
          trainer.layer().check();
        });
      }
      ranks.recover();
      expect_error(ErrorCode::kInvalidArgument,
                   ranks.rank() == 1 ? "the ranks have recovered since this saved forward"
                                     : "a backward has used this saved forward already",
                   [&] { trainer.backward(saved); });
      ranks.recover();  // a rank that throws makes the others leave
      for (int step = 0; step < 2; ++step) EXPECT_EQ(trainer.step(saved), want);
      ranks.barrier("end");
    });
  }
}

TEST(RanksBackwardOnGpu, RanksThatGoBackThroughDifferentThingsAreToldSoAndRecover) {
  const MadeUp made(layer_config(6), DType::kBF16, false);
  on_ranks(2, Place::kOneGpu, [&](Communicator& ranks) {
    Trainer trainer(made, {}, &ranks, {0, 20, 40});
    SavedForward first, second;
    const Gradients want = trainer.step(first);
    (void)trainer.step(second);
    const auto differ = [&](const char* words, const std::function<void()>& backward) {
      expect_error(ErrorCode::kCommunication, words, [&] {
        backward();
        trainer.layer().check();
      });
      ranks.recover();
      EXPECT_EQ(trainer.step(first), want);
    };
    trainer.forward(&first);
    trainer.forward(&second);
    differ("goes back through forward",
           [&] { trainer.backward(ranks.rank() == 0 ? first : second); });
    trainer.forward(&first);
    differ("ask for gradients of different parameters", [&] {
      BackwardArgs args = trainer.args(first);
      if (ranks.rank() == 0) args.dgate = {};
      trainer.layer().backward(args);
    });
    ranks.barrier("end");
  });
}

TEST(RanksBackwardOnGpu, ReloadedExpertsOfAllRanksAreTheOnesOfTheNextStep) {
  MadeUp made(layer_config(6), DType::kBF16, false);
  on_ranks(2, Place::kOneGpu, [&](Communicator& ranks) {
    Trainer trainer(made, {}, &ranks, {0, 20, 40});
    SavedForward saved;
    const Gradients before = trainer.step(saved);
    trainer.forward(&saved);
    trainer.layer().check();
    ranks.barrier("weights change");
    if (ranks.rank() == 0)
      std::swap_ranges(made.w2.begin(), made.w2.begin() + 1000, made.w2.end() - 1000);
    trainer.layer().reload_experts();
    expect_error(ErrorCode::kInvalidArgument, "the experts were reloaded after this saved forward",
                 [&] { trainer.backward(saved); });
    ranks.recover();
    EXPECT_NE(trainer.step(saved).dtokens, before.dtokens);
    ranks.barrier("end");
  });
}

}  // namespace
}  // namespace switchyard

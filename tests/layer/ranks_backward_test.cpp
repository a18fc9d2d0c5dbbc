// The layer's way back over ranks, beside its numbers, which `switchyard verify --pass` checks:
// what is kept, which bits are promised, and ranks that are late, dead or of another mind.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "comm/host/gradient_exchange.hpp"
#include "switchyard/layer.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/random_values.hpp"
#include "testkit/rank_harness.hpp"
#include "verify/check_backward.hpp"
#include "verify/problem.hpp"

namespace switchyard {
namespace {

using std::chrono::milliseconds;
using test::expect_error;
using verify::Case;
using verify::Problem;

constexpr std::int64_t kHidden = 11;
constexpr std::int64_t kInner = 6;
constexpr std::int32_t kExperts = 5;
constexpr std::int32_t kTopK = 2;
constexpr std::int64_t kMostTokens = 9;
constexpr milliseconds kTimeout(500);

Case make_case() {
  Case test;
  test.seed = 5;
  test.layer.router = {.num_experts = kExperts, .kind = TopKRouter{.top_k = kTopK}};
  test.layer.experts = {.num_experts = kExperts, .hidden = kHidden, .inner = kInner, .bias = true};
  test.layer.shared = test.layer.experts;
  test.layer.shared.num_experts = 1;
  test.layer.shared.inner = 4;
  test.layer.shared_gated = true;
  return test;
}

/// One rank's layer, some of its tokens, and a step of training with them.
class Trainer {
 public:
  explicit Trainer(Communicator& ranks, LayerOptions options = {})
      : problem_(make_problem(make_case())), layer_(problem_.model, sized(options), &ranks) {
    set_tokens(kMostTokens - ranks.rank(), static_cast<unsigned>(ranks.rank()));
  }

  void set_tokens(std::int64_t count, unsigned seed) {
    num_tokens_ = count;
    tokens_ = random_floats(count * kHidden, 2 * seed + 1);
    dout = random_floats(count * kHidden, 2 * seed + 2);
    out_.resize(tokens_.size());
  }

  void forward(SavedForward& saved) {
    layer_.forward({.tokens = matrix(tokens_), .out = matrix(out_), .saved = &saved});
  }

  /// dtokens, dw13 and dgate, one after the other.
  std::vector<float> backward(SavedForward& saved, bool to_gate = true) {
    std::vector<float> dtokens(tokens_.size());
    const std::int64_t rows = layer_.weights().num_local() * 2 * kInner;
    std::vector<float> w13(static_cast<std::size_t>(rows * kHidden));
    std::vector<float> gate(kExperts * kHidden);
    BackwardArgs args{
        .saved = &saved,
        .dout = matrix(dout),
        .dtokens = matrix(dtokens),
        .experts = {.w13 = {reinterpret_cast<std::byte*>(w13.data()), DType::kF32, rows, kHidden}}};
    if (to_gate) {
      args.dgate = {reinterpret_cast<std::byte*>(gate.data()), DType::kF32, kExperts, kHidden};
    }
    layer_.backward(args);
    dtokens.insert(dtokens.end(), w13.begin(), w13.end());
    dtokens.insert(dtokens.end(), gate.begin(), gate.end());
    return dtokens;
  }

  std::vector<float> step(SavedForward& saved) {
    forward(saved);
    return backward(saved);
  }

  [[nodiscard]] MoeLayer& layer() { return layer_; }
  [[nodiscard]] std::int64_t num_tokens() const { return num_tokens_; }

  std::vector<float> dout;

 private:
  static LayerOptions sized(LayerOptions options) {
    options.max_tokens = kMostTokens;
    return options;
  }
  [[nodiscard]] RawMatrix matrix(std::vector<float>& values) const {
    return {reinterpret_cast<std::byte*>(values.data()), DType::kF32, num_tokens_, kHidden};
  }

  Problem problem_;
  MoeLayer layer_;
  std::int64_t num_tokens_ = 0;
  std::vector<float> tokens_, out_;
};

void expect_timeout_of(const char* rank, const std::function<void()>& call) {
  expect_error(ErrorCode::kTimeout, rank, call);
}

TEST(RanksBackward, ARankThatStaysAwayFromABackwardIsNamedAndTrainingGoesOn) {
  // The first backward makes the window, so it is lost in another place than a later one.
  for (const int steps_before : {0, 2}) {
    on_ranks(
        3,
        [&](Communicator& ranks) {
          Trainer trainer(ranks);
          SavedForward saved;
          std::vector<float> want;
          for (int step = 0; step < steps_before; ++step) want = trainer.step(saved);
          trainer.forward(saved);
          if (ranks.rank() == 1) {
            std::this_thread::sleep_for(kTimeout);
          } else {
            expect_timeout_of("rank 1", [&] { (void)trainer.backward(saved); });
          }
          ranks.recover();
          expect_error(ErrorCode::kInvalidArgument,
                       ranks.rank() == 1 ? "the ranks have recovered since this saved forward"
                                         : "a backward has used this saved forward already",
                       [&] { (void)trainer.backward(saved); });
          ranks.recover();
          for (int step = 0; step < 3; ++step) {
            const std::vector<float> have = trainer.step(saved);
            if (!want.empty()) {
              EXPECT_EQ(have, want);
            }
            want = have;
          }
        },
        kTimeout);
  }
}

TEST(RanksBackward, AForwardWhoseRanksTimedOutHasNoBackward) {
  on_ranks(
      2,
      [](Communicator& ranks) {
        Trainer trainer(ranks);
        SavedForward saved;
        if (ranks.rank() == 0) {
          expect_timeout_of("rank 1", [&] { trainer.forward(saved); });
          EXPECT_FALSE(saved.ready());
        } else {
          std::this_thread::sleep_for(kTimeout);
        }
        ranks.recover();
        if (ranks.rank() == 0) {
          expect_error(ErrorCode::kInvalidArgument, "no forward has filled this saved forward",
                       [&] { (void)trainer.backward(saved); });
        }
        ranks.recover();
        (void)trainer.step(saved);
      },
      kTimeout);
}

TEST(RanksBackward, RanksThatGoBackThroughDifferentForwardsAreToldWhoseAndRecover) {
  on_ranks(2, [](Communicator& ranks) {
    Trainer trainer(ranks);
    SavedForward first;
    SavedForward second;
    const std::vector<float> want = trainer.step(first);
    trainer.forward(first);
    trainer.forward(second);
    try {
      (void)trainer.backward(ranks.rank() == 0 ? first : second);
      ADD_FAILURE() << "nobody noticed";
    } catch (const Error& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("goes back through forward"), std::string::npos) << text;
    }
    ranks.recover();
    EXPECT_EQ(trainer.step(first), want);
  });
}

TEST(RanksBackward, RanksThatAskForDifferentParametersGradientsAreToldSo) {
  on_ranks(2, [](Communicator& ranks) {
    Trainer trainer(ranks);
    SavedForward saved;
    trainer.forward(saved);
    try {
      (void)trainer.backward(saved, ranks.rank() == 0);
      ADD_FAILURE() << "nobody noticed";
    } catch (const Error& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("ask for gradients of different parameters"), std::string::npos) << text;
    }
    ranks.recover();
    (void)trainer.step(saved);
  });
}

TEST(RanksBackward, ForwardsInFlightGoBackInAnyOrder) {
  on_ranks(4, [](Communicator& ranks) {
    Trainer trainer(ranks);
    const auto rank = static_cast<unsigned>(ranks.rank());
    SavedForward first;
    SavedForward second;
    const std::vector<float> of_large = trainer.step(first);
    const auto small = [&] { trainer.set_tokens(ranks.rank() % 3, rank + 7); };
    const auto large = [&] { trainer.set_tokens(kMostTokens - ranks.rank(), rank); };
    small();
    const std::vector<float> of_small = trainer.step(second);
    for (int step = 0; step < 3; ++step) {
      large();
      trainer.forward(first);
      small();
      trainer.forward(second);
      large();
      EXPECT_EQ(trainer.backward(first), of_large);
      small();
      EXPECT_EQ(trainer.backward(second), of_small);
      std::swap(first, second);
    }
  });
}

TEST(RanksBackward, WiresOfTheForwardDoNotRoundGradients) {
  on_ranks(2, [](Communicator& ranks) {
    SavedForward saved;
    const std::vector<float> want = Trainer(ranks).step(saved);
    for (const DType wire : {DType::kBF16, DType::kF8E4M3}) {
      for (const bool rank_invariant : {false, true}) {
        Trainer trainer(ranks, {.combine_wire = wire, .rank_invariant = rank_invariant});
        EXPECT_EQ(trainer.step(saved), want) << to_string(wire);
      }
    }
  });
}

TEST(RanksBackward, WhatIsKeptHasTheBytesOfTheFormula) {
  on_ranks(3, [](Communicator& ranks) {
    for (const DType compute : {DType::kF32, DType::kBF16}) {
      Trainer trainer(ranks, {.compute = compute});
      const std::int64_t c = size_of(compute);
      const std::int64_t tokens = trainer.num_tokens();
      SavedForward few(Recompute::kActivationInput);
      trainer.forward(few);
      const Traffic& traffic = trainer.layer().traffic();
      std::int64_t received = 0;
      for (int from = 0; from < 3; ++from) {
        received += traffic.rows[static_cast<std::size_t>(from * 3 + ranks.rank())];
      }
      const std::int64_t always = c * tokens * kHidden + 4 * tokens * kExperts +
                                  8 * tokens * kTopK + c * received * kHidden +
                                  8 * received * kTopK + 8 * 3 * 3;
      EXPECT_EQ(few.bytes(), always);
      SavedForward all;
      trainer.forward(all);
      EXPECT_EQ(all.bytes(),
                always + c * trainer.layer().rows_executed() * 2 * kInner + c * tokens * 2 * 4);
    }
  });
}

TEST(RanksBackward, ANaNInDoutReachesTheDtokensOfItsTokenAndNoOther) {
  on_ranks(2, [](Communicator& ranks) {
    Trainer trainer(ranks);
    SavedForward saved;
    const std::vector<float> good = trainer.step(saved);
    if (ranks.rank() == 1) trainer.dout[3 * kHidden] = std::numeric_limits<float>::quiet_NaN();
    const std::vector<float> bad = trainer.step(saved);
    for (std::size_t i = 0; i < trainer.dout.size(); ++i) {
      if (ranks.rank() == 1 && i / kHidden == 3) {
        EXPECT_TRUE(std::isnan(bad[i])) << i;
      } else {
        EXPECT_EQ(bad[i], good[i]) << i;
      }
    }
  });
}

TEST(RanksBackward, SumsOverRanksAreAddedByTheTreeWhateverTheirSize) {
  constexpr std::int64_t kMost = 300'007;  // more than one chunk of each rank
  for (const int num_ranks : {2, 3, 4}) {
    on_ranks(num_ranks, [&](Communicator& ranks) {
      GradientExchange exchange(ranks, {.num_experts = 4, .top_k = 1, .hidden = 1, .max_tokens = 1},
                                DType::kF32, kMost);
      std::vector<std::vector<float>> parts;
      for (int r = 0; r < num_ranks; ++r) {
        parts.push_back(random_floats(kMost, static_cast<unsigned>(r) + 1));
      }
      for (const std::int64_t count : {kMost, std::int64_t{1}, std::int64_t{70'000}}) {
        std::vector<float> sum = parts[static_cast<std::size_t>(ranks.rank())];
        exchange.sum_over_ranks(sum.data(), count);
        std::int64_t wrong = 0;
        for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
          float want = parts[0][i] + parts[1][i];
          if (num_ranks == 3) want += parts[2][i];
          if (num_ranks == 4) want += parts[2][i] + parts[3][i];
          wrong += sum[i] == want ? 0 : 1;
        }
        EXPECT_EQ(wrong, 0) << count;
      }
    });
  }
}

#if !SWITCHYARD_TEST_MPI
TEST(RanksBackward, RanksWithoutTokensOrExpertsAndAllTokensToOneExpertGoBack) {
  for (const verify::Split split : {verify::Split::kEven, verify::Split::kFirst,
                                    verify::Split::kLast, verify::Split::kUneven}) {
    for (const verify::Given given : {verify::Given::kNothing, verify::Given::kOne,
                                      verify::Given::kNone, verify::Given::kRandom}) {
      for (const std::int64_t num_tokens : {0, 1, 13}) {
        Case test = make_case();
        test.ranks = 8;  // of 5 experts
        test.split = split;
        test.given = given;
        test.num_tokens = num_tokens;
        EXPECT_EQ(check_backward(make_problem(test), verify::run_backward), "")
            << static_cast<int>(split) << static_cast<int>(given) << num_tokens;
      }
    }
  }
}
#endif

}  // namespace
}  // namespace switchyard

// The way back through a layer over ranks on GPUs: random layers against the reference, and what it
// promises beside its numbers. Ranks are threads that share the first GPU; the last tests spread
// them.
#include <gtest/gtest.h>

#include <cmath>

#include "comm/device/device_exchange.hpp"
#include "testkit/gpu/captured_graph.hpp"
#include "testkit/gpu/expect_gradients.hpp"
#include "tests/cuda/backward/gpu_ranks_backward_case.hpp"
#include "tests/cuda/random_layers.hpp"
#include "verify/verify.hpp"

namespace switchyard {
namespace {

using test::evenly;
using test::Gradients;
using test::kManyTokens;
using test::layer_config;
using test::on_ranks;
using test::Place;
using test::Trainer;

/// Two steps of all ranks, which must agree; what belongs to tokens and experts rank by rank.
Gradients run_ranks_once(const MadeUp& made, const LayerOptions& options,
                         const std::vector<std::int64_t>& begin, Recompute recompute,
                         Place place = Place::kOneGpu) {
  const int num_ranks = static_cast<int>(begin.size()) - 1;
  std::vector<Gradients> parts(static_cast<std::size_t>(num_ranks));
  if (num_ranks == 1) {
    use_gpu_of_rank(0);
    Trainer trainer(made, options, nullptr, begin);
    SavedForward saved(recompute);
    return trainer.step(saved);
  }
  on_ranks(num_ranks, place, [&](Communicator& ranks) {
    Trainer trainer(made, options, &ranks, begin);
    SavedForward saved(recompute);
    Gradients& part = parts[static_cast<std::size_t>(ranks.rank())];
    part = trainer.step(saved);
    EXPECT_EQ(trainer.step(saved), part) << "a second step, rank " << ranks.rank();
    ranks.barrier("steps");
  });
  Gradients whole = parts.front();
  const auto append = [](std::vector<float>& to, const std::vector<float>& from) {
    to.insert(to.end(), from.begin(), from.end());
  };
  for (std::size_t r = 1; r < parts.size(); ++r) {
    EXPECT_EQ(parts[r].gate, whole.gate) << "rank " << r;
    EXPECT_EQ(parts[r].shared13, whole.shared13) << "rank " << r;
    EXPECT_EQ(parts[r].shared_gate, whole.shared_gate) << "rank " << r;
    append(whole.dtokens, parts[r].dtokens);
    append(whole.dweight, parts[r].dweight);
    append(whole.w13, parts[r].w13);
    append(whole.w2, parts[r].w2);
  }
  return whole;
}

/// Of what the ranks of run_ranks_once() sum over all tokens: only the order differs with how these
/// lie on ranks.
GradientTerms terms_of(const MadeUp& made, std::int64_t num_tokens) {
  use_gpu_of_rank(0);
  Trainer trainer(made, {.batch_invariant = true}, nullptr, {0, num_tokens});
  return gradient_terms(made.model, DType::kBF16, Trainer::made_up(num_tokens, 2 * 1),
                        Trainer::made_up(num_tokens, 2 * 1 + 1), trainer.routing());
}

void expect_bits_of_one_rank(Place place, const std::vector<int>& numbers_of_ranks) {
  const MadeUp made(layer_config(16), DType::kBF16, false);
  const GradientTerms terms = terms_of(made, 64);
  for (const std::int64_t max_tokens : {std::int64_t{0}, kManyTokens}) {
    for (const Recompute recompute : {Recompute::kNone, Recompute::kActivationInput}) {
      const LayerOptions options{.batch_invariant = true, .max_tokens = max_tokens};
      const Gradients one = run_ranks_once(made, options, {0, 64}, recompute);
      for (const int ranks : numbers_of_ranks) {
        SCOPED_TRACE(testing::Message() << ranks << " ranks, max_tokens " << max_tokens);
        const Gradients many = run_ranks_once(made, options, evenly(64, ranks), recompute, place);
        EXPECT_EQ(many.dtokens, one.dtokens);
        EXPECT_EQ(many.dweight, one.dweight);
        EXPECT_EQ(many.w13, one.w13);
        EXPECT_EQ(many.w2, one.w2);
        expect_sums_of(terms, terms.gate, "dgate", many.gate, one.gate);
        expect_sums_of(terms, terms.shared13, "shared dw13", many.shared13, one.shared13);
        expect_sums_of(terms, terms.shared_gate, "dshared_gate", many.shared_gate, one.shared_gate);
      }
    }
  }
}

TEST(RanksBackwardOnGpu, TwoRanksHaveTheBitsOfOne) { expect_bits_of_one_rank(Place::kOneGpu, {2}); }

TEST(RanksBackwardOnGpu, AnyNumberOfRanksThatDividesTheGroupsHasTheBitsOfOne) {
  expect_bits_of_one_rank(Place::kOneGpu, {4, 8});
}

TEST(RanksBackwardOnGpu, RanksWithoutTokensOrExpertsGoBack) {
  const MadeUp made(layer_config(5), DType::kBF16, false);
  const GradientTerms terms = terms_of(made, 30);
  for (const std::int64_t max_tokens : {std::int64_t{0}, kManyTokens}) {
    const LayerOptions options{.batch_invariant = true, .max_tokens = max_tokens};
    const Gradients one = run_ranks_once(made, options, {0, 30}, Recompute::kNone);
    for (const std::vector<std::int64_t>& begin : std::vector<std::vector<std::int64_t>>{
             {0, 0, 30}, {0, 30, 30}, {0, 0, 17, 17, 17, 29, 30, 30, 30}}) {
      const Gradients many = run_ranks_once(made, options, begin, Recompute::kNone);
      EXPECT_EQ(many.dtokens, one.dtokens);
      EXPECT_EQ(many.dweight, one.dweight);
      expect_sums_of(terms, terms.w13, "dw13", many.w13, one.w13);
      expect_sums_of(terms, terms.w2, "dw2", many.w2, one.w2);
      expect_sums_of(terms, terms.gate, "dgate", many.gate, one.gate);
      expect_sums_of(terms, terms.shared13, "shared dw13", many.shared13, one.shared13);
      expect_sums_of(terms, terms.shared_gate, "dshared_gate", many.shared_gate, one.shared_gate);
    }
  }
}

/// Losses by the counts of all ranks: each rank has its own tokens' mean, so that R ranks together
/// have R times the gradient of one with all tokens.
TEST(RanksBackwardOnGpu, LossesOfGlobalScopeGoByTheCountsOfAllRanks) {
  const MadeUp made(layer_config(6), DType::kBF16, false);
  LayerOptions options{.batch_invariant = true, .losses = {.balance = 50, .z = 0.1}};
  std::vector<float> one;
  {
    use_gpu_of_rank(0);
    Trainer trainer(made, options, nullptr, {0, 64});
    SavedForward saved;
    trainer.forward(&saved);
    BackwardArgs args = trainer.args(saved);
    args.loss_scale = 2;
    trainer.layer().backward(args);
    one = trainer.gradients().gate;
  }
  options.losses.scope = LossScope::kGlobal;
  on_ranks(2, Place::kOneGpu, [&](Communicator& ranks) {
    Trainer trainer(made, options, &ranks, {0, 32, 64});
    SavedForward saved;
    for (int step = 0; step < 2; ++step) {
      const std::vector<float> gate = trainer.step(saved).gate;
      double off = 0, size = 0;
      for (std::size_t i = 0; i < one.size(); ++i) {
        off += std::pow(double{gate[i]} - double{one[i]}, 2);
        size += std::pow(double{one[i]}, 2);
      }
      EXPECT_LT(std::sqrt(off), 1e-4 * std::sqrt(size)) << "rank " << ranks.rank();
    }
    ranks.barrier("steps");
  });
}

TEST(RanksBackwardOnGpu, AFewRandomLayersAgreeWithTheReference) {
  test::expect_random_layers({.cases = 16, .seed = 5, .pass = verify::Pass::kBackward}, {2, 3});
}

TEST(RanksBackwardOnGpu, RandomLayersAgreeWithTheReference) {
  test::expect_random_layers({.cases = 100, .seed = 7, .pass = verify::Pass::kBackward},
                             {2, 3, 4, 5, 8});
}

TEST(RanksBackwardOnGpu, RandomChainsNetworksAndResidualsAgreeWithTheReference) {
  for (const char* router :
       {"chain", "chain:iterations=3,inner-residual=no,outer-residual=yes",
        "top-k:network=cosine,width=16", "top-k:network=mlp,width=24",
        "top-k:network=hadamard,width=8", "moe++:constant=3,tau=0,renormalize=no,residual=yes"}) {
    SCOPED_TRACE(router);
    test::expect_random_layers(
        {.cases = 20, .seed = 8, .pass = verify::Pass::kBoth, .router = router}, {2, 3, 4});
  }
}

TEST(RanksBackwardOnGpu, ForwardsInFlightGoBackInAnyOrder) {
  const MadeUp made(layer_config(6), DType::kBF16, false);
  for (const std::int64_t max_tokens : {std::int64_t{0}, kManyTokens}) {
    on_ranks(2, Place::kOneGpu, [&](Communicator& ranks) {
      Trainer trainer(made, {.max_tokens = max_tokens}, &ranks, {0, 40, 90});
      SavedForward first, second;
      const auto of = [&](unsigned seed, SavedForward& saved) {
        ranks.barrier("inputs");
        trainer.set(seed);
        ranks.barrier("inputs are there");
        return trainer.step(saved);
      };
      const Gradients of_first = of(1, first);
      const Gradients of_second = of(2, second);
      EXPECT_NE(of_first.dtokens, of_second.dtokens);
      const auto forward = [&](unsigned seed, SavedForward* saved) {
        trainer.layer().check();
        ranks.barrier("inputs");
        trainer.set(seed);
        ranks.barrier("inputs are there");
        trainer.forward(saved);
      };
      for (int step = 0; step < 2; ++step) {
        forward(1, &first);
        forward(2, &second);
        forward(3, nullptr);
        forward(1, nullptr);  // its dout
        trainer.backward(first);
        EXPECT_EQ(trainer.gradients(), of_first);
        forward(2, nullptr);
        trainer.backward(second);
        EXPECT_EQ(trainer.gradients(), of_second);
        std::swap(first, second);
      }
      trainer.layer().check();
      ranks.barrier("end");
    });
  }
}

void replay_in_a_graph(Place place, int num_ranks) {
  const MadeUp made(layer_config(8), DType::kBF16, false);
  for (const std::int64_t max_tokens : {std::int64_t{0}, kManyTokens}) {
    on_ranks(num_ranks, place, [&](Communicator& ranks) {
      Trainer trainer(made, {.max_tokens = max_tokens}, &ranks, evenly(80, num_ranks));
      SavedForward saved;
      std::vector<Gradients> want;
      for (unsigned seed = 0; seed < 4; ++seed) {
        ranks.barrier("inputs");
        trainer.set(seed);
        ranks.barrier("inputs are there");
        want.push_back(trainer.step(saved));
      }
      ranks.barrier("graphs");
      const CapturedGraph graph(trainer.stream(), [&] { trainer.both(saved); });
      for (unsigned replay = 0; replay < 40; ++replay) {
        ranks.barrier("inputs");
        trainer.set(replay % 4);
        ranks.barrier("inputs are there");
        graph.launch();
        SWITCHYARD_CUDA(cudaStreamSynchronize(trainer.stream()));
        ASSERT_EQ(trainer.gradients(), want[replay % 4]) << "replay " << replay;
      }
      ranks.barrier("end");
    });
  }
}

TEST(RanksBackwardOnGpu, AGraphOfForwardAndBackwardIsReplayedWithOtherInputs) {
  replay_in_a_graph(Place::kOneGpu, 2);
}

TEST(RanksBackwardOnGpu, WiresOfTheForwardDoNotRoundGradients) {
  const MadeUp made(layer_config(8), DType::kBF16, false);
  const LayerOptions exact{.batch_invariant = true};
  const Gradients want = run_ranks_once(made, exact, evenly(40, 2), Recompute::kNone);
  for (const bool rank_invariant : {false, true}) {
    LayerOptions rounded = exact;
    rounded.combine_wire = DType::kBF16;
    rounded.rank_invariant = rank_invariant;
    EXPECT_EQ(run_ranks_once(made, rounded, evenly(40, 2), Recompute::kNone), want);
  }
}

/// By the tree: ((0+1)+(2+3))+...
float sum_of(const std::vector<std::vector<float>>& parts, std::size_t at) {
  std::vector<float> sums;
  for (const std::vector<float>& part : parts) sums.push_back(part[at]);
  for (std::size_t step = 1; step < sums.size(); step *= 2) {
    for (std::size_t r = 0; r + step < sums.size(); r += 2 * step) sums[r] += sums[r + step];
  }
  return sums.front();
}

void expect_sums(Place place, int num_ranks) {
  constexpr std::int64_t kMost = 300'007;
  on_ranks(num_ranks, place, [&](Communicator& ranks) {
    int device = 0;
    SWITCHYARD_CUDA(cudaGetDevice(&device));
    DeviceExchange exchange(ranks, {.num_experts = 8, .top_k = 1, .hidden = 8, .max_tokens = 1},
                            {.device = device, .one_place = true, .timeout = ranks.timeout()},
                            {.most_summed = kMost});
    std::vector<std::vector<float>> parts;
    for (int r = 0; r < num_ranks; ++r) {
      parts.push_back(random_floats(kMost, static_cast<unsigned>(r) + 1));
    }
    cudaStream_t stream = nullptr;
    SWITCHYARD_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (const std::int64_t count : {kMost, std::int64_t{1}, std::int64_t{70'000}}) {
      ranks.barrier("parts");
      const std::vector<float>& own = parts[static_cast<std::size_t>(ranks.rank())];
      SWITCHYARD_CUDA(cudaMemcpyAsync(exchange.place_of_summed().data, own.data(),
                                      own.size() * sizeof(float), cudaMemcpyHostToDevice, stream));
      SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
      ranks.barrier("sum");
      exchange.sum_over_ranks(count, {.backend = Backend::kCuda, .stream = stream});
      const std::vector<float> sum =
          copy_out<float>(exchange.place_of_summed().data, count, stream);
      exchange.check();
      std::int64_t wrong = 0;
      for (std::size_t i = 0; i < sum.size(); ++i) wrong += sum[i] == sum_of(parts, i) ? 0 : 1;
      EXPECT_EQ(wrong, 0) << count << " values, " << num_ranks << " ranks";
    }
    ranks.barrier("end");
    cudaStreamDestroy(stream);
  });
}

TEST(RanksBackwardOnGpu, SumsOverRanksAreAddedByTheTreeWhateverTheirSize) {
  for (const int num_ranks : {1, 2, 3, 4, 5, 8}) expect_sums(Place::kOneGpu, num_ranks);
}

TEST(RanksBackwardSpread, OnSeveralGpusHaveTheBitsOfOne) {
  if (find_gpus().list.size() < 2) GTEST_SKIP() << "one GPU";
  expect_bits_of_one_rank(Place::kAllGpus, {2});
  expect_sums(Place::kAllGpus, 2);
}

TEST(RanksBackwardSpread, AGraphOfForwardAndBackwardIsReplayedWithOtherInputs) {
  if (find_gpus().list.size() < 2) GTEST_SKIP() << "one GPU";
  replay_in_a_graph(Place::kAllGpus, 2);
}

}  // namespace
}  // namespace switchyard

// `verify --router perft`: random adapters hold, and a run of them that errs is a miss.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "testkit/expect_error.hpp"
#include "verify/perft/check_perft.hpp"
#include "verify/perft/run_perft.hpp"

namespace switchyard::verify {
namespace {

VerifyOptions both_ways() {
  VerifyOptions options;
  options.pass = Pass::kBoth;
  return options;
}

/// A case of that spelling on two ranks, from number `index` on.
Case some_case(const std::string& spelling, std::uint64_t& index) {
  while (true) {
    Case test = make_case(5, index, {2}, {1}, Backend::kCpu);
    use_perft(test, spelling, 5, index++);
    const bool plain = test.data == Data::kPlain && test.split == Split::kEven;
    if (plain && test.num_tokens >= 4 && test.given == Given::kNothing) return test;
  }
}

/// One of whose adapters every gradient is asked for.
Problem some_problem(const std::string& spelling) {
  for (std::uint64_t index = 0;;) {
    Problem problem = make_problem(some_case(spelling, index));
    bool all = true;
    (void)check_perft(problem, both_ways(),
                      [&](const Problem& adapters, const PerftConfig& config,
                          const BackwardProblem& backward, const BackwardRun& run) {
                        all = true;  // of the last run, which is one of a backward
                        for (const Gradient which :
                             {Gradient::kTokens, Gradient::kGate, Gradient::kW13, Gradient::kW2}) {
                          const auto i = static_cast<std::size_t>(which);
                          all = all && !backward.gradients[i].bytes.empty();
                        }
                        return run_perft(adapters, config, backward, run, problem.test.ranks);
                      });
    if (all) return problem;
  }
}

TEST(VerifyPerft, RandomAdaptersOfEveryKindHoldOverRanks) {
  for (const char* const kind : {"routed", "embedded", "dense", "shared"}) {
    VerifyOptions options = both_ways();
    options.cases = 30;
    options.ranks = {1, 2, 4, 8};
    options.router = std::string("perft:kind=") + kind;
    std::ostringstream out;
    EXPECT_EQ(run_verify(options, out), 0) << out.str();
    EXPECT_NE(out.str().find("30 of them backward"), std::string::npos) << out.str();
  }
}

/// What moe++ has drawn beside the layer's experts is not of the layer beside the adapters.
TEST(VerifyPerft, ALayerDrawnWithMoePlusPlusHasItsOwnExpertsAgain) {
  int seen = 0;
  for (std::uint64_t index = 0; index < 4000; ++index) {
    Case test = make_case(104, index, {1}, {1}, Backend::kCpu);
    if (!test.router.starts_with("moe++")) continue;
    const std::int32_t experts = test.layer.experts.num_experts;
    use_perft(test, "perft:kind=embedded", 104, index);
    EXPECT_EQ(test.layer.router.num_experts, experts) << to_json(test);
    EXPECT_NO_THROW(check(test.layer)) << to_json(test);
    ++seen;
  }
  EXPECT_GT(seen, 50);
}

/// The layer beside them has its own router again, which may take more experts a token.
TEST(VerifyPerft, PlacesOfTheLayersWeightsGoWithItsRouter) {
  int moved = 0;
  for (std::uint64_t index = 0; index < 4000; ++index) {
    Case test = make_case(104, index, {1}, {1}, Backend::kCpu);
    if (!test.layer.weight_on_input && test.identity_experts == 0) continue;
    use_perft(test, "perft:kind=embedded", 104, index);
    EXPECT_NO_THROW(check(test.layer)) << to_json(test);
    ++moved;
  }
  EXPECT_GT(moved, 100);
}

TEST(VerifyPerft, ARunThatErrsIsAMissThatSaysWhere) {
  const Problem problem = some_problem("perft:kind=routed,adapters=4,top-k=2");
  using Spoil = std::function<void(BackwardResult&)>;
  const auto miss = [&](const Spoil& spoil) {
    const PerftRunner erring = [&](const Problem& adapters, const PerftConfig& config,
                                   const BackwardProblem& backward, const BackwardRun& run) {
      BackwardResult result = run_perft(adapters, config, backward, run, problem.test.ranks);
      spoil(result);
      return result;
    };
    return check_perft(problem, both_ways(), erring);
  };
  const auto flip = [](std::vector<std::byte>& bytes) {
    if (!bytes.empty()) bytes.back() ^= std::byte{0x40};
  };
  const auto at = [](BackwardResult& result, Gradient which) -> std::vector<std::byte>& {
    return result.gradients[static_cast<std::size_t>(which)].bytes;
  };
  EXPECT_EQ(miss([](BackwardResult&) {}), "");
  EXPECT_NE(miss([&](BackwardResult& r) { flip(r.out); }), "");
  EXPECT_NE(miss([&](BackwardResult& r) { std::swap(r.record.expert[0], r.record.expert[1]); }),
            "");
  const auto says = [&](const std::string& words, const Spoil& spoil) {
    const std::string what = miss(spoil);
    EXPECT_NE(what.find(words), std::string::npos) << what;
  };
  says("dtokens[", [&](BackwardResult& r) { flip(at(r, Gradient::kTokens)); });
  says("dgate[", [&](BackwardResult& r) { flip(at(r, Gradient::kGate)); });
  says("dw13[", [&](BackwardResult& r) { flip(at(r, Gradient::kW13)); });
  says("dw2[", [&](BackwardResult& r) { flip(at(r, Gradient::kW2)); });
  says("not the same bits on all ranks", [](BackwardResult& r) { r.apart = "dw2"; });
}

TEST(VerifyPerft, ACaseIsMadeAgainFromItsLineAndTooLargeOnesAreRefused) {
  std::uint64_t first = 0;
  const Case test = some_case("perft:kind=embedded,rank=5,alpha=20", first);
  const nlohmann::json line = to_json(test);
  EXPECT_EQ(to_json(case_from_json(line)), line);
  const PerftConfig config = perft_of(test);
  EXPECT_EQ(config.num_adapters, test.layer.router.num_experts);
  EXPECT_EQ(config.scale(), 4.0F);
  const auto refuse = [&](const char* router, const char* words) {
    nlohmann::json wrong = line;
    wrong["router"] = router;
    switchyard::test::expect_error(ErrorCode::kInvalidArgument, words,
                                   [&] { (void)case_from_json(wrong); });
  };
  refuse("perft:kind=dense,adapters=1000000,rank=60000", "a product of adapters, rank");
  const auto refuse_spelling = [](const char* spelling, const char* words) {
    switchyard::test::expect_error(ErrorCode::kInvalidArgument, words,
                                   [&] { check_perft_spelling(spelling); });
  };
  refuse_spelling("perft:alpha=3,rank=2", "want 1, 2, 4, ... times the rank");
  refuse_spelling("perft:alpha=4", "without a rank");
  refuse("perft:width=3", "no option 'width'");
  refuse("perft:kind=embedded,adapters=3", "as many as the layer has experts");
  refuse("perft:kind=dense,top-k=2", "want kind=routed");
}

}  // namespace
}  // namespace switchyard::verify

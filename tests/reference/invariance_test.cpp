// Promises about bits: with batch_invariant, dropless, a token's output does not depend on the
// number of ranks, on the threads, or on what else is in the batch. And with identity experts,
// combine undoes pack.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "switchyard/switchyard.hpp"
#include "testkit/random.hpp"
#include "testkit/sanitized.hpp"
#include "verify/problem.hpp"
#include "verify/run_layer.hpp"

namespace switchyard::verify {
namespace {

struct Shape {
  const char* name;
  LayerConfig layer;
  bool router_bias = false;
  bool selection_bias = false;
};

ExpertConfig experts(std::int32_t count, std::int64_t hidden, std::int64_t inner) {
  ExpertConfig config;
  config.num_experts = count;
  config.hidden = hidden;
  config.inner = inner;
  return config;
}

/// Three models of specs/models.json: H and I divided by 16 to 32, experts by up to 4.
std::vector<Shape> shapes() {
  Shape olmoe{.name = "olmoe-1b-7b", .layer = {}};
  olmoe.layer.router = {.num_experts = 64, .kind = TopKRouter{.top_k = 8, .renormalize = false}};
  olmoe.layer.experts = experts(64, 128, 64);

  Shape deepseek{.name = "deepseek-v3", .layer = {}, .selection_bias = true};
  deepseek.layer.router = {.num_experts = 64,
                           .kind = TopKRouter{.top_k = 8,
                                              .score = Score::kSigmoid,
                                              .scale = 2.5F,
                                              .groups = 8,
                                              .top_groups = 4,
                                              .group_score = GroupScore::kTop2Sum}};
  deepseek.layer.experts = experts(64, 224, 64);
  deepseek.layer.shared = experts(1, 224, 64);

  Shape gpt_oss{.name = "gpt-oss-20b", .layer = {}, .router_bias = true};
  gpt_oss.layer.router = {.num_experts = 32,
                          .kind = TopKRouter{.top_k = 4, .score = Score::kTopkSoftmax}};
  gpt_oss.layer.experts = experts(32, 180, 90);
  gpt_oss.layer.experts.activation = Activation::kClampedSwiglu;
  gpt_oss.layer.experts.bias = true;
  return {olmoe, deepseek, gpt_oss};
}

Case invariant_case(const Shape& shape, DType dtype) {
  Case test;
  test.seed = 11;
  test.layer = shape.layer;
  test.router_bias = shape.router_bias;
  test.selection_bias = shape.selection_bias;
  test.stored = dtype;
  test.compute = dtype;
  test.tokens = dtype;
  test.output = dtype;
  test.num_tokens = 43;
  test.batch_invariant = true;
  return test;
}

/// The output's bytes in token order, of `ranks` ranks that share the tokens [first, end).
std::vector<std::byte> run(const Problem& problem, int ranks, int threads, std::int64_t first,
                           std::int64_t end) {
  RunArgs args{.threads = threads};
  for (int r = 0; r <= ranks; ++r) args.rank_begin.push_back(first + r * (end - first) / ranks);
  const RunResult result = run_layer(problem, args);
  if (result.error) ADD_FAILURE() << result.error->what();
  std::vector<std::byte> out;
  for (const RankResult& rank : result.ranks) {
    out.insert(out.end(), rank.out.begin(), rank.out.end());
  }
  return out;
}

void expect_same_bits_everywhere(const Problem& problem) {
  const std::int64_t num_tokens = problem.test.num_tokens;
  const std::vector<std::byte> want = run(problem, 1, 1, 0, num_tokens);
  for (const float value : decode(problem.test.output, want)) ASSERT_TRUE(std::isfinite(value));
  for (const int ranks : {1, 2, 4, 8}) {
    for (const int threads : {1, 2}) {
      EXPECT_EQ(run(problem, ranks, threads, 0, num_tokens), want)
          << ranks << " ranks, " << threads << " threads";
    }
  }
  const std::int64_t row = problem.test.layer.experts.hidden * size_of(problem.test.output);
  for (const std::int64_t token : {std::int64_t{0}, std::int64_t{17}, num_tokens - 1}) {
    const std::vector<std::byte> alone(want.begin() + token * row,
                                       want.begin() + (token + 1) * row);
    EXPECT_EQ(run(problem, 1, 1, token, token + 1), alone) << "token " << token << " alone";
    EXPECT_EQ(run(problem, 2, 2, token, token + 1), alone) << "token " << token << " on 2 ranks";
  }
}

TEST(Invariance, BitsAreEqualForAnyRanksThreadsAndBatchOnTheWireF32) {
  for (const Shape& shape : shapes()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      SCOPED_TRACE(std::string(shape.name) + " " + to_string(dtype));
      expect_same_bits_everywhere(make_problem(invariant_case(shape, dtype)));
    }
  }
}

TEST(Invariance, WithRankInvariantTheyAreEqualOnTheWiresBf16AndFp8Too) {
  for (const Shape& shape : shapes()) {
    for (const DType wire : {DType::kBF16, DType::kF8E4M3}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        if (kSanitized && (dtype == DType::kF32) != (wire == DType::kBF16)) continue;
        SCOPED_TRACE(std::string(shape.name) + " " + to_string(dtype) + " by " + to_string(wire));
        Case test = invariant_case(shape, dtype);
        test.wire = wire;
        test.rank_invariant = true;
        expect_same_bits_everywhere(make_problem(test));
      }
    }
  }
}

TEST(Invariance, TokensThatTravelInFewerBitsAreRoundedOnOneRankToo) {
  for (const DType wire : {DType::kBF16, DType::kF8E4M3}) {
    Case test = invariant_case(shapes()[0], DType::kF32);
    const std::vector<std::byte> unrounded = run(make_problem(test), 1, 1, 0, 43);
    test.dispatch_wire = wire;
    const Problem problem = make_problem(test);
    expect_same_bits_everywhere(problem);
    EXPECT_NE(run(problem, 1, 1, 0, 43), unrounded) << to_string(wire);
  }
}

TEST(Invariance, WithoutRankInvariantAWireOf16BitsRoundsByTheNumberOfRanks) {
  Case test = invariant_case(shapes()[0], DType::kF32);
  test.wire = DType::kBF16;
  const Problem problem = make_problem(test);
  EXPECT_NE(run(problem, 2, 1, 0, 43), run(problem, 4, 1, 0, 43));
}

TEST(Invariance, EveryLayoutGivesTheSameBits) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Case test = invariant_case(shapes()[2], dtype);
    const auto want = run(make_problem(test), 1, 1, 0, 43);
    for (const LayoutKind kind : {LayoutKind::kAligned, LayoutKind::kPadded}) {
      test.layout = {.kind = kind, .alignment = 16};
      EXPECT_EQ(run(make_problem(test), 1, 2, 0, 43), want) << to_string(dtype);
    }
  }
}

/// T 1024, H 256, E 32, K 2: rows of x packed for their experts and summed again.
class IdentityExperts {
 public:
  IdentityExperts(DType dtype, Layout layout) : dtype_(dtype), layout_(layout) {
    Random random(23, 0);
    std::vector<float> logits(kTokens * kExperts);
    for (float& logit : logits) logit = 3 * random.signed_unit();
    std::vector<float> x(kTokens * kHidden);
    for (float& value : x) value = round_to(dtype, random.signed_unit());
    x_ = encode(dtype, x);
    route({.logits = {logits.data(), {kTokens, kExperts}},
           .selection_bias = {},
           .config = {.num_experts = kExperts, .kind = TopKRouter{.top_k = kTopK}},
           .routing = {.expert = {expert_.data(), {kTokens, kTopK}},
                       .weight = {weight_.data(), {kTokens, kTopK}}},
           .execution = {}});
  }

  /// Largest distance of combine(pack(x)) from x.
  double largest_error() {
    std::vector<std::int64_t> counts(kExperts);
    for (const std::int32_t e : expert_) ++counts[static_cast<std::size_t>(e)];
    const std::int64_t padded = *std::max_element(counts.begin(), counts.end());
    Plan owner;
    const PlanView view = owner.reserve(kTokens, kTopK, kExperts,
                                        max_rows(layout_, kTokens, kTopK, kExperts, padded));
    plan({.assignments = DenseAssignments{.expert = {expert_.data(), {kTokens, kTopK}},
                                          .weight = {weight_.data(), {kTokens, kTopK}}},
          .first_expert = 0,
          .layout = layout_,
          .padded_rows = layout_.kind == LayoutKind::kPadded ? padded : 0,
          .plan = view,
          .execution = {}});
    const std::int64_t num_rows = view.expert_begin[kExperts];
    std::vector<std::byte> packed(static_cast<std::size_t>(num_rows * kHidden * size_of(dtype_)));
    pack({.x = {x_.data(), dtype_, kTokens, kHidden},
          .plan = view,
          .rows = {packed.data(), dtype_, num_rows, kHidden},
          .execution = {}});
    const std::vector<float> rows = decode(dtype_, packed);  // What the experts give: f32.
    std::vector<float> sums(kTokens * kHidden);
    combine(
        {.rows = {reinterpret_cast<const std::byte*>(rows.data()), DType::kF32, num_rows, kHidden},
         .plan = view,
         .first_expert = 0,
         .reduced = {.sums = {reinterpret_cast<std::byte*>(sums.data()), DType::kF32, kTokens,
                              kHidden},
                     .subtree = subtree_of_rank({.num_experts = kExperts, .groups = 8}, 0, 1)},
         .execution = {}});
    const std::vector<float> x = decode(dtype_, x_);
    double largest = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      largest = std::max(largest, std::abs(double{sums[i]} - double{x[i]}));
    }
    return largest;
  }

 private:
  static constexpr std::int64_t kTokens = 1024;
  static constexpr std::int64_t kHidden = 256;
  static constexpr std::int32_t kExperts = 32;
  static constexpr std::int32_t kTopK = 2;

  DType dtype_;
  Layout layout_;
  std::vector<std::byte> x_;
  std::vector<std::int32_t> expert_ = std::vector<std::int32_t>(kTokens * kTopK);
  std::vector<float> weight_ = std::vector<float>(kTokens * kTopK);
};

TEST(Invariance, WithIdentityExpertsCombineOfPackIsTheTokensInEveryLayout) {
  for (const LayoutKind kind : {LayoutKind::kCompact, LayoutKind::kAligned, LayoutKind::kPadded}) {
    const Layout layout{.kind = kind, .alignment = 64};
    EXPECT_LT(IdentityExperts(DType::kF32, layout).largest_error(), 1e-6);
    EXPECT_LT(IdentityExperts(DType::kBF16, layout).largest_error(), 1e-3);
    EXPECT_LT(IdentityExperts(DType::kF16, layout).largest_error(), 1e-3);
  }
}

}  // namespace
}  // namespace switchyard::verify

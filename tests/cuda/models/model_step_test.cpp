// A model's loss, optimiser and counts on a GPU, each against plain loops in double.
#include <algorithm>
#include <bit>
#include <cmath>

#include "core/half.hpp"
#include "models/gpu/stages.hpp"
#include "tests/cuda/models/typed.hpp"

namespace switchyard::models::gpu {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// ---- loss --------------------------------------------------------------------------------------

void expect_cross_entropy(std::int64_t rows, std::int64_t vocabulary, bool bf16) {
  SCOPED_TRACE(testing::Message() << rows << " x " << vocabulary << (bf16 ? " bf16" : " f32"));
  constexpr float kScale = 0.25F;
  std::vector<float> logits = random_floats(rows * vocabulary, 1, 4.0F);
  logits[0] = 300;  // exponentials that overflow unless the largest is taken off
  std::vector<std::int32_t> targets;
  for (std::int64_t r = 0; r < rows; ++r) {
    targets.push_back(r % 5 == 4 ? -1 : static_cast<std::int32_t>(r * 7919 % vocabulary));
  }
  const DeviceArray<float> device_logits(logits), nll(at(rows)), scale(std::vector<float>{kScale});
  const DeviceArray<std::int32_t> device_targets(targets);
  const DeviceArray<double> sum(1);
  const Typed dlogits(bf16, rows * vocabulary);
  cross_entropy({.logits = device_logits.data(),
                 .targets = device_targets.data(),
                 .rows = rows,
                 .vocabulary = vocabulary,
                 .nll = nll.data(),
                 .dlogits = dlogits.data(),
                 .scale = scale.data(),
                 .bf16 = bf16,
                 .stream = nullptr});
  sum_of(nll.data(), rows, sum.data(), nullptr);
  Doubles want_nll, want;
  double all = 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* const x = logits.data() + r * vocabulary;
    const double most = *std::max_element(x, x + vocabulary);
    double total = 0;
    for (std::int64_t i = 0; i < vocabulary; ++i) total += std::exp(x[i] - most);
    const std::int32_t target = targets[at(r)];
    want_nll.push_back(target < 0 ? 0 : most - x[target] + std::log(total));
    all += want_nll.back();
    for (std::int64_t i = 0; i < vocabulary; ++i) {
      const double probability = std::exp(x[i] - most) / total;
      want.push_back(target < 0 ? 0 : kScale * (probability - (i == target ? 1 : 0)));
    }
  }
  expect_close(nll.get(), want_nll, 1e-5, "nll");
  expect_close(dlogits.get(), want, bound_of(bf16), "dlogits");
  EXPECT_NEAR(sum.get()[0], all, 1e-5 * all + 1e-6);
}

TEST(ModelStages, SmallLossesAndTheirGradientsAreThoseInDouble) {
  for (const bool bf16 : {false, true}) {
    expect_cross_entropy(1, 1, bf16);
    expect_cross_entropy(9, 37, bf16);
    expect_cross_entropy(3, 2501, bf16);  // a block a row
    expect_cross_entropy(5, 2500, bf16);  // in its registers
    expect_cross_entropy(2, 8196, bf16);
    expect_cross_entropy(2, 16388, bf16);  // beyond them
  }
}
TEST(ModelStages, LossesOfManyRowsAndWideVocabulariesAreThoseInDouble) {
  for (const bool bf16 : {false, true}) {
    expect_cross_entropy(3000, 256, bf16);
    expect_cross_entropy(33, 16384, bf16);
    expect_cross_entropy(17, 2047, bf16);
  }
}

// ---- optimiser ---------------------------------------------------------------------------------

struct Moments {
  Doubles p, m, v;
};

void step_in_double(Moments& s, const std::vector<float>& g, const std::vector<Piece>& pieces,
                    const StepInputs& in, int steps) {
  double squares = 0;
  for (const float x : g) squares += double{x} * double{x};
  const double norm = std::sqrt(squares), clip = norm > in.clip ? in.clip / norm : 1;
  for (const Piece& piece : pieces) {
    for (std::int64_t i = piece.first; i < piece.first + piece.size; ++i) {
      const double gradient = g[at(i)] * clip;
      double& m = s.m[at(i)];
      double& v = s.v[at(i)];
      m = in.beta1 * m + (1 - in.beta1) * gradient;
      v = in.beta2 * v + (1 - in.beta2) * gradient * gradient;
      const double decay = piece.decay != 0 ? 1 - in.learning_rate * in.weight_decay : 1;
      const double root = std::sqrt(v / (1 - std::pow(in.beta2, steps))) + in.epsilon;
      s.p[at(i)] =
          s.p[at(i)] * decay - in.learning_rate * m / (1 - std::pow(in.beta1, steps)) / root;
    }
  }
}

/// A bf16 number as the nearest of p, halves away from zero, and what it lacks.
std::uint16_t rounded_away(float p) {
  return static_cast<std::uint16_t>((std::bit_cast<std::uint32_t>(p) + 0x8000U) >> 16U);
}

// Fails with: halves to even, which the lower bits cannot tell; a NaN that is rounded to zero.
TEST(ModelStages, SmallSplitFloatsHaveAllTheirBits) {
  std::vector<float> p = random_floats(1001, 4, 3);
  for (const std::uint32_t bits : {0U, 0x80000000U, 0x00008000U, 0x3f808000U, 0x3f818000U,
                                   0x3f807fffU, 0x3f808001U, 0xbf818000U, 0x7f7f8000U, 0x7f7fffffU,
                                   0x7f800000U, 0xff800000U, 0x00000001U, 0x8000ffffU}) {
    p.push_back(std::bit_cast<float>(bits));
  }
  p.push_back(std::bit_cast<float>(0x7fffffffU));
  p.push_back(std::bit_cast<float>(0xff800001U));
  const DeviceArray<float> from(p), back(p.size());
  const DeviceArray<std::uint16_t> high(p.size()), low(p.size());
  split_floats(from.data(), std::ssize(p), high.data(), low.data(), nullptr);
  join_floats(high.data(), low.data(), std::ssize(p), back.data(), nullptr);
  const std::vector<float> have = back.get();
  const std::vector<std::uint16_t> upper = high.get();
  for (std::size_t i = 0; i < p.size(); ++i) {
    if (std::isnan(p[i])) {
      EXPECT_TRUE(std::isnan(have[i]));
      EXPECT_TRUE(std::isnan(bf16_to_float(upper[i])));
      continue;
    }
    EXPECT_EQ(std::bit_cast<std::uint32_t>(have[i]), std::bit_cast<std::uint32_t>(p[i])) << p[i];
    EXPECT_EQ(upper[i], rounded_away(p[i])) << p[i];
  }
}

TEST(ModelStages, SmallStepsOfAdamWHaveTheBitsOfWholeValuesWhereTheyAreSplit) {
  const std::vector<Piece> whole{
      {0, 1, 0, 0}, {64, 7, 1, 64}, {128, 16384, 1, 128}, {16512, 513, 0, 16512}};
  std::vector<Piece> split = whole;
  split[1].value = split[2].value = -1;
  split[3].value = 32;
  constexpr std::int64_t kSize = 17088;
  const std::vector<float> p = random_floats(kSize, 1);
  std::vector<float> of_fourth(kSize);
  std::copy_n(p.begin() + 16512, 513, of_fourth.begin() + 32);
  of_fourth[0] = p[0];
  const DeviceArray<float> p_whole(p), p_split(of_fourth);
  const std::vector<std::uint16_t> none(at(kSize));
  const DeviceArray<std::uint16_t> high(none), low(none);
  const Typed copy(true, kSize);
  split_floats(p_whole.data(), kSize, high.data(), low.data(), nullptr);
  const DeviceArray<StepInputs> inputs(std::vector<StepInputs>{{.learning_rate = 0.01,
                                                                .beta1 = 0.9,
                                                                .beta2 = 0.95,
                                                                .epsilon = 1e-8,
                                                                .weight_decay = 0.1,
                                                                .clip = 1}});
  const DeviceArray<float> back(kSize);
  const std::vector<float> zeros(kSize);
  const DeviceArray<float> m[2] = {DeviceArray<float>(zeros), DeviceArray<float>(zeros)};
  const DeviceArray<float> v[2] = {DeviceArray<float>(zeros), DeviceArray<float>(zeros)};
  const DeviceArray<StepFactors> factors[2] = {
      DeviceArray<StepFactors>(std::vector<StepFactors>(1)),
      DeviceArray<StepFactors>(std::vector<StepFactors>(1))};
  const DeviceArray<double> sums(whole.size());
  const DeviceArray<Piece> pieces[2] = {DeviceArray<Piece>(whole), DeviceArray<Piece>(split)};
  for (unsigned step = 1; step <= 3; ++step) {
    const DeviceArray<float> g(random_floats(kSize, step));
    for (const int n : {0, 1}) {
      adamw({.pieces = pieces[n].data(),
             .num_pieces = std::ssize(whole),
             .num_normed = std::ssize(whole),
             .p = n == 0 ? p_whole.data() : p_split.data(),
             .g = g.data(),
             .m = m[n].data(),
             .v = v[n].data(),
             .typed = n == 0 ? copy.data() : static_cast<void*>(high.data()),
             .low = n == 0 ? nullptr : low.data(),
             .inputs = inputs.data(),
             .factors = factors[n].data(),
             .sums = sums.data(),
             .stream = nullptr});
    }
    join_floats(high.data(), low.data(), kSize, back.data(), nullptr);
    const std::vector<float> want = p_whole.get(), joined = back.get(), rest = p_split.get();
    const std::vector<std::uint16_t> upper = high.get();
    EXPECT_EQ(rest[0], want[0]);
    for (std::int64_t i = 0; i < 513; ++i) ASSERT_EQ(rest[at(32 + i)], want[at(16512 + i)]) << i;
    for (std::int64_t i = 64; i < 16512; ++i) {
      ASSERT_EQ(joined[at(i)], want[at(i)]) << i;
      ASSERT_EQ(upper[at(i)], rounded_away(want[at(i)])) << i;
    }
    EXPECT_EQ(m[1].get(), m[0].get());
    EXPECT_EQ(v[1].get(), v[0].get());
  }
}

TEST(ModelStages, SmallStepsOfAdamWAreThoseInDoubleAndNothingMovesWhereTheNormIsNotFinite) {
  const std::vector<Piece> pieces{
      {0, 1, 0, 0}, {64, 7, 1, 64}, {128, 16384, 1, 128}, {16512, 513, 0, 16512}};
  constexpr std::int64_t kSize = 17088;
  const StepInputs inputs{.learning_rate = 0.01,
                          .beta1 = 0.9,
                          .beta2 = 0.95,
                          .epsilon = 1e-8,
                          .weight_decay = 0.1,
                          .clip = 1};
  std::vector<float> p = random_floats(kSize, 1), g(kSize);
  Moments want{Doubles(p.begin(), p.end()), Doubles(kSize), Doubles(kSize)};
  const DeviceArray<float> device_p(p), device_g(g), m(std::vector<float>(kSize, 0.0F));
  const DeviceArray<float> v(std::vector<float>(kSize, 0.0F));
  const Typed copy(true, kSize);
  const DeviceArray<Piece> device_pieces(pieces);
  const DeviceArray<StepInputs> device_inputs(std::vector<StepInputs>{inputs});
  const DeviceArray<StepFactors> factors(std::vector<StepFactors>(1));
  const DeviceArray<double> sums(pieces.size());
  const auto run = [&] {
    adamw({.pieces = device_pieces.data(),
           .num_pieces = std::ssize(pieces),
           .num_normed = std::ssize(pieces),
           .p = device_p.data(),
           .g = device_g.data(),
           .m = m.data(),
           .v = v.data(),
           .typed = copy.data(),
           .low = nullptr,
           .inputs = device_inputs.data(),
           .factors = factors.data(),
           .sums = sums.data(),
           .stream = nullptr});
  };
  for (int step = 1; step <= 3; ++step) {
    const std::vector<float> fresh = random_floats(kSize, unsigned(step), step == 2 ? 1e-4F : 1);
    std::fill(g.begin(), g.end(), 0.0F);
    for (const Piece& piece : pieces) {
      std::copy_n(fresh.begin() + piece.first, piece.size, g.begin() + piece.first);
    }
    device_g.set(g);
    run();
    step_in_double(want, g, pieces, inputs, step);
    expect_close(device_p.get(), want.p, 1e-5, "p");
    expect_close(m.get(), want.m, 1e-5, "m");
    expect_close(v.get(), want.v, 1e-5, "v");
    EXPECT_EQ(factors.get()[0].steps, step);
    const std::vector<float> now = device_p.get(), rounded = copy.get();
    for (const Piece& piece : pieces) {
      for (std::int64_t i = piece.first; i < piece.first + piece.size; ++i) {
        ASSERT_EQ(rounded[at(i)], round_to(DType::kBF16, now[at(i)]));
      }
    }
  }
  const std::vector<float> before = device_p.get();
  g[70] = INFINITY;
  device_g.set(g);
  run();
  EXPECT_EQ(device_p.get(), before);
  EXPECT_EQ(factors.get()[0].steps, 3);
  EXPECT_EQ(factors.get()[0].apply, 0);
}

/// What ranks alone have, added up as floats, and the step that goes by it.
TEST(ModelStages, SmallTotalsOfRanksAreExactAndMakeTheNorm) {
  constexpr int kRanks = 3;
  constexpr std::int64_t kLayers = 2, kExperts = 5, kStride = 7;
  const std::vector<std::vector<double>> squares = {{1e-9, 2.0 / 3, 1e20}, {}, {0.1, 1e-30}};
  const std::int64_t size = rank_totals(kRanks, kLayers * kExperts);
  std::vector<float> sums(at(size));
  std::vector<std::int64_t> want(at(kLayers * kExperts));
  double squared = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    std::vector<std::int64_t> counts(at(kLayers * kStride), -1);
    for (std::int64_t i = 0; i < kLayers * kExperts; ++i) {
      const std::int64_t n = i == 3 ? (std::int64_t{1} << 33) + 12345 * rank : i * 65535 * rank;
      counts[at(i / kExperts * kStride + i % kExperts)] = n;
      want[at(i)] += n;
    }
    const std::vector<double>& own = squares[at(rank)];
    const DeviceArray<double> device_own(own);
    const DeviceArray<std::int64_t> device_counts(counts);
    const DeviceArray<float> totals(std::vector<float>(at(size), NAN));
    make_rank_totals({.squares = device_own.data(),
                      .num_squares = std::ssize(own),
                      .rank = rank,
                      .num_ranks = kRanks,
                      .counts = device_counts.data(),
                      .layers = kLayers,
                      .experts = kExperts,
                      .stride = kStride,
                      .totals = totals.data(),
                      .stream = nullptr});
    const std::vector<float> said = totals.get();
    for (std::int64_t i = 0; i < size; ++i) sums[at(i)] += said[at(i)];
    double sum = 0;
    for (const double x : own) sum += x;
    EXPECT_EQ(double{said[at(3 * rank)]} + double{said[at(3 * rank + 1)]} +
                  double{said[at(3 * rank + 2)]},
              sum);
    squared += sum;
  }
  const DeviceArray<float> totals(sums);
  const DeviceArray<std::int64_t> counts(want.size());
  read_rank_counts(totals.data(), kRanks, std::ssize(want), counts.data(), nullptr);
  EXPECT_EQ(counts.get(), want);

  const std::vector<float> g = {3, 4, 0, 0};
  const DeviceArray<float> p(std::vector<float>(4)), m(std::vector<float>(4)),
      v(std::vector<float>(4)), device_g(g);
  const DeviceArray<Piece> pieces(
      std::vector<Piece>{{.first = 0, .size = 2, .decay = 0, .value = 0}});
  const DeviceArray<StepInputs> inputs(std::vector<StepInputs>{{.learning_rate = 0,
                                                                .beta1 = 0.9,
                                                                .beta2 = 0.9,
                                                                .epsilon = 1,
                                                                .weight_decay = 0,
                                                                .clip = 0}});
  const DeviceArray<StepFactors> factors(std::vector<StepFactors>(1));
  const DeviceArray<double> own_sums(1);
  adamw({.pieces = pieces.data(),
         .num_pieces = 1,
         .num_normed = 1,
         .rank_totals = totals.data(),
         .num_ranks = kRanks,
         .p = p.data(),
         .g = device_g.data(),
         .m = m.data(),
         .v = v.data(),
         .typed = nullptr,
         .low = nullptr,
         .inputs = inputs.data(),
         .factors = factors.data(),
         .sums = own_sums.data(),
         .stream = nullptr});
  EXPECT_DOUBLE_EQ(factors.get()[0].norm, std::sqrt(25 + squared));
}

TEST(ModelStages, SmallCountsOfExpertsAndTheMoveOfTheirBias) {
  constexpr std::int32_t kExperts = 5;
  std::vector<std::int32_t> expert;
  std::vector<std::uint8_t> kept;
  std::vector<std::int64_t> want(kExperts), want_kept(kExperts);
  std::mt19937 random(1);
  for (int i = 0; i < 3001; ++i) {
    expert.push_back(i % 17 == 0 ? -1 : static_cast<std::int32_t>(random() % 7 % kExperts));
    kept.push_back(static_cast<std::uint8_t>(random() % 3 > 0));
    if (expert.back() < 0) continue;
    want[at(expert.back())] += 1;
    want_kept[at(expert.back())] += kept.back();
  }
  const DeviceArray<std::int32_t> device_expert(expert);
  const DeviceArray<std::uint8_t> device_kept(kept);
  const DeviceArray<std::int64_t> counts(std::vector<std::int64_t>(kExperts, 0));
  const DeviceArray<std::int64_t> counts_kept(std::vector<std::int64_t>(kExperts, 0));
  count_experts({.expert = device_expert.data(),
                 .kept = device_kept.data(),
                 .assignments = std::ssize(expert),
                 .experts = kExperts,
                 .counts = counts.data(),
                 .counts_kept = counts_kept.data(),
                 .stream = nullptr});
  EXPECT_EQ(counts.get(), want);
  EXPECT_EQ(counts_kept.get(), want_kept);
  const DeviceArray<float> bias(std::vector<float>(kExperts, 0.5F));
  StepFactors applied{};
  applied.apply = 1;
  const DeviceArray<StepFactors> factors(std::vector<StepFactors>{applied});
  move_bias(counts.data(), kExperts, 0.25, factors.data(), bias.data(), nullptr);
  std::int64_t all = 0;
  for (const std::int64_t n : want) all += n;
  for (std::int64_t e = 0; e < kExperts; ++e) {
    const std::int64_t more = all - kExperts * want[at(e)];
    EXPECT_EQ(bias.get()[at(e)], more > 0 ? 0.75F : more < 0 ? 0.25F : 0.5F);
  }
}

}  // namespace
}  // namespace switchyard::models::gpu

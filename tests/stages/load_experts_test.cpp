// Loading experts: what the source is asked and told, and what a caller hears of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>
#include <vector>

#include "core/half.hpp"
#include "switchyard/cpu_isa.hpp"
#include "switchyard/layer.hpp"
#include "switchyard/thread_pool.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/random_values.hpp"

namespace switchyard {
namespace {

/// A row of a matrix: (expert, part, row).
using Row = std::tuple<std::int32_t, int, std::int64_t>;

/// Ones, and a record of what was said of every row.
class WatchedSource final : public ExpertSource {
 public:
  explicit WatchedSource(const ExpertConfig& config) : config_(config) {}

  [[nodiscard]] DType dtype() const override { return DType::kF32; }
  void read(std::int32_t expert, ExpertPart part, std::int64_t first_row, std::int64_t num_rows,
            DType dtype, void* out) const override {
    const std::int64_t cols = part == ExpertPart::kDown ? config_.inner : config_.hidden;
    for (std::int64_t i = 0; i < num_rows * cols; ++i) store_float(out, dtype, i, 1.0F);
    const std::lock_guard lock(mutex);
    for (std::int64_t row = first_row; row < first_row + num_rows; ++row) {
      const Row here{expert, static_cast<int>(part), row};
      if (soon.count(here) == 0 || done.count(here) != 0) ++out_of_turn;
      if (!read_rows.insert(here).second) ++out_of_turn;
    }
    most_open = std::max(most_open, open_bytes());
  }
  void read_bias(std::int32_t, ExpertPart, float*) const override {}
  void will_read(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                 std::int64_t num_rows) const override {
    add(soon, expert, part, first_row, num_rows);
  }
  void done_with(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                 std::int64_t num_rows) const override {
    add(done, expert, part, first_row, num_rows);
  }

  mutable std::mutex mutex;
  mutable std::set<Row> soon, read_rows, done;
  mutable int out_of_turn = 0;         ///< Read before it was announced, after it was done, twice.
  mutable std::int64_t most_open = 0;  ///< Bytes read and not done with.

 private:
  void add(std::set<Row>& set, std::int32_t expert, ExpertPart part, std::int64_t first,
           std::int64_t count) const {
    const std::lock_guard lock(mutex);
    for (std::int64_t row = first; row < first + count; ++row) {
      if (!set.insert({expert, static_cast<int>(part), row}).second) ++out_of_turn;
    }
  }
  [[nodiscard]] std::int64_t open_bytes() const {
    return 4 * config_.hidden * static_cast<std::int64_t>(read_rows.size() - done.size());
  }

  ExpertConfig config_;
};

/// What share each call of progress named.
std::vector<double> load(const WatchedSource& source, const ExpertConfig& config,
                         std::int32_t first, std::int32_t count, ThreadPool* pool) {
  std::vector<double> shares;
  (void)load_experts({.config = config,
                      .source = &source,
                      .first_expert = first,
                      .num_local = count,
                      .execution = {.pool = pool},
                      .progress = [&](double share) { shares.push_back(share); }});
  return shares;
}

std::size_t rows_of(const ExpertConfig& config, std::int32_t experts) {
  return static_cast<std::size_t>(experts *
                                  ((config.gated ? 2 : 1) * config.inner + config.hidden));
}

TEST(LoadExperts, EveryRowIsAnnouncedThenReadOnceThenLeftAndProgressRisesToOne) {
  ThreadPool pool(2);
  for (const bool gated : {true, false}) {
    for (const std::int64_t size : {1, 33, 160}) {
      const ExpertConfig config{
          .num_experts = 5, .hidden = size, .inner = size + 2, .gated = gated};
      const WatchedSource source(config);
      const std::vector<double> shares = load(source, config, 1, 3, &pool);
      EXPECT_EQ(source.out_of_turn, 0);
      EXPECT_EQ(source.read_rows.size(), rows_of(config, 3));
      EXPECT_EQ(source.soon, source.read_rows);
      EXPECT_EQ(source.done, source.read_rows);
      EXPECT_EQ(std::get<0>(*source.read_rows.begin()), 1);
      ASSERT_FALSE(shares.empty());
      EXPECT_EQ(shares.back(), 1.0);
    }
  }
}

TEST(LoadExperts, AnExpertThatIsLargeIsReadAndLeftPieceByPiece) {
  const ExpertConfig config{.num_experts = 2, .hidden = 2048, .inner = 2048};  // 50 MB each
  const WatchedSource source(config);
  const std::vector<double> shares = load(source, config, 0, 2, nullptr);
  EXPECT_EQ(source.out_of_turn, 0);
  EXPECT_EQ(source.done.size(), rows_of(config, 2));
  EXPECT_LE(source.most_open, 40 << 20);
  EXPECT_GE(shares.size(), 3U);
  EXPECT_TRUE(std::is_sorted(shares.begin(), shares.end()));
  EXPECT_GT(shares.front(), 0.0);
  EXPECT_EQ(shares.back(), 1.0);
}

TEST(LoadExperts, AFormatThatTheSourceDoesNotStoreIsRefusedByName) {
  const ExpertConfig config{.num_experts = 1, .hidden = 4, .inner = 4};
  const WatchedSource source(config);
  const auto load = [&](WeightFormat format) {
    return load_experts({.config = config, .source = &source, .num_local = 1, .format = format});
  };
  EXPECT_EQ(load(WeightFormat::kQ8)->format(), WeightFormat::kQ8);
  EXPECT_EQ(load(WeightFormat::kExact)->format(), WeightFormat::kExact);
  EXPECT_EQ(load(WeightFormat::kStored)->format(), WeightFormat::kExact);
  test::expect_error(ErrorCode::kUnsupported, "e4m3 weights of a source that stores exact ones",
                     [&] { (void)load(WeightFormat::kE4M3); });
  test::expect_error(ErrorCode::kUnsupported, "mxfp4 weights of a source that stores exact ones",
                     [&] { (void)load(WeightFormat::kMxfp4); });
}

TEST(LoadExperts, OfALayerOverRanksEachRankReadsItsOwnExpertsAndNoOther) {
  LayerModel model;
  model.config.router = {.num_experts = 8, .kind = TopKRouter{.top_k = 2}};
  model.config.experts = {.num_experts = 8, .hidden = 16, .inner = 8};
  model.gate = std::vector<float>(8 * 16, 1.0F);
  for (const int ranks : {1, 2, 3, 5}) {
    run_ranks(ranks, [&](Communicator& comm) {
      const auto source = std::make_shared<WatchedSource>(model.config.experts);
      LayerModel own = model;
      own.experts = source;
      const MoeLayer layer(own, {.max_tokens = 4}, &comm);
      std::set<std::int32_t> read;
      for (const Row& row : source->read_rows) read.insert(std::get<0>(row));
      std::set<std::int32_t> held;
      for (std::int32_t e = first_expert_of(8, ranks, comm.rank());
           e < first_expert_of(8, ranks, comm.rank() + 1); ++e) {
        held.insert(e);
      }
      EXPECT_EQ(read, held) << "rank " << comm.rank() << " of " << ranks;
      EXPECT_EQ(source->out_of_turn, 0);
      comm.barrier("read");
    });
  }
}

/// [rows, cols] of `type` as bytes, read back.
std::vector<std::byte> read_back(const ExpertWeights& weights, std::int32_t expert, ExpertPart part,
                                 std::int64_t first, std::int64_t count, DType type) {
  const ExpertConfig& config = weights.config();
  const std::int64_t cols = part == ExpertPart::kDown ? config.inner : config.hidden;
  std::vector<std::byte> out(static_cast<std::size_t>(count * cols * size_of(type)));
  weights.read(expert, part, first, count, type, out.data());
  return out;
}

/// Once per instruction set that this machine has.
class ReadBack : public testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override { force_isa(GetParam()); }
  void TearDown() override { force_isa(std::nullopt); }
};

TEST_P(ReadBack, HasTheBitsThatWereLoaded) {
  for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const bool gated : {true, false}) {
      const ExpertConfig config{
          .num_experts = 3, .hidden = 71, .inner = 37, .gated = gated, .bias = true};
      const std::int64_t rows = (gated ? 2 : 1) * config.inner;
      const auto w13 = random_floats(3 * rows * config.hidden, 1);
      const auto w2 = random_floats(3 * config.hidden * config.inner, 2);
      const auto b13 = random_floats(3 * rows, 3), b2 = random_floats(3 * config.hidden, 4);
      const auto source =
          make_memory_source(config, DType::kF32, w13.data(), w2.data(), b13.data(), b2.data());
      const auto weights = load_experts({.config = config,
                                         .source = source.get(),
                                         .dtype = type,
                                         .first_expert = 1,
                                         .num_local = 2});
      for (const ExpertPart part : {ExpertPart::kGate, ExpertPart::kUp, ExpertPart::kDown}) {
        if (part == ExpertPart::kUp && !gated) continue;
        const bool down = part == ExpertPart::kDown;
        const std::int64_t all = down ? config.hidden : config.inner;
        const std::int64_t cols = down ? config.inner : config.hidden;
        for (const auto& [first, count] : {std::pair{std::int64_t{0}, all}, {5, 30}}) {
          std::vector<std::byte> want(static_cast<std::size_t>(count * cols * size_of(type)));
          source->read(2, part, first, count, type, want.data());
          EXPECT_EQ(read_back(*weights, 2, part, first, count, type), want)
              << to_string(type) << (gated ? " gated" : " plain");
        }
        std::vector<float> bias(static_cast<std::size_t>(all)), want(bias.size());
        weights->read_bias(2, part, bias.data());
        source->read_bias(2, part, want.data());
        EXPECT_EQ(bias, want);
      }
      test::expect_error(ErrorCode::kInvalidArgument, "expert 0 is not among the local ones",
                         [&] { read_back(*weights, 0, ExpertPart::kGate, 0, 1, type); });
      test::expect_error(ErrorCode::kInvalidArgument, "rows 36 to 38 of a matrix of 37",
                         [&] { read_back(*weights, 1, ExpertPart::kGate, 36, 2, type); });
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Isa, ReadBack, testing::ValuesIn(available_isas()),
                         [](const auto& isa) { return std::string(to_string(isa.param)); });

TEST(LoadExperts, Of8BitWeightsWhatIsReadBackIsWithinHalfAStepOfTheirScale) {
  const ExpertConfig config{.num_experts = 1, .hidden = 70, .inner = 37};
  const auto w13 = random_floats(2 * config.inner * config.hidden, 1);
  const auto w2 = random_floats(config.hidden * config.inner, 2);
  const auto source = make_memory_source(config, DType::kF32, w13.data(), w2.data());
  const auto weights = load_experts(
      {.config = config, .source = source.get(), .num_local = 1, .format = WeightFormat::kQ8});
  std::vector<float> up(static_cast<std::size_t>(config.inner * config.hidden));
  weights->read(0, ExpertPart::kUp, 0, config.inner, DType::kF32, up.data());
  for (std::int64_t row = 0; row < config.inner; ++row) {
    for (std::int64_t first = 0; first < config.hidden; first += 32) {
      const std::int64_t last = std::min<std::int64_t>(first + 32, config.hidden);
      const float* want = w13.data() + (config.inner + row) * config.hidden;
      float largest = 0;
      for (std::int64_t k = first; k < last; ++k) largest = std::max(largest, std::fabs(want[k]));
      const float step = largest / 127 * 1.01F;  // the scale is rounded up to bf16
      for (std::int64_t k = first; k < last; ++k) {
        EXPECT_NEAR(up[static_cast<std::size_t>(row * config.hidden + k)], want[k], step / 2);
      }
    }
  }
}

}  // namespace
}  // namespace switchyard

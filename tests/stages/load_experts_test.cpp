// Loading experts: what the source is asked and told, and what a caller hears of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>
#include <vector>

#include "core/half.hpp"
#include "switchyard/layer.hpp"
#include "switchyard/thread_pool.hpp"
#include "testkit/expect_error.hpp"

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

TEST(LoadExperts, AFormatThatTheBackendDoesNotComputeWithIsRefusedByName) {
  const ExpertConfig config{.num_experts = 1, .hidden = 4, .inner = 4};
  const WatchedSource source(config);
  const auto load = [&](WeightFormat format) {
    return load_experts({.config = config, .source = &source, .num_local = 1, .format = format});
  };
  EXPECT_EQ(load(WeightFormat::kQ8)->format(), WeightFormat::kQ8);
  EXPECT_EQ(load(WeightFormat::kExact)->format(), WeightFormat::kExact);
  test::expect_error(ErrorCode::kUnsupported, "e4m3 weights on cpu: it computes with exact and q8",
                     [&] { (void)load(WeightFormat::kE4M3); });
  test::expect_error(ErrorCode::kUnsupported, "mxfp4 weights on cpu",
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

}  // namespace
}  // namespace switchyard

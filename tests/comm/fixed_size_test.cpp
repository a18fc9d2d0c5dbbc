#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "bench/variants/fixed_size.hpp"
#include "switchyard/error.hpp"
#include "testkit/rank_harness.hpp"

namespace switchyard {
namespace {

/// A value that says which rank, token, element and exchange it is of.
std::uint16_t value_of(int rank, std::int64_t token, std::int64_t h, int round) {
  return static_cast<std::uint16_t>(1 + rank * 7001 + token * 131 + h * 17 + round * 5);
}

TEST(FixedSize, EveryPairGetsItsRowsAndZerosAfterThem) {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    const FixedSizeConfig config{.tokens = 20, .local_experts = 2, .top_k = 2, .hidden = 24};
    on_ranks(ranks, [&](Communicator& comm) {
      const FixedSizeRouting mine = make_fixed_size_routing(comm, config, nullptr);
      FixedSizeExchange exchange(comm, mine.rows_per_pair, config.hidden, DType::kBF16);
      // Which rows a rank sends here: told by the rows themselves, tokens ascending.
      for (int round = 0; round < 5; ++round) {
        std::vector<std::uint16_t> x;
        for (std::int64_t t = 0; t < config.tokens; ++t) {
          for (std::int64_t h = 0; h < config.hidden; ++h) {
            x.push_back(value_of(comm.rank(), t, h, round));
          }
        }
        const ConstRawMatrix got = exchange.exchange({reinterpret_cast<const std::byte*>(x.data()),
                                                      DType::kBF16, config.tokens, config.hidden},
                                                     mine, nullptr);
        ASSERT_EQ(got.rows, ranks * mine.rows_per_pair);
        for (int from = 0; from < ranks; ++from) {
          std::int64_t token = 0;
          bool ended = false;
          for (std::int64_t j = 0; j < mine.rows_per_pair; ++j) {
            std::vector<std::uint16_t> row(static_cast<std::size_t>(config.hidden));
            std::memcpy(row.data(), got.row(from * mine.rows_per_pair + j), row.size() * 2);
            if (row[0] == 0) ended = true;
            if (ended) {
              ASSERT_EQ(std::ranges::count(row, 0), config.hidden);
              continue;
            }
            while (token < config.tokens && value_of(from, token, 0, round) != row[0]) ++token;
            ASSERT_LT(token, config.tokens);
            for (std::int64_t h = 0; h < config.hidden; ++h) {
              ASSERT_EQ(row[static_cast<std::size_t>(h)], value_of(from, token, h, round));
            }
            ++token;
          }
          if (from == comm.rank()) {
            const auto own = static_cast<std::size_t>(from);
            EXPECT_EQ(mine.token[static_cast<std::size_t>(mine.begin[own + 1] - 1)], token - 1);
          }
        }
      }
      EXPECT_EQ(exchange.wire_bytes(), (ranks - 1) * mine.rows_per_pair * config.hidden * 2);
    });
  }
}

TEST(FixedSize, TheRoutingSendsATokenOncePerRankAndAgreesOnTheLargestMessage) {
  const FixedSizeConfig config{.tokens = 64, .local_experts = 4, .top_k = 3, .hidden = 32};
  on_ranks(4, [&](Communicator& comm) {
    const FixedSizeRouting a = make_fixed_size_routing(comm, config, nullptr);
    const FixedSizeRouting b = make_fixed_size_routing(comm, config, nullptr);
    EXPECT_EQ(a.token, b.token);  // a pure function of the seed
    std::vector<int> ranks_of(64, 0);
    for (std::size_t r = 0; r < 4; ++r) {
      EXPECT_LE(a.begin[r + 1] - a.begin[r], a.rows_per_pair);
      for (auto i = a.begin[r]; i < a.begin[r + 1]; ++i) {
        if (i > a.begin[r]) {
          EXPECT_LT(a.token[static_cast<std::size_t>(i - 1)], a.token[static_cast<std::size_t>(i)]);
        }
        ++ranks_of[static_cast<std::size_t>(a.token[static_cast<std::size_t>(i)])];
      }
    }
    for (const int ranks : ranks_of) {
      EXPECT_GE(ranks, 1);
      EXPECT_LE(ranks, 3);
    }
    EXPECT_GT(a.padding, 0.0);
    EXPECT_LT(a.padding, 1.0);
  });
}

TEST(FixedSize, WithAllExpertsChosenNothingIsPadding) {
  on_ranks(2, [](Communicator& comm) {
    const FixedSizeConfig config{.tokens = 5, .local_experts = 1, .top_k = 2, .hidden = 8};
    const FixedSizeRouting routing = make_fixed_size_routing(comm, config, nullptr);
    EXPECT_EQ(routing.rows_per_pair, 5);
    EXPECT_EQ(routing.padding, 0.0);
  });
}

TEST(FixedSize, MoreChoicesThanExpertsAreRefusedOnEveryRank) {
  on_ranks(2, [](Communicator& comm) {
    const FixedSizeConfig config{.tokens = 5, .local_experts = 1, .top_k = 3, .hidden = 8};
    EXPECT_THROW(make_fixed_size_routing(comm, config, nullptr), Error);
  });
}

}  // namespace
}  // namespace switchyard

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "bench/variants/transports.hpp"
#include "core/half.hpp"
#include "interfaces/transports.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/rank_harness.hpp"
#include "testkit/sanitized.hpp"

namespace switchyard {
namespace {

/// Input of the published benchmark, made anew from seeds: distinct experts, uniform weights.
struct Tokens {
  std::int64_t count = 0;
  std::vector<std::uint16_t> x;
  std::vector<std::int32_t> expert;
  std::vector<float> weight;

  Tokens(const TransportConfig& config, std::int64_t tokens, int rank, std::uint32_t seed)
      : count(tokens) {
    std::mt19937 random(seed + static_cast<std::uint32_t>(rank));
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> uniform;
    std::vector<std::int32_t> ids(static_cast<std::size_t>(config.num_experts));
    for (std::size_t e = 0; e < ids.size(); ++e) ids[e] = static_cast<std::int32_t>(e);
    for (std::int64_t i = 0; i < tokens * config.hidden; ++i)
      x.push_back(float_to_f16(normal(random)));
    for (std::int64_t t = 0; t < tokens; ++t) {
      std::shuffle(ids.begin(), ids.end(), random);
      for (std::int32_t k = 0; k < config.top_k; ++k) {
        expert.push_back(ids[static_cast<std::size_t>(k)]);
        weight.push_back(uniform(random));
      }
    }
  }
  [[nodiscard]] TransportInput input(const TransportConfig& config) const {
    return {.x = {reinterpret_cast<const std::byte*>(x.data()), DType::kF16, count, config.hidden},
            .expert = {expert.data(), {count, config.top_k}},
            .weight = {weight.data(), {count, config.top_k}}};
  }
};

/// The benchmark's simulated expert: y = x * (1 + rank), in the type of x.
std::vector<std::uint16_t> simulated_expert(const ExpertInput& in, int rank) {
  std::vector<std::uint16_t> y(static_cast<std::size_t>(in.rows() * in.x.cols));
  for (std::int64_t i = 0; i < in.rows(); ++i) {
    if (in.expert[i] < 0) continue;
    const std::byte* row = in.x.row(in.x_row.empty() ? i : in.x_row[i]);
    for (std::int64_t h = 0; h < in.x.cols; ++h) {
      y[static_cast<std::size_t>(i * in.x.cols + h)] =
          float_to_f16(load_float(row, DType::kF16, h) * static_cast<float>(1 + rank));
    }
  }
  return y;
}

std::vector<std::uint16_t> round_trip(Transport& transport, const TransportConfig& config,
                                      const Tokens& tokens, int rank) {
  const ExpertInput in = transport.dispatch(tokens.input(config));
  const std::vector<std::uint16_t> y = simulated_expert(in, rank);
  std::vector<std::uint16_t> out(static_cast<std::size_t>(tokens.count * config.hidden), 0x7e00);
  transport.combine(
      {reinterpret_cast<const std::byte*>(y.data()), DType::kF16, in.rows(), config.hidden},
      {reinterpret_cast<std::byte*>(out.data()), DType::kF16, tokens.count, config.hidden});
  return out;
}

/// The published check against a plain loop: allclose with rtol 1e-2, atol 5e-3.
void expect_close(const std::vector<std::uint16_t>& out, const Tokens& tokens,
                  const TransportConfig& config, int num_ranks) {
  for (std::int64_t t = 0; t < tokens.count; ++t) {
    for (std::int64_t h = 0; h < config.hidden; ++h) {
      double want = 0;
      const float x = f16_to_float(tokens.x[static_cast<std::size_t>(t * config.hidden + h)]);
      for (std::int32_t k = 0; k < config.top_k; ++k) {
        const auto i = static_cast<std::size_t>(t * config.top_k + k);
        const int owner = tokens.expert[i] / (config.num_experts / num_ranks);
        want += double{tokens.weight[i]} *
                f16_to_float(float_to_f16(x * static_cast<float>(1 + owner)));
      }
      const float got = f16_to_float(out[static_cast<std::size_t>(t * config.hidden + h)]);
      ASSERT_NEAR(got, want, 5e-3 + 1e-2 * std::fabs(want)) << "token " << t << " element " << h;
    }
  }
}

struct Published {
  TransportConfig config;
  int num_ranks = 1;
  std::uint32_t seed = 0;
};

std::vector<Published> published_tests() {
  std::ifstream file(SWITCHYARD_ALL2ALL);
  const nlohmann::json spec = nlohmann::json::parse(file);
  std::vector<Published> tests;
  for (const char* list : {"tests_small", "tests"}) {
    for (const nlohmann::json& entry : spec.at(list)) {
      tests.push_back({.config = {.num_experts = entry.at("num_experts"),
                                  .top_k = entry.at("experts_per_token"),
                                  .hidden = entry.at("hidden_dim"),
                                  .max_tokens = entry.at("max_num_tokens")},
                       .num_ranks = entry.at("world_size"),
                       .seed = entry.at("seed")});
    }
  }
  return tests;
}

TEST(Transport, EveryVariantPassesThePublishedTests) {
  const std::vector<Published> tests = published_tests();
  ASSERT_EQ(tests.size(), 11U);
  for (std::size_t number = 0; number < tests.size(); number += kSanitized ? 5 : 1) {
    Published test = tests[number];
    // Processes of a small machine: the same sizes over fewer ranks.
    if (!has_ranks(test.num_ranks)) test.num_ranks = 4;
    test.config.max_tokens = std::min<std::int64_t>(test.config.max_tokens, 16);
    on_ranks(test.num_ranks, [&](Communicator& comm) {
      std::mt19937 random(test.seed);
      for (const std::string_view name : transport_names()) {
        SCOPED_TRACE(name);
        const auto transport = make_transport(name, comm, test.config);
        for (int round = 0; round < 2; ++round) {
          std::int64_t count = 0;  // uniform in [1, max), as published, on each rank its own
          for (int rank = 0; rank <= comm.rank(); ++rank) {
            count = 1 + static_cast<std::int64_t>(random()) %
                            std::max<std::int64_t>(1, test.config.max_tokens - 1);
          }
          const Tokens tokens(test.config, count, comm.rank(), test.seed);
          expect_close(round_trip(*transport, test.config, tokens, comm.rank()), tokens,
                       test.config, test.num_ranks);
        }
      }
    });
  }
}

TEST(Transport, VariantsOverSingleAssignmentsGiveTheSameBits) {
  const TransportConfig config{.num_experts = 7, .top_k = 3, .hidden = 9, .max_tokens = 20};
  for (const int ranks : {1, 2, 3, 4}) {
    on_ranks(ranks, [&](Communicator& comm) {
      const Tokens tokens(config, comm.rank() == 1 ? 0 : 20 - comm.rank(), comm.rank(), 5);
      const auto flat =
          round_trip(*make_transport("flat", comm, config), config, tokens, comm.rank());
      for (const char* name : {"sorted", "bucketed"}) {
        EXPECT_EQ(round_trip(*make_transport(name, comm, config), config, tokens, comm.rank()),
                  flat)
            << name;
      }
    });
  }
}

TEST(Transport, FlatRowsLieInTheOrderSourceTokenK) {
  const TransportConfig config{.num_experts = 6, .top_k = 2, .hidden = 4, .max_tokens = 8};
  on_ranks(3, [&](Communicator& comm) {
    FlatTransport flat(comm, config);
    const Tokens mine(config, 8, comm.rank(), 11);
    const ExpertInput in = flat.dispatch(mine.input(config));
    std::int64_t row = 0;
    for (int source = 0; source < 3; ++source) {
      const Tokens tokens(config, 8, source, 11);
      for (std::int32_t i = 0; i < 16; ++i) {
        const std::int32_t e = tokens.expert[static_cast<std::size_t>(i)];
        if (e / 2 != comm.rank()) continue;
        ASSERT_LT(row, in.rows());
        EXPECT_EQ(flat.exchange().meta()[row].position, i);
        EXPECT_EQ(flat.exchange().meta()[row].expert, e);
        EXPECT_EQ(load_float(in.x.row(row), DType::kF16, 3),
                  f16_to_float(tokens.x[static_cast<std::size_t>(i / 2 * 4 + 3)]));
        ++row;
      }
    }
    EXPECT_EQ(row, in.rows());
  });
}

TEST(Transport, BucketsHoldTheirExpertsRowsWithTheFiveNumbers) {
  TransportConfig config{.num_experts = 6, .top_k = 2, .hidden = 4, .max_tokens = 8};
  config.capacity = 17;
  on_ranks(3, [&](Communicator& comm) {
    BucketedTransport buckets(comm, config);
    const Tokens mine(config, 8, comm.rank(), 11);
    buckets.dispatch(mine.input(config));
    for (std::int32_t e = 0; e < 2; ++e) {
      const std::int32_t expert = 2 * comm.rank() + e;
      std::int64_t row = e * config.capacity;
      for (std::int32_t source = 0; source < 3; ++source) {
        const Tokens tokens(config, 8, source, 11);
        for (std::int32_t i = 0; i < 16; ++i) {
          if (tokens.expert[static_cast<std::size_t>(i)] != expert) continue;
          const std::int32_t* meta = buckets.expert_meta().row(row);
          EXPECT_EQ(std::vector<std::int32_t>(meta, meta + 5),
                    (std::vector<std::int32_t>{expert, source, i / 2, i % 2, 0}));
          EXPECT_EQ(load_float(buckets.expert_x().row(row), DType::kF16, 0),
                    f16_to_float(tokens.x[static_cast<std::size_t>(i / 2 * 4)]));
          ++row;
        }
      }
      EXPECT_EQ(buckets.expert_num_tokens()[e], row - e * config.capacity);
      for (; row < (e + 1) * config.capacity; ++row)
        EXPECT_EQ(buckets.expert_meta().row(row)[0], -1);
    }
  });
}

TEST(Transport, ABucketThatIsTooSmallIsAnErrorOnEveryRank) {
  const TransportConfig config{
      .num_experts = 2, .top_k = 1, .hidden = 4, .max_tokens = 8, .capacity = 3};
  on_ranks(2, [&](Communicator& comm) {
    const auto transport = make_transport("bucketed", comm, config);
    const Tokens tokens(config, 8, comm.rank(), 1);
    test::expect_error(ErrorCode::kInvalidArgument, "its bucket has 3",
                       [&] { transport->dispatch(tokens.input(config)); });
  });
}

TEST(Transport, NativeSendsTheFewestBytes) {
  const TransportConfig config{.num_experts = 16, .top_k = 8, .hidden = 512, .max_tokens = 32};
  on_ranks(4, [&](Communicator& comm) {
    const Tokens tokens(config, 32, comm.rank(), 3);
    std::int64_t native = 0;
    std::int64_t others = INT64_MAX;
    for (const std::string_view name : transport_names()) {
      const auto transport = make_transport(name, comm, config);
      round_trip(*transport, config, tokens, comm.rank());
      (name == "native" ? native : others) =
          name == "native" ? transport->wire_bytes() : std::min(others, transport->wire_bytes());
    }
    EXPECT_GT(native, 0);
    EXPECT_LT(native, others);
  });
}

TEST(Transport, AnUnknownNameIsRefused) {
  const auto comm = make_single_rank();
  EXPECT_THROW(make_transport("v9", *comm, {}), Error);
}

}  // namespace
}  // namespace switchyard

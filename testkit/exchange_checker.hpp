#pragma once

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <vector>

#include "switchyard/thread_pool.hpp"
#include "testkit/exchange_problem.hpp"

namespace switchyard {

/// Runs one exchange on this rank and checks everything that it sees against plain loops.
class Checker {
 public:
  Checker(const ExchangeProblem& problem, Communicator& comm, bool identity = false)
      : problem_(problem), comm_(comm), identity_(identity) {}

  void run(ExpertParallel& exchange, int epoch, ThreadPool* pool = nullptr) {
    inputs_.clear();
    for (int r = 0; r < problem_.num_ranks; ++r) inputs_.push_back(make_input(problem_, r, epoch));
    const RankInput& mine = inputs_[static_cast<std::size_t>(comm_.rank())];
    const std::int64_t tokens = mine.num_tokens;
    const std::int64_t top_k = problem_.config.top_k;
    const Received received = exchange.dispatch(
        {.x = {mine.x.data(), problem_.config.dtype, tokens, problem_.config.hidden},
         .expert = {mine.expert.data(), {tokens, top_k}},
         .weight = {mine.weight.data(), {tokens, top_k}},
         .kept = {mine.kept.data(), {tokens, top_k}},
         .execution = {.pool = pool}});
    check_received(received);
    const std::vector<std::byte> partials = run_experts(received);
    std::vector<float> out(static_cast<std::size_t>(tokens * problem_.config.hidden), -7.0F);
    const std::int64_t groups = problem_.config.rank_invariant ? groups_per_rank(problem_) : 1;
    exchange.combine({.partials = {partials.data(), partials_type(), received.x.rows * groups,
                                   problem_.config.hidden},
                      .out = {reinterpret_cast<std::byte*>(out.data()), DType::kF32, tokens,
                              problem_.config.hidden},
                      .execution = {.pool = pool}});
    check_output(out);
    check_traffic(exchange.traffic());
  }

 private:
  [[nodiscard]] DType partials_type() const {
    return problem_.config.combine_wire == DType::kF8E4M3 ? DType::kF32
                                                          : problem_.config.combine_wire;
  }

  void check_received(const Received& received) const {
    const ExpectedRows want = expected_rows(problem_, inputs_, comm_.rank());
    ASSERT_EQ(received.x.rows, want.rows());
    EXPECT_EQ(received.dropped_rows, want.dropped);
    EXPECT_EQ(received.x.dtype, problem_.config.dtype);
    for (std::int64_t i = 0; i < want.rows(); ++i) {
      const auto source = static_cast<std::int64_t>(want.source[static_cast<std::size_t>(i)]);
      ASSERT_GE(i, received.source_begin[source]);
      ASSERT_LT(i, received.source_begin[source + 1]);
      for (std::int32_t k = 0; k < problem_.config.top_k; ++k) {
        const auto at = static_cast<std::size_t>(i * problem_.config.top_k + k);
        ASSERT_EQ(received.expert.row(i)[k], want.expert[at]);
        ASSERT_EQ(received.weight.row(i)[k], want.weight[at]);
      }
    }
    for (std::size_t i = 0; i < want.x.size(); ++i) {
      ASSERT_EQ(load_float(received.x.data, received.x.dtype, static_cast<std::int64_t>(i)),
                want.x[i])
          << "element " << i;
    }
    EXPECT_EQ(received.source_begin[problem_.num_ranks], want.rows());
  }

  [[nodiscard]] std::vector<std::byte> run_experts(const Received& received) const {
    const std::int64_t hidden = problem_.config.hidden;
    std::vector<std::byte> out;
    std::vector<float> x(static_cast<std::size_t>(hidden));
    for (std::int64_t i = 0; i < received.x.rows; ++i) {
      for (std::int64_t h = 0; h < hidden; ++h) {
        x[static_cast<std::size_t>(h)] = load_float(received.x.row(i), received.x.dtype, h);
      }
      const std::vector<float> rows = partial_rows(problem_, comm_.rank(), identity_, x.data(),
                                                   received.expert.row(i), received.weight.row(i));
      const std::size_t begin = out.size();
      out.resize(begin + rows.size() * static_cast<std::size_t>(size_of(partials_type())));
      for (std::size_t j = 0; j < rows.size(); ++j) {
        store_float(out.data() + begin, partials_type(), static_cast<std::int64_t>(j), rows[j]);
      }
    }
    return out;
  }

  void check_output(const std::vector<float>& out) const {
    const std::int64_t hidden = problem_.config.hidden;
    const std::int64_t tokens = problem_.tokens_of(comm_.rank());
    const std::int64_t parts = std::int64_t{problem_.num_ranks} *
                               (problem_.config.rank_invariant ? groups_per_rank(problem_) : 1);
    std::vector<float> sums(static_cast<std::size_t>(tokens * parts * hidden), 0.0F);
    for (int rank = 0; rank < problem_.num_ranks; ++rank) {
      const ExpectedRows rows = expected_rows(problem_, inputs_, rank);
      for (std::int64_t i = 0; i < rows.rows(); ++i) {
        if (rows.source[static_cast<std::size_t>(i)] != comm_.rank()) continue;
        const std::vector<float> row =
            partial_rows(problem_, rank, identity_, &rows.x[static_cast<std::size_t>(i * hidden)],
                         &rows.expert[static_cast<std::size_t>(i * problem_.config.top_k)],
                         &rows.weight[static_cast<std::size_t>(i * problem_.config.top_k)]);
        const std::int64_t first =
            rows.token[static_cast<std::size_t>(i)] * parts + rank * (parts / problem_.num_ranks);
        for (std::int64_t p = 0; p < parts / problem_.num_ranks; ++p) {
          float* to = &sums[static_cast<std::size_t>((first + p) * hidden)];
          std::copy_n(&row[static_cast<std::size_t>(p * hidden)], hidden, to);
          travel(problem_.config.combine_wire, to, hidden);
        }
      }
    }
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t h = 0; h < hidden; ++h) {
        std::vector<float> values;
        for (std::int64_t p = 0; p < parts; ++p) {
          values.push_back(sums[static_cast<std::size_t>((t * parts + p) * hidden + h)]);
        }
        ASSERT_EQ(out[static_cast<std::size_t>(t * hidden + h)], tree_sum(values))
            << "token " << t << " element " << h;
      }
    }
  }

  void check_traffic(const Traffic& traffic) const {
    const std::int64_t ranks = problem_.num_ranks;
    const ExpertParallelConfig& config = problem_.config;
    const auto scales = [&](DType wire) {
      return wire == DType::kF8E4M3 ? 4 * ((config.hidden + 127) / 128) : 0;
    };
    for (int to = 0; to < ranks; ++to) {
      const ExpectedRows want = expected_rows(problem_, inputs_, to);
      std::map<int, std::int64_t> rows;
      std::map<int, std::int64_t> results;
      for (std::int64_t i = 0; i < want.rows(); ++i) {
        const int source = want.source[static_cast<std::size_t>(i)];
        ++rows[source];
        std::set<std::int64_t> groups;
        for (std::int32_t k = 0; k < config.top_k; ++k) {
          const std::int32_t id = want.expert[static_cast<std::size_t>(i * config.top_k + k)];
          std::int64_t group = std::int64_t{to} * groups_per_rank(problem_);
          while (id >= 0 && group_begin(problem_, group + 1) <= id) ++group;
          if (id >= 0) groups.insert(config.rank_invariant ? group : 0);
        }
        results[source] += std::ssize(groups);
      }
      for (int from = 0; from < ranks; ++from) {
        const auto out = static_cast<std::size_t>(from * ranks + to);
        const auto back = static_cast<std::size_t>(to * ranks + from);
        EXPECT_EQ(traffic.rows[out], rows[from]);
        EXPECT_EQ(traffic.payload_bytes[out],
                  rows[from] * config.hidden * size_of(problem_.dispatch_wire()));
        EXPECT_EQ(traffic.meta_bytes[out],
                  8 * (ranks + 2) + 16 +
                      rows[from] * (8 * config.top_k + scales(problem_.dispatch_wire())));
        EXPECT_EQ(traffic.return_rows[back], results[from]);
        EXPECT_EQ(traffic.return_payload_bytes[back],
                  results[from] * config.hidden * size_of(config.combine_wire));
        EXPECT_EQ(traffic.return_meta_bytes[back],
                  8 * (ranks + 2) + 8 + results[from] * scales(config.combine_wire));
      }
    }
  }

  const ExchangeProblem& problem_;
  Communicator& comm_;
  const bool identity_;
  std::vector<RankInput> inputs_;
};

}  // namespace switchyard

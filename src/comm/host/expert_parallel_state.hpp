#pragma once

#include <cstdint>
#include <vector>

#include "comm/host/exchange.hpp"
#include "comm/host/row_writer.hpp"
#include "comm/host/send_plan.hpp"
#include "core/one_caller.hpp"
#include "switchyard/dispatch.hpp"

namespace switchyard {

/// One rank's side of dispatch and combine: the steps in order, and what one leaves for the next.
struct ExpertParallel::State {
  State(Communicator& communicator, const ExpertParallelConfig& settings);

  void start(const DispatchArgs& args);
  void exchange_counts();
  void send_rows(const DispatchArgs& args);
  Received receive_rows(const DispatchArgs& args);
  void check_received_ids();
  void mark_groups(const std::int32_t* ids, std::int64_t row,
                   std::vector<std::uint8_t>& present) const;
  std::vector<std::int64_t> send_results(const ReturnArgs& args);
  ConstRawMatrix receive_results(const ReturnArgs& args);
  void report_dispatch();
  void report_results();

  const ExpertParallelConfig config;
  const std::int32_t num_ranks;
  const std::int32_t rank;
  const Subtree subtree;
  const std::int32_t groups_per_row;
  const ExpertMap map;
  Exchange exchange;
  RowWriter writer;

  std::uint64_t recoveries;      // of the communicator when the epochs started
  std::uint64_t epoch = 0;       // dispatches since
  std::uint64_t dispatches = 0;  // all
  bool results_pending = false;  // dispatched, not combined
  std::int64_t num_tokens = 0;   // T of the last dispatch
  SendPlan plan;
  std::vector<std::int64_t> counts;  // [R*R] rows that s wants to send to d
  Placement placement;
  std::vector<std::int64_t> source_begin[ExchangeLayout::kBuffers];  // [R+1] of each Received
  std::vector<std::byte> converted[ExchangeLayout::kBuffers];        // rows, where the wire differs
  std::vector<std::byte> results;                                    // the same for results
  std::vector<std::int32_t> partial_row;                             // [T, R]
  std::vector<std::uint8_t> own_groups;       // [results at home] 1: comes from its owner
  std::vector<std::uint8_t> received_groups;  // [N * groups_per_row] 1: goes home
  std::vector<std::int64_t> result_counts;    // [R*R] results from s to d
  Traffic traffic;
  OneCaller caller;
};

}  // namespace switchyard

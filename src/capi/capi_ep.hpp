#pragma once

#include <memory>
#include <vector>

#include "capi/capi.hpp"
#include "comm/variants/transports.hpp"
#include "layer/buffers.hpp"
#include "switchyard/expert_parallel.hpp"

/// Dispatch and combine by all three interfaces; those of the published benchmark are made when
/// they are first called.
struct sy_ep_t {
  switchyard::ExpertParallelConfig config;
  double capacity_factor = 0;
  switchyard::DropPolicy drop_policy = switchyard::DropPolicy::kToken;
  switchyard::Communicator* ranks = nullptr;
  std::unique_ptr<switchyard::ExpertParallel> exchange;
  std::int32_t first_expert = 0;
  std::int32_t num_local = 0;
  std::int64_t num_tokens = 0;  // of the last dispatch
  switchyard::Received received{};
  switchyard::Plan plan;
  switchyard::RawBuffer sums;
  std::vector<std::uint8_t> kept;
  std::vector<std::int64_t> counts;
  std::unique_ptr<switchyard::Transport> flat, bucketed;
  std::int64_t capacity = 0;  // of the buckets
};

#pragma once

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <vector>

#include "bench/measure/run_clock.hpp"
#include "bench/measure/stage_times.hpp"
#include "switchyard/layer.hpp"

namespace switchyard::bench {

/// What one rank brings home from its runs.
struct RankResult {
  std::vector<std::byte> out{};
  RoutingRecord record{};
  StageTimes times{};
  Traffic traffic{};
  std::int64_t rows_used = 0;
  std::int64_t rows_executed = 0;
  std::int64_t saved_bytes = 0;  ///< By one forward, for its backward.
  DType compute = DType::kF32;
  // Of one rank alone: these do not travel.
  std::optional<ChainTimes> chain{};
  std::int64_t gradient_bytes = 0;
  std::int64_t device_bytes = 0;
};

/// As bytes, for another process of the same program.
[[nodiscard]] std::vector<std::byte> to_bytes(const RankResult& result);
[[nodiscard]] RankResult rank_result_from(const std::vector<std::byte>& bytes);

/// The same for times alone, as a part of a larger message.
[[nodiscard]] nlohmann::json pack_times(const StageTimes& times);
[[nodiscard]] StageTimes times_from(const nlohmann::json& packed);

}  // namespace switchyard::bench

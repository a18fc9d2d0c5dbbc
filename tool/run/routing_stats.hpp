#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "bench/layer/layer_run.hpp"
#include "switchyard/routing/metrics.hpp"

namespace switchyard::tool {

/// What --routing-stats says of a run: all ranks' tokens together.
struct RoutingStats {
  metrics::Routing routing{};
  std::int32_t num_experts = 0;
  std::int64_t top_k = 0;  ///< Columns of the routing.
  double padding_waste = 0;
  std::vector<double> coactivation{};  ///< [E, E].
  /// Of the tokens' ids and their experts, where there are ids (--text).
  std::optional<metrics::Information> token_type{};
  /// Of the first tokens, kTokensShown of them: their experts, and where there are ids, their
  /// bytes.
  std::vector<std::vector<std::int32_t>> choices{};
  std::vector<std::string> text{};
};
inline constexpr std::int64_t kTokensShown = 4096;

/// "12 -> 7 43%": of the tokens of the first so many go to the second too; three of them, most
/// first. @param coactivation  [E, E].
[[nodiscard]] std::vector<std::string> strongest_pairs(const std::vector<double>& coactivation,
                                                       std::int32_t num_experts);
/// Row by row.
[[nodiscard]] nlohmann::json coactivation_json(const std::vector<double>& coactivation,
                                               std::int32_t num_experts);
[[nodiscard]] nlohmann::json information_json(const metrics::Information& found);

/// Where the routing was not given, the router's logits are computed once more for it.
[[nodiscard]] RoutingStats routing_stats(const bench::LayerRunArgs& args,
                                         const bench::LayerRunResult& result);

/// All of it, the load by its names: what `report` shows of a layer.
[[nodiscard]] nlohmann::json to_json(const RoutingStats& stats);
void print_routing_stats(const RoutingStats& stats);

}  // namespace switchyard::tool

// `run --routing-stats`: what the router did with these tokens.
#include "tool/run/routing_stats.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>

#include "bench/measure/results.hpp"
#include "core/row_ops.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard::tool {
namespace {

constexpr std::size_t kPairs = 3;  ///< Of experts that are chosen together, printed.

/// [T, E and null experts] of the tokens as the layer's router sees them.
std::vector<float> logits_of(const bench::LayerRunArgs& args, DType compute) {
  const LayerModel& model = *args.model;
  const ConstRawMatrix& tokens = args.tokens;
  std::vector<std::byte> rounded(
      static_cast<std::size_t>(tokens.rows * tokens.cols * size_of(compute)));
  for (std::int64_t t = 0; t < tokens.rows; ++t) {
    row_ops::convert(tokens.dtype, tokens.row(t), compute,
                     rounded.data() + t * tokens.cols * size_of(compute), tokens.cols);
  }
  const std::int64_t columns = model.config.router.num_logits();
  std::vector<float> logits(static_cast<std::size_t>(tokens.rows * columns));
  ThreadPool pool(args.num_threads);
  router_gemm({.tokens = {rounded.data(), compute, tokens.rows, tokens.cols},
               .gate = model.gate.matrix(columns, tokens.cols),
               .bias = model.router_bias.vector(),
               .logits = {logits.data(), {tokens.rows, columns}},
               .execution = {.pool = &pool}});
  return logits;
}

/// The experts, without unused places, and the bytes of the first tokens.
void show_tokens(const RoutingRecord& record, Vector<const std::int32_t> ids, RoutingStats& stats) {
  const auto top_k = static_cast<std::size_t>(stats.top_k);
  for (std::size_t i = 0; i < record.expert.size(); ++i) {
    if (i % top_k == 0) {
      if (std::ssize(stats.choices) == kTokensShown) break;
      stats.choices.emplace_back();
    }
    if (record.expert[i] >= 0) stats.choices.back().push_back(record.expert[i]);
  }
  for (std::int64_t t = 0; ids.data != nullptr && t < std::ssize(stats.choices); ++t) {
    const bool ascii = ids[t] < 0x80;  // a byte of a longer character is no text by itself
    stats.text.push_back(ascii ? std::string(1, static_cast<char>(ids[t]))
                               : fmt::format("\\x{:02x}", ids[t]));
  }
}

nlohmann::json or_null(const std::optional<double>& value) {
  return value ? nlohmann::json(*value) : nlohmann::json();
}

void print_drops(const metrics::Drops& drops) {
  fmt::print("  dropped    assignments {:.2f}%, weight {:.2f}%, tokens with none left {:.2f}%",
             100 * drops.assignments, 100 * drops.mass.value_or(0), 100 * drops.tokens);
  if (drops.assignments > 0) {
    fmt::print("; by choice");
    for (const double share : drops.by_choice) fmt::print(" {:.2f}%", 100 * share);
  }
  fmt::print("\n");
}

}  // namespace

std::vector<std::string> strongest_pairs(const std::vector<double>& coactivation,
                                         std::int32_t num_experts) {
  const auto experts = static_cast<std::size_t>(num_experts);
  std::vector<std::size_t> pairs;
  for (std::size_t i = 0; i < coactivation.size(); ++i) {
    if (i / experts != i % experts && coactivation[i] > 0) pairs.push_back(i);
  }
  const auto before = [&](std::size_t a, std::size_t b) {
    return std::pair(-coactivation[a], a) < std::pair(-coactivation[b], b);
  };
  const std::size_t shown = std::min(kPairs, pairs.size());
  std::partial_sort(pairs.begin(), pairs.begin() + static_cast<std::ptrdiff_t>(shown), pairs.end(),
                    before);
  std::vector<std::string> words;
  for (std::size_t i = 0; i < shown; ++i) {
    words.push_back(fmt::format("{} -> {} {:.1f}%", pairs[i] / experts, pairs[i] % experts,
                                100 * coactivation[pairs[i]]));
  }
  return words;
}

nlohmann::json coactivation_json(const std::vector<double>& coactivation,
                                 std::int32_t num_experts) {
  nlohmann::json rows = nlohmann::json::array();
  const auto experts = static_cast<std::ptrdiff_t>(num_experts);
  for (auto row = coactivation.begin(); row != coactivation.end(); row += experts) {
    rows.push_back(std::vector<double>(row, row + experts));
  }
  return rows;
}

nlohmann::json information_json(const metrics::Information& found) {
  return {{"plug_in", found.plug_in},
          {"bias", found.bias},
          {"corrected", found.corrected},
          {"normalised", found.normalised},
          {"null_mean", or_null(found.null_mean)},
          {"p", or_null(found.p)}};
}

RoutingStats routing_stats(const bench::LayerRunArgs& args, const bench::LayerRunResult& result) {
  const RouterConfig& router = args.model->config.router;
  const RoutingRecord& record = result.record;
  const std::int64_t num_tokens = args.tokens.rows;
  RoutingStats stats{.num_experts = router.num_experts, .top_k = router.top_k()};
  std::vector<float> logits;
  if (args.expert.data == nullptr && router.has_logits()) logits = logits_of(args, result.compute);
  const metrics::Routed a{
      .num_experts = router.num_experts,
      .assignments = DenseAssignments{.expert = {record.expert.data(), {num_tokens, stats.top_k}},
                                      .weight = {record.weight.data(), {num_tokens, stats.top_k}}},
      .kept = {record.kept.data(), {std::ssize(record.kept)}},
      .logits = {logits.empty() ? nullptr : logits.data(), {num_tokens, router.num_logits()}},
      .score = router.score(),
      .counts = {record.counts.data(), {std::ssize(record.counts)}}};
  stats.routing = metrics::routing(a, std::min(args.num_ranks, router.num_experts));
  stats.padding_waste = metrics::padding_waste(result.rows_used, result.rows_executed);
  stats.coactivation = metrics::coactivation(a);
  const Vector<const std::int32_t>& ids = args.request.token_ids;
  show_tokens(record, ids, stats);
  const bool any = std::any_of(record.counts.begin(), record.counts.end(),
                               [](std::int64_t count) { return count > 0; });
  if (ids.data != nullptr && any) {
    const std::vector<std::int64_t> types(ids.data, ids.data + ids.shape[0]);
    stats.token_type = metrics::information({types.data(), {std::ssize(types)}}, a);
  }
  return stats;
}

nlohmann::json to_json(const RoutingStats& stats) {
  nlohmann::json out = bench::load_json(stats.routing.load);
  out["counts"] = stats.routing.counts;
  out["padding_waste"] = stats.padding_waste;
  out["rank_imbalance"] = or_null(stats.routing.rank_imbalance);
  if (const auto& entropies = stats.routing.entropies) {
    out["entropies"] = {{"router", entropies->router},
                        {"weights", or_null(entropies->weights)},
                        {"marginal", entropies->marginal},
                        {"information", entropies->information}};
  }
  if (const auto& drops = stats.routing.drops) {
    out["dropped"] = {{"assignments", drops->assignments},
                      {"tokens", drops->tokens},
                      {"mass", or_null(drops->mass)},
                      {"by_choice", drops->by_choice}};
  }
  if (const auto& found = stats.token_type) out["token_type"] = information_json(*found);
  out["coactivation"] = coactivation_json(stats.coactivation, stats.num_experts);
  out["choices"] = stats.choices;
  if (!stats.text.empty()) out["text"] = stats.text;
  return out;
}

void print_routing_stats(const RoutingStats& stats) {
  const metrics::Load& load = stats.routing.load;
  fmt::print("\nrouting (docs/metrics.md):\n");
  fmt::print(
      "  load       CV {:.3f} (uniform random {:.3f}), max/mean {:.2f}, min/mean {:.2f}, Gini "
      "{:.3f}, KL {:.4f}\n",
      load.cv, load.cv_floor, load.max_over_mean, load.min_over_mean, load.gini, load.kl);
  fmt::print("  experts    effective {:.1f} of {}, dead {}\n", load.effective_experts,
             stats.num_experts, load.dead_experts);
  if (const auto& imbalance = stats.routing.rank_imbalance) {
    fmt::print("  ranks      max/mean {:.3f}\n", *imbalance);
  }
  if (const auto& entropies = stats.routing.entropies) {
    fmt::print(
        "  entropy    router {:.3f}, marginal {:.3f} of {:.3f} nats, weights {:.3f} of "
        "{:.3f}; information {:.3f}\n",
        entropies->router, entropies->marginal, std::log(stats.num_experts),
        entropies->weights.value_or(0), std::log(static_cast<double>(stats.top_k)),
        entropies->information);
  }
  if (stats.routing.drops) print_drops(*stats.routing.drops);
  fmt::print("  padding    {:.2f}% of the computed rows\n", 100 * stats.padding_waste);
  if (const auto& found = stats.token_type) {
    fmt::print(
        "  token id   {:.4f} nats about the expert: {:.4f} corrected, {:.1f}% of the most; "
        "permuted {:.4f}, p {:.2f}\n",
        found->plug_in, found->corrected, 100 * found->normalised, found->null_mean.value_or(0),
        found->p.value_or(1));
  }
  const std::vector<std::string> pairs = strongest_pairs(stats.coactivation, stats.num_experts);
  if (pairs.empty()) return;
  fmt::print("  together  ");
  for (const std::string& pair : pairs)
    fmt::print(" {}{}", pair, &pair == &pairs.back() ? "\n" : ",");
}

}  // namespace switchyard::tool

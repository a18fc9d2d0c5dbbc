#include "tool/models/ablation.hpp"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "bench/measure/inference.hpp"
#include "core/human.hpp"

namespace switchyard::tool {
namespace {

using models::Ablations;
using models::LayerAblation;
using models::PassLoss;
using nlohmann::json;

constexpr std::int64_t kBlock = 1024;     ///< Tokens of a block of the bootstrap, at least.
constexpr std::size_t kExpertsShown = 3;  ///< Of a layer, printed.

/// What a pass loses more than the base.
struct Difference {
  double nats_per_byte = 0;
  std::optional<bench::Bootstrap> bootstrap{};  ///< Of two blocks and more.
};

/// Neighbouring windows make a block, so that what they share is in it.
Difference difference_of(const Ablations& found, const PassLoss& pass) {
  std::vector<bench::BlockDifference> blocks;
  std::int64_t tokens = kBlock;
  for (std::size_t w = 0; w < found.windows.size(); ++w) {
    if (tokens >= kBlock) {
      blocks.emplace_back();
      tokens = 0;
    }
    tokens += found.windows[w].length;
    blocks.back().targets += static_cast<double>(found.bytes[w]);
    blocks.back().nats += pass.nats[w] - found.base.nats[w];
  }
  Difference difference;
  double bytes = 0;
  for (const bench::BlockDifference& block : blocks) {
    difference.nats_per_byte += block.nats;
    bytes += block.targets;
  }
  difference.nats_per_byte /= bytes;
  if (blocks.size() > 1) difference.bootstrap = bench::bootstrap(blocks);
  return difference;
}

std::string difference_words(const Difference& difference) {
  const std::string words = fmt::format("{:+.4f}", difference.nats_per_byte);
  return difference.bootstrap ? words + fmt::format(" +- {:.4f}", difference.bootstrap->error)
                              : words;
}

json difference_json(const Difference& difference) {
  json out = {{"nats_per_byte", difference.nats_per_byte},
              {"error", json()},
              {"low", json()},
              {"high", json()}};
  if (const auto& of = difference.bootstrap) {
    out.update({{"error", of->error}, {"low", of->interval.low}, {"high", of->interval.high}});
  }
  return out;
}

std::int64_t assignments_of(const LayerAblation& layer) {
  return std::accumulate(
      layer.experts.begin(), layer.experts.end(), std::int64_t{0},
      [](std::int64_t sum, const models::ExpertAblation& of) { return sum + of.assignments; });
}

/// "3: +0.1204 +- 0.0031 (31% of the load)", those that are missed most.
std::vector<std::string> most_missed(const Ablations& found, const LayerAblation& layer) {
  std::vector<std::pair<double, std::size_t>> order;
  for (std::size_t e = 0; e < layer.experts.size(); ++e) {
    order.emplace_back(-difference_of(found, layer.experts[e].loss).nats_per_byte, e);
  }
  std::sort(order.begin(), order.end());
  order.resize(std::min(order.size(), kExpertsShown));
  const auto all = static_cast<double>(std::max<std::int64_t>(1, assignments_of(layer)));
  std::vector<std::string> words;
  for (const auto& [loss, e] : order) {
    words.push_back(fmt::format("{}: {} ({:.0f}% of the load)", e,
                                difference_words(difference_of(found, layer.experts[e].loss)),
                                100 * static_cast<double>(layer.experts[e].assignments) / all));
  }
  return words;
}

double base_of(const Ablations& found) {
  const double nats = std::accumulate(found.base.nats.begin(), found.base.nats.end(), 0.0);
  return nats / static_cast<double>(
                    std::accumulate(found.bytes.begin(), found.bytes.end(), std::int64_t{0}));
}

}  // namespace

models::AblationOptions ablation_options(const Options& options) {
  models::AblationOptions how{.weight = models::parse_ablated_weight(options.ablate),
                              .seed = static_cast<std::uint64_t>(options.seed)};
  how.max_tokens = options.max_tokens.value_or(how.max_tokens);
  return how;
}

void announce(const models::AblationCost& cost, double tokens_per_s) {
  const double seconds = static_cast<double>(cost.passes * cost.tokens) / tokens_per_s;
  fmt::print("ablations: {} forwards of {} tokens, about {}\n", cost.passes, cost.tokens,
             human_time(1e6 * seconds));
  std::fflush(stdout);
}

json to_json(const Ablations& found, const models::AblationCost& cost) {
  json layers = json::array();
  for (const LayerAblation& of : found.layers) {
    json experts = json::array();
    for (const models::ExpertAblation& expert : of.experts) {
      json entry = difference_json(difference_of(found, expert.loss));
      entry["assignments"] = expert.assignments;
      experts.push_back(std::move(entry));
    }
    layers.push_back({{"layer", of.layer},
                      {"shuffled", difference_json(difference_of(found, of.shuffled))},
                      {"experts", std::move(experts)}});
  }
  return {{"passes", cost.passes},
          {"tokens", cost.tokens},
          {"nats_per_byte", base_of(found)},
          {"shuffled", difference_json(difference_of(found, found.shuffled))},
          {"layers", std::move(layers)}};
}

void print(const Ablations& found, const models::AblationOptions& options) {
  fmt::print(
      "\nablations, nats/byte more than the {:.4f} of these tokens (+- the text's share, by "
      "bootstrap)\nrouting shuffled in all layers: {}\n{:>5} {:>18}  experts left out ({}), most "
      "missed first\n",
      base_of(found), difference_words(difference_of(found, found.shuffled)), "layer", "shuffled",
      models::to_string(options.weight));
  for (const LayerAblation& of : found.layers) {
    fmt::print("{:>5} {:>18}  {}\n", of.layer, difference_words(difference_of(found, of.shuffled)),
               fmt::join(most_missed(found, of), ", "));
  }
}

}  // namespace switchyard::tool

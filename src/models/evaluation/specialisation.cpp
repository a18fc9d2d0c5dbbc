// What routers have come to: their choices on held-out text, and what these say.
#include "switchyard/models/specialisation.hpp"

#include <algorithm>
#include <utility>

#include "core/check.hpp"
#include "models/evaluation/window_batches.hpp"

namespace switchyard::models {
namespace {

/// The rows of a call's routing whose tokens are of the text.
void append(const LayerRouting& routing, const Batch& batch, LayerRouting& all) {
  const auto top_k = static_cast<std::size_t>(routing.top_k);
  for (std::size_t t = 0; t < batch.targets.size(); ++t) {
    if (batch.targets[t] < 0) continue;
    const auto first = static_cast<std::ptrdiff_t>(t * top_k);
    const auto end = static_cast<std::ptrdiff_t>((t + 1) * top_k);
    all.expert.insert(all.expert.end(), routing.expert.begin() + first,
                      routing.expert.begin() + end);
    all.weight.insert(all.weight.end(), routing.weight.begin() + first,
                      routing.weight.begin() + end);
  }
}

template <class Share>
std::vector<double> of_layers(const TextRouting& a, const TextRouting& b, const Share& share) {
  require(a.layers.size() == b.layers.size() && a.token_types == b.token_types,
          "routings are of {} tokens in {} layers and of {} in {}: want the same text and model",
          a.num_tokens(), a.layers.size(), b.num_tokens(), b.layers.size());
  std::vector<double> shares;
  for (std::size_t l = 0; l < a.layers.size(); ++l) {
    shares.push_back(share(a.layers[l].assignments(), b.layers[l].assignments()));
  }
  return shares;
}

}  // namespace

TextRouting route_text(Model& model, const Text& text, const TextRoutingOptions& options) {
  const ModelConfig& config = model.config();
  check_vocabulary(config.vocabulary, text);
  require(config.first_dense < config.layers, "the model has no MoE layer, all {} are dense",
          config.layers);
  if (soft_moe_config(config)) {
    fail(ErrorCode::kUnsupported,
         "specialisation is of what a router has decided, and the router {} gives no token to an "
         "expert",
         config.router);
  }
  const std::vector<Window> windows = sampled_windows(text, config.sequence, options.max_tokens);
  TextRouting out;
  for_each_batch(text, windows, config.sequence, options.sequences, options.progress,
                 [&](const WindowBatch& batch) {
                   std::size_t layer = 0;
                   evaluate_batch(model, batch.batch, [&](LayerRouting& routing) {
                     if (out.layers.size() == layer) {
                       out.layers.push_back({.layer = routing.layer,
                                             .num_experts = routing.num_experts,
                                             .top_k = routing.top_k});
                     }
                     append(routing, batch.batch, out.layers[layer++]);
                     return false;
                   });
                   for (std::size_t t = 0; t < batch.batch.targets.size(); ++t) {
                     if (batch.batch.targets[t] < 0) continue;
                     out.token_types.push_back(batch.batch.tokens[t]);
                     const auto row = t / static_cast<std::size_t>(batch.batch.length);
                     out.documents.push_back(batch.windows[row].document);
                   }
                 });
  return out;
}

std::vector<LayerSpecialisation> specialisation(const TextRouting& routing, int permutations,
                                                std::uint64_t seed) {
  const Vector<const std::int64_t> types{routing.token_types.data(), {routing.num_tokens()}};
  const Vector<const std::int64_t> documents{routing.documents.data(), {routing.num_tokens()}};
  const auto [least, most] =
      std::minmax_element(routing.documents.begin(), routing.documents.end());
  const bool several = !routing.documents.empty() && *least != *most;
  std::vector<LayerSpecialisation> found;
  for (const LayerRouting& layer : routing.layers) {
    const metrics::Routed routed{.num_experts = layer.num_experts,
                                 .assignments = layer.assignments()};
    LayerSpecialisation of{.layer = layer.layer, .counts = metrics::counts(routed)};
    of.load = metrics::load({of.counts.data(), {std::ssize(of.counts)}});
    of.token_type = metrics::information(types, routed, permutations, seed);
    if (several) of.document = metrics::information(documents, routed, permutations, seed);
    of.coactivation = metrics::coactivation(routed);
    found.push_back(std::move(of));
  }
  return found;
}

std::vector<double> saturation(const TextRouting& earlier, const TextRouting& last) {
  return of_layers(earlier, last, [](const AnyAssignments& a, const AnyAssignments& b) {
    return 1 - metrics::churn(b, a);
  });
}

std::vector<double> churn(const TextRouting& before, const TextRouting& after) {
  return of_layers(before, after, [](const AnyAssignments& a, const AnyAssignments& b) {
    return metrics::churn(a, b);
  });
}

}  // namespace switchyard::models

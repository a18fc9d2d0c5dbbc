// C interface: statistics of a layer's routing.
#include <cmath>

#include "capi/capi_layer.hpp"
#include "core/gpu/device_scope.hpp"

using namespace switchyard;  // NOLINT: this file is the border between the two namespaces

void capi::give_stats(const metrics::Routing& found, double padding_waste, std::int32_t top_k,
                      sy_routing_stats& to) {
  const metrics::Load& load = found.load;
  const metrics::Entropies entropies = found.entropies.value_or(
      metrics::Entropies{.router = NAN, .marginal = NAN, .information = NAN});
  const metrics::Drops drops =
      found.drops.value_or(metrics::Drops{.assignments = NAN, .tokens = NAN});
  const sy_routing_stats stats{.struct_size = to.struct_size,
                               .cv = load.cv,
                               .cv_floor = load.cv_floor,
                               .max_over_mean = load.max_over_mean,
                               .min_over_mean = load.min_over_mean,
                               .kl = load.kl,
                               .entropy = load.entropy,
                               .effective_experts = load.effective_experts,
                               .gini = load.gini,
                               .dead_experts = load.dead_experts,
                               .rank_imbalance = found.rank_imbalance.value_or(NAN),
                               .entropy_router = entropies.router,
                               .entropy_weights = entropies.weights.value_or(NAN),
                               .entropy_marginal = entropies.marginal,
                               .entropy_information = entropies.information,
                               .dropped_assignments = drops.assignments,
                               .dropped_tokens = drops.tokens,
                               .dropped_mass = drops.mass.value_or(NAN),
                               .padding_waste = padding_waste,
                               .counts = to.counts,
                               .dropped_by_choice = to.dropped_by_choice};
  to = stats;
  if (to.counts != nullptr) std::copy(found.counts.begin(), found.counts.end(), to.counts);
  if (to.dropped_by_choice == nullptr) return;
  std::fill_n(to.dropped_by_choice, top_k, found.drops ? 0 : NAN);
  std::copy(drops.by_choice.begin(), drops.by_choice.end(), to.dropped_by_choice);
}

sy_status sy_layer_stats(sy_layer layer, sy_routing_stats* stats) {
  return capi::guarded([&] {
    require(layer != nullptr, "layer is NULL");
    capi::check_struct("stats", stats);
    const auto call = layer->calls.begin();
    const DeviceScope scope(layer->device);
    MoeLayer& of = layer->layer;
    const metrics::Routing found = of.stats();
    capi::give_stats(found, metrics::padding_waste(of.rows_used(), of.rows_executed()),
                     of.config().router.top_k(), *stats);
  });
}

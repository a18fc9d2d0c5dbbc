// What the suites of exchanges share.
#include "tool/bench/exchange.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "bench/peers/mpi.hpp"
#include "switchyard/device.hpp"
#include "tool/options/usage_error.hpp"

namespace switchyard::tool {

void check_exchange_options(const Options& options) {
  if (!options.model.empty() || options.hidden || options.inner || options.top_k ||
      !options.experts.empty() || !options.num_tokens.empty()) {
    throw UsageError("--suite: {} has its own sizes, want no others", options.suite);
  }
  if (!options.only.empty()) {
    throw UsageError("--only: suite {} has no cases by name", options.suite);
  }
  if (!options.stages.empty()) {
    throw UsageError("--stages: suite {} shows all of its stages", options.suite);
  }
  for (const std::string& peer : options.peers) {
    const bool cuda = options.backend == "cuda";
    if (cuda && options.suite == "fixed-size" && peer == "nccl") continue;
    if (peer != "mpi" || cuda) {
      throw UsageError("--peer: '{}' is none of suite {} on the backend {}{}", peer, options.suite,
                       options.backend,
                       !cuda                           ? ", want mpi"
                       : options.suite == "fixed-size" ? ", want nccl"
                                                       : "");
    }
  }
}

bool mpi_peer_wanted(const Options& options, const World& world) {
  if (options.peers.empty() || options.backend == "cuda") return false;
  const std::string missing = bench::MpiPeer::missing(world.launched.get());
  if (!missing.empty()) throw UsageError("--peer: mpi {}", missing);
  return true;
}

RankPlace place_of(const Options& options, const World& world, int published) {
  RankPlace place{.num_ranks = world.num_ranks,
                  .num_threads = world.num_threads,
                  .world = world.launched.get(),
                  .timeout = std::chrono::milliseconds(options.timeout_ms)};
  if (place.world == nullptr && !options.ranks) {
    place.num_ranks = published;
    if (options.backend == "cuda") {
      const auto gpus = static_cast<int>(find_gpus().list.size());
      place.num_ranks = std::clamp(gpus, 1, published);
    }
  }
  return place;
}

ExchangeBackend exchange_backend(const Options& options) {
  const LayerOptions layer = layer_options(options);
  if (layer.device_engine == DeviceEngine::kNcclPairs) {
    throw UsageError("--engine: {} cannot always be captured in a graph, as suite {} does",
                     to_string(layer.device_engine), options.suite);
  }
  return {layer.backend, layer.device_engine};
}

bench::CaseResult start_exchange_result(const RankPlace& place, const bench::Limits& limits) {
  bench::CaseResult result;
  result.what.num_ranks = place.num_ranks;
  result.what.num_threads = place.threads_of_a_rank() * place.num_ranks;
  result.what.engine = place.engine();
  result.what.skew = "uniform";
  result.what.experts = "stand-in";
  result.what.cold = false;
  result.limits = limits;
  return result;
}

std::string ranks_text(const RankPlace& place) {
  return fmt::format("{} rank{} ({})", place.num_ranks, place.num_ranks == 1 ? "" : "s",
                     place.engine());
}

}  // namespace switchyard::tool

// What the suites of exchanges share.
#include "tool/bench_exchange.hpp"

#include <fmt/core.h>

#include "bench/peer_mpi.hpp"
#include "tool/usage_error.hpp"

namespace switchyard::tool {

void check_exchange_options(const Options& options) {
  if (!options.model.empty() || options.hidden || options.inner || options.top_k ||
      !options.experts.empty() || !options.num_tokens.empty()) {
    throw UsageError("--suite: {} has its own sizes, want no others", options.suite);
  }
  if (options.backend == "cuda") {
    throw UsageError("--backend: suite {} runs on the CPU only", options.suite);
  }
  if (!options.stages.empty()) {
    throw UsageError("--stages: suite {} shows all of its stages", options.suite);
  }
  for (const std::string& peer : options.peers) {
    if (peer != "mpi")
      throw UsageError("--peer: '{}' is none of suite {}, want mpi", peer, options.suite);
  }
}

bool mpi_peer_wanted(const Options& options, const World& world) {
  if (options.peers.empty()) return false;
  const std::string missing = bench::MpiPeer::missing(world.launched.get());
  if (!missing.empty()) throw UsageError("--peer: mpi {}", missing);
  return true;
}

RankPlace place_of(const Options& options, const World& world, int published) {
  RankPlace place{.num_ranks = world.num_ranks,
                  .num_threads = world.num_threads,
                  .world = world.launched.get(),
                  .timeout = std::chrono::milliseconds(options.timeout_ms)};
  if (place.world == nullptr && !options.ranks) place.num_ranks = published;
  return place;
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

#pragma once

// The suites of `bench` that measure exchanges alone.

#include "bench/measure/machine.hpp"
#include "bench/measure/results.hpp"
#include "comm/ranks/on_ranks.hpp"
#include "tool/options/options.hpp"
#include "tool/setup.hpp"

namespace switchyard::tool {

/// A suite on the ranks of `world`; an exit code.
/// @throws UsageError: options that the suite does not have.
int bench_all2all(const Options& options, const World& world);
int bench_fixed_size(const Options& options, const World& world);

/// That no size of a layer, no other peer and no other suite's option is given.
void check_exchange_options(const Options& options);
/// --peer mpi is given, and can be had. @throws UsageError.
[[nodiscard]] bool mpi_peer_wanted(const Options& options, const World& world);
/// The ranks of a case: --ranks or the launcher's, else `published`.
[[nodiscard]] RankPlace place_of(const Options& options, const World& world, int published);

/// Where an exchange suite runs. @throws UsageError: a backend that is not there.
struct ExchangeBackend {
  Backend backend = Backend::kCpu;
  DeviceEngine engine = DeviceEngine::kAuto;
};
[[nodiscard]] ExchangeBackend exchange_backend(const Options& options);

/// What a line of an exchange records of itself; the figures are to be added.
[[nodiscard]] bench::CaseResult start_exchange_result(const RankPlace& place,
                                                      const bench::Limits& limits);

/// "8 ranks (threads)".
[[nodiscard]] std::string ranks_text(const RankPlace& place);

}  // namespace switchyard::tool

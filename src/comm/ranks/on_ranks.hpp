#pragma once

// One way to run a measurement on ranks, whether they are threads here or processes of a launcher.

#include <algorithm>
#include <chrono>
#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

#include "comm/ranks/engine_words.hpp"
#include "comm/ranks/gather.hpp"
#include "comm/ranks/packed.hpp"
#include "switchyard/comm.hpp"

namespace switchyard {

/// Where ranks run.
struct RankPlace {
  int num_ranks = 1;
  int num_threads = 1;            ///< Of all ranks of this process.
  Communicator* world = nullptr;  ///< This process's rank of a launched world; null: threads.
  std::chrono::milliseconds timeout{10000};

  [[nodiscard]] const char* engine() const {
    return world != nullptr ? world->engine() : kThreadsEngine;
  }
  /// At least one.
  [[nodiscard]] int threads_of_a_rank() const {
    return world != nullptr ? num_threads : std::max(1, num_threads / num_ranks);
  }
};

/// Runs `body` on every rank: what each has said, in order, where the result is reported (with
/// processes: on rank 0, elsewhere nothing).
/// @throws The error of the first rank that failed.
inline std::vector<nlohmann::json> on_ranks(
    const RankPlace& place, const std::function<nlohmann::json(Communicator&)>& body) {
  std::vector<nlohmann::json> said;
  if (place.world != nullptr) {
    place.world->set_timeout(place.timeout);
    for (const auto& part : gather(*place.world, pack_message(body(*place.world)))) {
      said.push_back(unpack_message(part));
    }
    return said;
  }
  said.resize(static_cast<std::size_t>(place.num_ranks));
  run_ranks(
      place.num_ranks,
      [&](Communicator& communicator) {
        said[static_cast<std::size_t>(communicator.rank())] = body(communicator);
      },
      place.timeout);
  return said;
}

}  // namespace switchyard

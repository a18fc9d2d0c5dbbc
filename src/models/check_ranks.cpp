// What a model over ranks must be.
#include <algorithm>
#include <string_view>
#include <utility>

#include "comm/exchange_layout.hpp"
#include "core/check.hpp"
#include "switchyard/models/model.hpp"

namespace switchyard::models {
namespace {

/// Routers whose choice for a token is a function of that token, and whose state, if any, moves by
/// counts.
constexpr std::string_view kRouters[] = {"top-k", "switch", "gshard", "noisy-top-k",
                                         "v-moe", "hash",   "chain"};

}  // namespace

void check_ranks(const ModelConfig& config, int num_ranks) {
  require(num_ranks >= 1 && num_ranks <= kMaxRanks, "{} ranks, want 1 to {}", num_ranks, kMaxRanks);
  if (num_ranks == 1 || config.first_dense == config.layers) return;
  if (config.adapters) {
    fail(ErrorCode::kUnsupported,
         "adapters over {} ranks: a model with adapters runs on one so far", num_ranks);
  }
  require(num_ranks <= config.experts, "{} ranks share {} experts: want at least one each",
          num_ranks, config.experts);
  const std::string kind = config.router.substr(0, config.router.find(':'));
  if (std::ranges::find(kRouters, kind) == std::end(kRouters)) {
    std::string names;
    for (const std::string_view name : kRouters) {
      names += (names.empty() ? "" : ", ") + std::string(name);
    }
    fail(ErrorCode::kUnsupported, "the router {} over {} ranks: a model there has {}", kind,
         num_ranks, names);
  }
  if (config.capacity_factor) {
    fail(ErrorCode::kUnsupported,
         "capacity_factor={} over {} ranks: room would be each rank's, and other tokens dropped "
         "than on one rank",
         *config.capacity_factor, num_ranks);
  }
  for (const auto& [name, coefficient] :
       {std::pair("importance", config.losses.importance),
        std::pair("communication", config.losses.communication)}) {
    if (coefficient == 0) continue;
    fail(ErrorCode::kUnsupported,
         "the loss {} over {} ranks: it is of all tokens of a call, which no rank has", name,
         num_ranks);
  }
}

}  // namespace switchyard::models

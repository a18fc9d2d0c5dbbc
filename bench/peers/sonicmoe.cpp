// Asks for SonicMoE and our layer, measured in turns by a Python process.
#include "bench/peers/sonicmoe.hpp"

#include <fmt/core.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "bench/peer_scripts.hpp"
#include "bench/peers/python_process.hpp"

namespace switchyard::bench {

using nlohmann::json;

struct SonicmoePeer::State {
  PythonProcess process{"sonicmoe", kSonicmoePeerScript, ""};
  std::string version = process.hello().at("version");
};

SonicmoePeer::SonicmoePeer() : state_(std::make_unique<State>()) {}
SonicmoePeer::~SonicmoePeer() = default;

void SonicmoePeer::measure(const LayerCase& c, CaseResult& result) {
  constexpr int kRounds = 25;
  constexpr double kTarget = 1.10;
  json answer = state_->process.ask({{"T", c.num_tokens},
                                     {"E", c.config.router.num_experts},
                                     {"K", c.config.router.top_k()},
                                     {"H", c.config.experts.hidden},
                                     {"I", c.config.experts.inner},
                                     {"seed", c.seed},
                                     {"rounds", kRounds}});
  answer["version"] = state_->version;
  if (answer.contains("median_us")) {
    const json& us = answer.at("median_us");
    const double theirs = us.at("sonicmoe");
    const double ratio = answer.at("ratio");
    result.peers["sonicmoe"] = theirs;
    result.more["bar"] = c.bar;
    result.more["value"] = ratio;
    result.more["target"] = kTarget;
    result.more["holds"] = ratio >= kTarget;
    result.verdict = fmt::format(
        "{}: {:.0f} us, SonicMoE {} {:.0f} us, dense {:.0f} us, in turns in one process: {:.3f}x, "
        "wanted {:.2f}x",
        c.bar, us.at("ours").get<double>(), state_->version, theirs, us.at("dense").get<double>(),
        ratio, kTarget);
  }
  result.more["sonicmoe"] = std::move(answer);
}

}  // namespace switchyard::bench

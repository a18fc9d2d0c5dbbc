// Asks for SonicMoE and our layer, measured in turns by a Python process.
#include "bench/peers/sonicmoe.hpp"

#include <fmt/core.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "bench/cases/synthetic.hpp"
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
  const bool trains = c.pass == Pass::kBoth;
  const double target = trains ? 1.03 : 1.10;
  const char* bar = trains ? "B1" : c.bar.c_str();
  json answer = state_->process.ask({{"T", c.num_tokens},
                                     {"E", c.config.router.num_experts},
                                     {"K", c.config.router.top_k()},
                                     {"H", c.config.experts.hidden},
                                     {"I", c.config.experts.inner},
                                     {"seed", c.seed},
                                     {"pass", trains ? "both" : "forward"},
                                     {"zipf", zipf_of(c.skew)},
                                     {"rounds", kRounds}});
  answer["version"] = state_->version;
  if (answer.contains("median_us")) {
    const json& us = answer.at("median_us");
    const double theirs = us.at("sonicmoe");
    const double ratio = answer.at("ratio");
    result.peers["sonicmoe"] = theirs;
    result.more["bar"] = bar;
    result.more["value"] = ratio;
    result.more["target"] = target;
    result.more["holds"] = ratio >= target;
    result.verdict = fmt::format(
        "{}: {:.0f} us, SonicMoE {} {:.0f} us, dense {:.0f} us, in turns in one process: {:.3f}x, "
        "wanted {:.2f}x",
        bar, us.at("ours").get<double>(), state_->version, theirs, us.at("dense").get<double>(),
        ratio, target);
    if (us.contains("torch")) {
      result.verdict += fmt::format("; torch grouped_mm {:.0f} us", us.at("torch").get<double>());
    }
  }
  result.more["sonicmoe"] = std::move(answer);
}

}  // namespace switchyard::bench

// Asks for a program for stored experts and for ours, measured in turns by a Python process.
#include "bench/peers/stored.hpp"

#include <nlohmann/json.hpp>
#include <utility>

#include "bench/cases/synthetic.hpp"
#include "bench/peer_scripts.hpp"
#include "bench/peers/python_process.hpp"

namespace switchyard::bench {

using nlohmann::json;

struct StoredPeer::State {
  explicit State(std::string of)
      : name(std::move(of)), process(name, kStoredPeerScript, name.c_str()) {}

  std::string name;
  PythonProcess process;
  std::string version = process.hello().at("version");
};

StoredPeer::StoredPeer(std::string name) : state_(std::make_unique<State>(std::move(name))) {}
StoredPeer::~StoredPeer() = default;

bool StoredPeer::has(std::string_view name) { return name == "triton-mxfp4" || name == "deepgemm"; }

WeightFormat StoredPeer::format_of(std::string_view name) {
  return name == "deepgemm" ? WeightFormat::kE4M3 : WeightFormat::kMxfp4;
}

void StoredPeer::measure(const LayerCase& c, CaseResult& result) {
  constexpr int kRounds = 25;
  const ExpertConfig& experts = c.config.experts;
  json answer = state_->process.ask({{"T", c.num_tokens},
                                     {"E", c.config.router.num_experts},
                                     {"K", c.config.router.top_k()},
                                     {"H", experts.hidden},
                                     {"I", experts.inner},
                                     {"activation", to_string(experts.activation)},
                                     {"alpha", experts.alpha},
                                     {"limit", experts.limit},
                                     {"seed", c.seed},
                                     {"zipf", zipf_of(c.skew)},
                                     {"rounds", kRounds}});
  answer["version"] = state_->version;
  if (answer.contains("median_us")) {
    result.peers[state_->name] = answer.at("median_us").at(state_->name);
  }
  result.more[state_->name] = std::move(answer);
}

}  // namespace switchyard::bench

#pragma once

// A study of three arms, and runs of it that are made up.

#include <cmath>
#include <nlohmann/json.hpp>

#include "tool/study/config.hpp"

namespace switchyard::tool {

inline nlohmann::json small_study() {
  return {{"model",
           {{"preset", "smoke"}, {"hidden", 16}, {"heads", 2}, {"sequence", 16}, {"inner", 8}}},
          {"train", {{"steps", 20}, {"sequences", 2}}},
          {"text", {"a.txt"}},
          {"valid", {"b.txt"}},
          {"seeds", {1, 2, 3}},
          {"tuning", {{"seed", 9}, {"steps", 10}, {"rates", {0.001, 0.002, 0.004}}}},
          {"reference", "b"},
          {"arms",
           {{{"name", "a"}, {"router", "switch"}, {"model", {{"top_k", 1}}}},
            {{"name", "b"}, {"router", "top-k:top-k=2"}},
            {{"name", "c"}, {"router", "hash"}, {"model", {{"balance", 0}, {"z", 0}}}}}}};
}

inline StudyConfig parsed(const nlohmann::json& study) {
  return parse_study(study.dump(), "here/file.json");
}

inline nlohmann::json result_of(double loss, double rate = 0.002, double pace = 1000) {
  using nlohmann::json;
  return {{"loss", std::isfinite(loss) ? json(loss) : json()},
          {"diverged", std::isfinite(loss) ? json() : json("step 3: the loss is not finite")},
          {"learning_rate", rate},
          {"tokens_per_s", pace},
          {"seconds", 1},
          {"steps", 20},
          {"accuracy", 0.5},
          {"causal", true},
          {"leaks", {{"later tokens", 0.0}, {"other sequences", 0.0}}},
          {"blocks", {{100, 100 * loss}, {50, 50 * loss}}},
          {"curve", json::array()}};
}

}  // namespace switchyard::tool

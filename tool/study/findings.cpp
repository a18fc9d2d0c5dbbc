#include "tool/study/findings.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "bench/measure/inference.hpp"
#include "bench/sweep/uniform_drops.hpp"
#include "switchyard/router.hpp"

namespace switchyard::tool {
namespace {

using bench::PairedTest;
using nlohmann::json;

json optional_json(const std::optional<double>& value) { return value ? json(*value) : json(); }

/// The runs of an arm of one kind, seed by seed; nullptr: not there yet.
std::vector<const json*> runs_of(const StudyConfig& study, const RunResults& results,
                                 std::size_t arm, RunKind kind) {
  std::vector<const json*> runs;
  for (const std::int64_t seed : study.seeds) {
    const auto found = results.find(name_of(study, {.arm = arm, .kind = kind, .seed = seed}));
    runs.push_back(found == results.end() ? nullptr : &found->second);
  }
  return runs;
}

/// The mean of a number over the runs that have it.
template <typename Get>
json mean_over(const std::vector<const json*>& runs, const Get& get) {
  std::vector<double> values;
  for (const json* run : runs) {
    if (run == nullptr) continue;
    const json value = get(*run);
    if (value.is_number()) values.push_back(value.get<double>());
  }
  if (values.empty()) return {};
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

json at_end(const json& run, const char* key) {
  return run.at("curve").empty() ? json() : run.at("curve").back().at(key);
}

json loss_json(const std::vector<double>& losses) {
  if (losses.empty()) return {};
  const PairedTest of = bench::paired_test(losses);
  return {{"mean", of.mean},
          {"low", of.interval.low},
          {"high", of.interval.high},
          {"deviation", of.n > 1 ? json(of.deviation) : json()}};
}

/// Losses over steps: of the seeds that have a step, their mean and interval; loads beside them.
json curve_of(const std::vector<const json*>& runs) {
  json curve = json::array();
  for (std::size_t i = 0;; ++i) {
    std::vector<double> losses;
    std::vector<const json*> points;
    for (const json* run : runs) {
      if (run == nullptr || run->at("curve").size() <= i) continue;
      const json& point = run->at("curve")[i];
      if (!point.at("valid_loss").is_number()) continue;
      points.push_back(&point);
      losses.push_back(point["valid_loss"].get<double>());
    }
    if (points.empty()) return curve;
    json entry = loss_json(losses);
    entry.erase("deviation");
    entry["step"] = points.front()->at("step");
    for (const char* key : {"seconds", "load_cv", "max_vio", "dropped"}) {
      entry[key] = mean_over(points, [&](const json& point) { return point.at(key); });
    }
    for (const char* key : {"information", "information_null"}) {  // of runs on a CPU
      entry[key] = mean_over(points, [&](const json& point) { return point.value(key, json()); });
    }
    curve.push_back(std::move(entry));
  }
}

/// What differs by block, summed over the seeds that both have.
std::vector<bench::BlockDifference> blocks_of(const std::vector<const json*>& arm,
                                              const std::vector<const json*>& reference) {
  std::vector<bench::BlockDifference> blocks;
  for (std::size_t i = 0; i < arm.size(); ++i) {
    if (arm[i] == nullptr || reference[i] == nullptr || !arm[i]->contains("blocks") ||
        !reference[i]->contains("blocks")) {
      continue;
    }
    const json& a = arm[i]->at("blocks");
    const json& b = reference[i]->at("blocks");
    blocks.resize(a.size());
    for (std::size_t at = 0; at < a.size() && at < b.size(); ++at) {
      blocks[at].targets += a[at][0].get<double>();
      blocks[at].nats += a[at][1].get<double>() - b[at][1].get<double>();
    }
  }
  return blocks;
}

bool leaks(const json& leak_table) {
  return std::any_of(leak_table.begin(), leak_table.end(),
                     [](const json& change) { return change.is_number() && change > 0.0; });
}

/// An arm beside the reference, without what the family decides.
json difference_of(const std::vector<const json*>& arm, const std::vector<const json*>& reference) {
  std::vector<double> differences;
  for (std::size_t i = 0; i < arm.size(); ++i) {
    if (arm[i] == nullptr || reference[i] == nullptr) continue;
    const json& a = arm[i]->at("loss");
    const json& b = reference[i]->at("loss");
    if (a.is_number() && b.is_number()) differences.push_back(a.get<double>() - b.get<double>());
  }
  if (differences.empty()) return {};
  const PairedTest test = bench::paired_test(differences);
  const bench::Bootstrap text = bench::bootstrap(blocks_of(arm, reference));
  return {{"n", test.n},
          {"mean", test.mean},
          {"low", test.interval.low},
          {"high", test.interval.high},
          {"deviation", test.n > 1 ? json(test.deviation) : json()},
          {"p", optional_json(test.p)},
          {"text_error", text.error},
          {"text_low", text.interval.low},
          {"text_high", text.interval.high}};
}

/// Holm's family: adjusted probabilities, the smallest effect that would have been found, and in
/// one word what may be said.
void judge(json& arms, const std::string& key, std::size_t reference) {
  std::vector<json*> family;
  std::vector<double> p;
  const bool reference_sound = arms[reference].at("diverged").empty();
  for (std::size_t i = 0; i < arms.size(); ++i) {
    json& arm = arms[i];
    if (i == reference || !arm.contains(key) || arm[key].is_null()) continue;
    json& difference = arm[key];
    difference["holm"] = difference["smallest"] = json();
    if (!arm["diverged"].empty() || !reference_sound) {
      difference["verdict"] = "diverged";
    } else if (leaks(arm["leaks"]) || leaks(arms[reference].at("leaks"))) {
      difference["verdict"] = "leaks";
    } else if (difference["p"].is_null()) {
      difference["verdict"] = "one seed";
    } else {
      family.push_back(&difference);
      p.push_back(difference["p"].get<double>());
    }
  }
  const std::vector<double> adjusted = bench::holm(p);
  for (std::size_t i = 0; i < family.size(); ++i) {
    json& difference = *family[i];
    const double mean = difference["mean"].get<double>();
    difference["holm"] = adjusted[i];
    difference["smallest"] = difference["deviation"].get<double>() *
                             bench::smallest_effect(difference["n"].get<int>(),
                                                    kLevel / static_cast<double>(family.size()));
    const bool by_text = difference["text_low"] > 0.0 || difference["text_high"] < 0.0;
    difference["verdict"] = adjusted[i] >= kLevel ? "none found"
                            : !by_text            ? "this text"
                            : mean < 0            ? "lower"
                                                  : "higher";
  }
}

/// What the capacity drops of a step's calls where loads are uniform, by the closed form.
json uniform_dropped(const models::TrainConfig& train) {
  const models::ModelConfig& model = train.model;
  if (!model.capacity_factor || model.first_dense == model.layers) return {};
  const RouterConfig router = models::layer_config(model).router;
  const std::int64_t tokens = train.sequences / train.accumulate * model.sequence;
  const RouterCapacity room = capacity_for(router, *model.capacity_factor, tokens);
  return bench::uniform_drops(tokens, router.num_experts, router.top_k(), room.computing).expected;
}

json arm_json(const StudyConfig& study, const RunResults& results, std::size_t index) {
  const StudyArm& arm = study.arms[index];
  const models::ModelConfig& model = arm.train.model;
  const models::ModelCounts counts = models::count(model);
  const TunedRate tuned = tuned_rate(study, index, results);
  const std::vector<const json*> runs = runs_of(study, results, index, RunKind::kTest);
  const bool is_dense = model.first_dense == model.layers;
  json out = {{"name", arm.name},
              {"router", is_dense ? "" : model.router},
              {"parameters", counts.parameters},
              {"active", counts.active},
              {"adapters", counts.adapters},
              {"flops_per_token", counts.flops_per_token},
              {"rate", tuned.next ? json() : json(tuned.rate)},
              {"edge", tuned.is_edge},
              {"below", optional_json(tuned.below)},
              {"above", optional_json(tuned.above)},
              {"rates", json::array()},
              {"losses", json::array()},
              {"diverged", json::array()},
              {"n", 0}};
  for (const auto& [rate, loss] : tuned.tried) out["rates"].push_back({rate, optional_json(loss)});
  std::vector<double> losses;
  json leak_table = json::object();
  json causal;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (runs[i] == nullptr) continue;
    const json& run = *runs[i];
    out["n"] = out["n"].get<int>() + 1;
    out["losses"].push_back({study.seeds[i], run.at("loss")});
    if (run.at("loss").is_number()) losses.push_back(run["loss"].get<double>());
    if (!run.at("diverged").is_null()) {
      out["diverged"].push_back({study.seeds[i], run["diverged"]});
    }
    if (!run.contains("leaks")) continue;
    causal = run.at("causal");
    for (const auto& [what, change] : run["leaks"].items()) {
      const double before = leak_table.value(what, 0.0);
      leak_table[what] = std::max(before, change.get<double>());
    }
  }
  out["loss"] = loss_json(losses);
  out["causal"] = causal;
  out["leaks"] = leak_table;
  for (const char* key : {"load_cv", "max_vio", "dropped"}) {
    out[key] = mean_over(runs, [&](const json& run) { return at_end(run, key); });
  }
  for (const char* key : {"accuracy", "tokens_per_s", "seconds"}) {
    out[key] =
        mean_over(runs, [&](const json& run) { return run.contains(key) ? run[key] : json(); });
  }
  for (const char* key : {"loss", "dropped"}) {
    out["at_capacity"][key] = mean_over(runs, [&](const json& run) {
      return run.contains("at_capacity") ? run["at_capacity"][key] : json();
    });
  }
  for (const char* key : {"trained", "null", "untrained"}) {
    out["information"][key] = mean_over(runs, [&](const json& run) {
      const json of = run.value("information", json());
      return of.is_object() ? of.value(key, json()) : json();
    });
  }
  out["uniform_dropped"] = uniform_dropped(arm.train);
  const json picks = mean_over(runs, [&](const json& run) { return at_end(run, "picks"); });
  out["executed"] = counts.flops_per_token;
  if (picks.is_number() && !is_dense) {
    const auto layers = static_cast<double>(model.layers - model.first_dense);
    const double each = model.adapters ? 4 : 6;  // of experts that are frozen, or that learn
    out["executed"] = counts.flops_per_token +
                      each * layers * 3 * static_cast<double>(model.hidden * model.inner) *
                          (picks.get<double>() - models::experts_of_token(model));
  }
  out["curve"] = curve_of(runs);
  return out;
}

}  // namespace

json findings_of(const StudyConfig& study, const RunResults& results) {
  json arms = json::array();
  const auto reference = [&](RunKind kind) {
    return runs_of(study, results, study.reference, kind);
  };
  for (std::size_t i = 0; i < study.arms.size(); ++i) {
    json arm = arm_json(study, results, i);
    if (i != study.reference) {
      const auto runs = runs_of(study, results, i, RunKind::kTest);
      arm["difference"] = difference_of(runs, reference(RunKind::kTest));
    }
    if (study.equal_time && i != study.reference) {
      const auto runs = runs_of(study, results, i, RunKind::kTime);
      json time = difference_of(runs, reference(RunKind::kTest));
      if (!time.is_null()) {
        std::vector<double> losses;
        for (const json* run : runs) {
          if (run != nullptr && run->at("loss").is_number()) losses.push_back(run->at("loss"));
        }
        time["loss"] = loss_json(losses);
        time["steps"] = mean_over(runs, [](const json& run) { return run.at("steps"); });
        time["seconds"] = mean_over(runs, [](const json& run) { return run.at("seconds"); });
      }
      arm["time"] = std::move(time);
    }
    arms.push_back(std::move(arm));
  }
  judge(arms, "difference", study.reference);
  if (study.equal_time) judge(arms, "time", study.reference);
  return arms;
}

}  // namespace switchyard::tool

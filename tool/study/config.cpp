#include "tool/study/config.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "checkpoint/files/json.hpp"
#include "core/check.hpp"
#include "switchyard/error.hpp"
#include "switchyard/names.hpp"
#include "tool/study/keys.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

constexpr double kMostSize = 1 << 30;
constexpr double kMostSeed = 9007199254740992.0;
constexpr std::size_t kMostArms = 200;
constexpr std::size_t kMostSeeds = 1000;

/// A word of an enumeration.
template <class Enum, class Parse>
void read_word(StudyKeys& keys, const char* key, Enum& value, const Parse& parse_word) {
  std::string word = to_string(value);
  keys.read(key, word);
  std::string why;
  try {
    value = parse_word(word);
    return;
  } catch (const Error& error) {
    why = message_of(error);
  } catch (const UsageError& error) {
    why = error.what();
  }
  throw UsageError("{}: {}", keys.place(key), why);
}

template <class Enum>
Enum word_of(const std::string& word) {
  const auto value = parse<Enum>(word);
  if (!value) {
    throw UsageError("'{}' is not one of: {}", printable(word), fmt::join(names_of<Enum>(), ", "));
  }
  return *value;
}

models::QkNorm qk_norm_of(const std::string& word) {
  for (const auto norm : {models::QkNorm::kNone, models::QkNorm::kHead, models::QkNorm::kWhole}) {
    if (word == to_string(norm)) return norm;
  }
  throw UsageError("'{}' is not one of: none, head, whole", printable(word));
}

/// Sizes that an arm may have of its own. What all arms share is said at the top: text is read in
/// windows of one length, and losses of other vocabularies cannot be compared.
void read_model(const json& object, const std::string& place, bool is_shared,
                models::ModelConfig& model) {
  StudyKeys keys(object, place);
  std::string preset;
  if (is_shared) {
    keys.read("preset", preset);
    if (!preset.empty()) model = models::find_preset(preset).model;
    keys.read("sequence", model.sequence, 1, kMostSize);
  }
  const std::int64_t hidden = model.hidden;
  const std::int32_t heads = model.heads;
  keys.read("hidden", model.hidden, 1, kMostSize);
  keys.read("layers", model.layers, 1, 1024);
  keys.read("heads", model.heads, 1, kMostSize);
  if (model.heads > 0 && (model.hidden != hidden || model.heads != heads)) {
    model.kv_heads = model.heads;
    model.head_dim = model.hidden / model.heads;
  }
  keys.read("kv_heads", model.kv_heads, 1, kMostSize);
  keys.read("head_dim", model.head_dim, 2, kMostSize);
  keys.read("tied", model.tied);
  read_word(keys, "qk_norm", model.qk_norm, qk_norm_of);
  keys.read("first_dense", model.first_dense, 0, 1024);
  keys.read("dense_inner", model.dense_inner, 0, kMostSize);
  keys.read("experts", model.experts, 0, kMostSize);
  keys.read("top_k", model.top_k, 1, kMostSize);
  keys.read("inner", model.inner, 1, kMostSize);
  keys.read("shared_inner", model.shared_inner, 0, kMostSize);
  keys.read("shared_gated", model.shared_gated);
  if (const json* factor = keys.find("capacity_factor"); factor != nullptr && !factor->is_null()) {
    double number = 0;
    keys.read("capacity_factor", number, 1e-6, 1e6);
    model.capacity_factor = number;
  } else if (factor != nullptr) {
    model.capacity_factor.reset();
  }
  read_word(keys, "drop_policy", model.drop_policy, word_of<DropPolicy>);
  keys.read("balance", model.losses.balance, 0, 1e6);
  keys.read("z", model.losses.z, 0, 1e6);
  keys.read("importance", model.losses.importance, 0, 1e6);
  keys.read("entropy", model.losses.entropy, 0, 1e6);
  keys.read("bias_rate", model.bias_rate, 0, 1e6);
  keys.refuse_others();
}

void read_train(const json& object, const std::string& place, bool is_shared,
                models::TrainConfig& train) {
  StudyKeys keys(object, place);
  models::Schedule& schedule = train.schedule;
  if (is_shared) {
    keys.read("steps", schedule.steps, 1, 1e9);
    if (keys.find("steps") != nullptr) schedule.warmup = schedule.steps / 10;
    keys.read("sequences", train.sequences, 1, 1 << 20);
    keys.read("warmup", schedule.warmup, 0, 1e9);
    read_word(keys, "schedule", schedule.kind,
              [](const std::string& word) { return models::parse_schedule(word); });
    const bool is_wsd = schedule.kind == models::Schedule::Kind::kWsd;
    if (is_wsd) schedule.decay = std::max<std::int64_t>(1, schedule.steps / 10);
    if (is_wsd) keys.read("decay", schedule.decay, 0, 1e9);
    keys.read("final_share", schedule.final_share, 0, 1);
  }
  keys.read("accumulate", train.accumulate, 1, 1 << 20);
  keys.read("weight_decay", train.adamw.weight_decay, 0, 1e6);
  keys.read("beta1", train.adamw.beta1, 0, 1);
  keys.read("beta2", train.adamw.beta2, 0, 1);
  keys.read("epsilon", train.adamw.epsilon, 0, 1);
  keys.read("clip", train.adamw.clip, 0, 1e30);
  std::string compute = to_string(train.compute);
  keys.read("compute", compute);
  if (compute != "f32" && compute != "bf16" && compute != "f16") {
    throw UsageError("{}: '{}' is not one of: f32, bf16, f16", keys.place("compute"),
                     printable(compute));
  }
  train.compute = word_of<DType>(compute);
  keys.refuse_others();
}

void check_name(const std::string& name, const std::string& place) {
  const bool fine = !name.empty() && name.size() <= 40 &&
                    std::isalnum(static_cast<unsigned char>(name.front())) != 0 &&
                    std::all_of(name.begin(), name.end(), [](char c) {
                      return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
                             std::string_view("-_.+").find(c) != std::string_view::npos;
                    });
  if (!fine) {
    throw UsageError(
        "{}: '{}', want 1 to 40 letters, digits and -_.+, a letter or a digit first: it names a "
        "directory",
        place, printable(name));
  }
}

/// Operations are counted by top_k: it is what the router takes, where that is one number.
void set_top_k(models::ModelConfig& model, bool is_said, const std::string& place) {
  const std::optional<std::int32_t> taken = taken_top_k(model);
  if (!taken) return;
  if (is_said && *taken != model.top_k) {
    throw UsageError("{}.model.top_k: {}, but its router {} takes {}", place, model.top_k,
                     model.router, *taken);
  }
  model.top_k = *taken;
}

/// One word or a list of them.
void read_freeze(StudyKeys& keys, models::TrainConfig& train) {
  const json* found = keys.find("freeze");
  if (found == nullptr) return;
  std::vector<std::string> groups(1);
  found->is_array() ? keys.read("freeze", groups) : keys.read("freeze", groups.front());
  try {
    for (const std::string& group : groups) train.freeze.push_back(models::parse_group(group));
  } catch (const Error& error) {
    throw UsageError("{}: {}", keys.place("freeze"), message_of(error));
  }
}

/// What a layer's adapters are; the rules are check()'s.
void read_adapters(StudyKeys& keys, models::ModelConfig& model) {
  const json* const object = keys.find("adapters");
  if (object == nullptr) return;
  models::AdapterConfig adapters;
  StudyKeys own(*object, keys.place("adapters"));
  read_word(own, "kind", adapters.kind, word_of<PerftKind>);
  adapters.num_adapters = models::usual_num_adapters(adapters.kind, model.experts);
  own.read("num_adapters", adapters.num_adapters, 1, 65536);
  if (adapters.kind == PerftKind::kRouted) {
    own.read("top_k", adapters.top_k, 1, 65536);
    own.read("renormalize", adapters.renormalize);
  }
  own.read("rank", adapters.rank, 1, 65536);
  own.read("alpha", adapters.alpha, -1e6, 1e6);
  read_word(own, "activation", adapters.activation, word_of<Activation>);
  own.refuse_others();
  model.adapters = adapters;
}

/// The arm to begin with: one of those before, with as many parameters; adapters may come to them.
void read_init(StudyKeys& keys, const std::vector<StudyArm>& before, StudyArm& arm) {
  std::string name;
  keys.read("init", name);
  if (keys.find("init") == nullptr) {
    if (!arm.train.model.adapters) return;
    throw UsageError(
        "{}: they learn beside a model that is there, want init, an arm before this one",
        keys.place("adapters"));
  }
  const auto found = std::find_if(before.begin(), before.end(),
                                  [&](const StudyArm& other) { return other.name == name; });
  if (found == before.end()) {
    throw UsageError("{}: '{}', want an arm that stands before this one", keys.place("init"),
                     printable(name));
  }
  const std::optional<models::AdapterConfig>& of_other = found->train.model.adapters;
  if (of_other && of_other != arm.train.model.adapters) {
    throw UsageError("{}: '{}' has adapters of its own, want an arm without, or the same adapters",
                     keys.place("init"), name);
  }
  models::ModelConfig begun = arm.train.model;
  if (!of_other) begun.adapters.reset();
  const std::int64_t here = models::count(begun).parameters;
  const std::int64_t there = models::count(found->train.model).parameters;
  if (here != there) {
    throw UsageError("{}: '{}' has {} parameters, this arm {}: want the same tensors",
                     keys.place("init"), name, there, here);
  }
  arm.init = static_cast<std::size_t>(found - before.begin());
}

StudyArm read_arm(const json& object, const std::string& place, const models::TrainConfig& base,
                  const std::vector<StudyArm>& before) {
  StudyArm arm{.train = base};
  StudyKeys keys(object, place);
  keys.read("name", arm.name);
  check_name(arm.name, keys.place("name"));
  const std::string at = fmt::format("{} '{}'", place, arm.name);
  keys.read("router", arm.train.model.router);
  if (const json* model = keys.find("model")) {
    read_model(*model, at + ".model", false, arm.train.model);
  }
  if (const json* train = keys.find("train")) read_train(*train, at + ".train", false, arm.train);
  read_freeze(keys, arm.train);
  read_adapters(keys, arm.train.model);
  read_init(keys, before, arm);
  keys.refuse_others();
  try {
    const json* model = keys.find("model");
    set_top_k(arm.train.model, model != nullptr && model->contains("top_k"), at);
    check(arm.train);
  } catch (const Error& error) {
    throw UsageError("{}: {}", at, message_of(error));
  }
  return arm;
}

void read_tuning(const json* object, const std::string& place, double peak, std::int64_t steps,
                 StudyTuning& tuning) {
  tuning.seed = 1000;
  tuning.steps = std::max<std::int64_t>(1, steps / 2);
  tuning.extend = 2;
  tuning.rates = {peak / 2, peak, 2 * peak, 4 * peak};
  if (object == nullptr) return;
  StudyKeys keys(*object, place);
  keys.read("seed", tuning.seed, 0, kMostSeed);
  keys.read("steps", tuning.steps, 1, 1e9);
  keys.read("rates", tuning.rates, 1e-12, 1e3);
  keys.read("extend", tuning.extend, 0, 16);
  keys.refuse_others();
  const auto not_ascending =
      std::adjacent_find(tuning.rates.begin(), tuning.rates.end(),
                         [](double a, double b) { return rounded_rate(a) >= rounded_rate(b); });
  if (not_ascending != tuning.rates.end()) {
    throw UsageError("{}: {} stands behind {}, want them ascending by four digits",
                     keys.place("rates"), *(not_ascending + 1), *not_ascending);
  }
}

/// Paths as the file has them begin where it lies.
void place_files(std::vector<std::string>& files, const std::filesystem::path& source) {
  for (std::string& file : files) file = (source.parent_path() / file).lexically_normal().string();
}

void check_seeds(const StudyConfig& study, const std::string& place) {
  if (study.seeds.size() > kMostSeeds) {
    throw UsageError("{}: {} seeds, want at most {}", place, study.seeds.size(), kMostSeeds);
  }
  for (std::size_t i = 0; i < study.seeds.size(); ++i) {
    const std::int64_t seed = study.seeds[i];
    if (std::find(study.seeds.begin(), study.seeds.begin() + static_cast<std::ptrdiff_t>(i),
                  seed) != study.seeds.begin() + static_cast<std::ptrdiff_t>(i)) {
      throw UsageError("{}: {} is there twice", place, seed);
    }
    if (seed == study.tuning.seed) {
      throw UsageError("{}: {} is the seed that learning rates are tuned on, no claim may use it",
                       place, seed);
    }
  }
}

}  // namespace

std::size_t StudyConfig::find(std::string_view arm) const {
  std::string names;
  for (std::size_t i = 0; i < arms.size(); ++i) {
    if (arms[i].name == arm) return i;
    names += (names.empty() ? "" : ", ") + arms[i].name;
  }
  throw UsageError("'{}' is no arm of the study, want one of: {}", printable(std::string(arm)),
                   names);
}

double rounded_rate(double rate) { return std::stod(fmt::format("{:.4g}", rate)); }

StudyConfig parse_study(std::string_view text, const std::filesystem::path& source) {
  const std::string file = source.string();
  const json object = parse_json(text, file);
  StudyKeys keys(object, file + ":");
  StudyConfig study;
  study.name = source.stem().string();
  keys.read("name", study.name);
  check_name(study.name, keys.place("name"));
  keys.read("what", study.what);

  const json* shared = keys.find("model");
  if (shared == nullptr) throw UsageError("{}: the key 'model' is missing", file);
  std::string preset = "smoke";
  if (shared->is_object() && shared->contains("preset") && (*shared)["preset"].is_string()) {
    preset = (*shared)["preset"].get<std::string>();
  }
  const models::Preset& of = models::find_preset(preset);
  models::TrainConfig base{.model = of.model, .sequences = of.sequences};
  base.schedule = {.peak = of.learning_rate, .warmup = of.warmup, .steps = of.steps};
  read_model(*shared, keys.place("model"), true, base.model);
  if (const json* train = keys.find("train")) {
    read_train(*train, keys.place("train"), true, base);
  }

  keys.read("text", study.texts);
  keys.read("valid", study.valid);
  place_files(study.texts, source);
  place_files(study.valid, source);
  study.seeds = {1};
  keys.read("seeds", study.seeds, 0, kMostSeed);
  read_tuning(keys.find("tuning"), keys.place("tuning"), base.schedule.peak, base.schedule.steps,
              study.tuning);
  check_seeds(study, keys.place("seeds"));
  study.valid_every = std::max<std::int64_t>(1, base.schedule.steps / 10);
  keys.read("valid_every", study.valid_every, 1, 1e9);
  keys.read("save_every", study.save_every, 0, 1e9);
  keys.read("equal_time", study.equal_time);

  const json* arms = keys.find("arms");
  if (arms == nullptr || !arms->is_array() || arms->empty()) {
    throw UsageError("{}: want a list with at least one arm", keys.place("arms"));
  }
  if (arms->size() > kMostArms) {
    throw UsageError("{}: {} arms, want at most {}", keys.place("arms"), arms->size(), kMostArms);
  }
  for (const json& arm : *arms) {
    study.arms.push_back(read_arm(arm, keys.place("arms") + fmt::format("[{}]", study.arms.size()),
                                  base, study.arms));
    const std::string& name = study.arms.back().name;
    const auto same = [&](const StudyArm& other) { return other.name == name; };
    if (std::count_if(study.arms.begin(), study.arms.end(), same) > 1) {
      throw UsageError("{}: '{}' is there twice", keys.place("arms"), name);
    }
  }
  std::string reference = study.arms.front().name;
  keys.read("reference", reference);
  try {
    study.reference = study.find(reference);
  } catch (const UsageError& error) {
    throw UsageError("{}: {}", keys.place("reference"), error.what());
  }
  keys.refuse_others();
  return study;
}

}  // namespace switchyard::tool

// The rules that the configuration of a run keeps.
#include <algorithm>
#include <iterator>
#include <utility>

#include "core/check.hpp"
#include "switchyard/models/trainer.hpp"

namespace switchyard::models {
namespace {

bool has(const std::vector<Group>& groups, Group group) {
  return std::find(groups.begin(), groups.end(), group) != groups.end();
}

/// Whether the model has a tensor of the group.
bool has(const ModelConfig& model, Group group) {
  const bool has_experts = model.first_dense < model.layers;
  switch (group) {
    case Group::kHead: return !model.tied;
    case Group::kExperts: return has_experts;
    case Group::kDense: return model.first_dense > 0;
    case Group::kAdapters: return model.adapters.has_value();
    case Group::kRouter:
      return has_experts && (model.shared_gated || soft_moe_config(model) ||
                             layer_config(model).router.has_logits());
    case Group::kEmbedding:
    case Group::kNorm:
    case Group::kAttention: return true;
  }
  return true;
}

/// Of the losses of a router those that are asked for, which want one that is free.
void require_no_losses(const ModelConfig& model, const char* what, const char* otherwise) {
  const LossConfig& losses = model.losses;
  const std::pair<const char*, double> wants[] = {{"balance", losses.balance},
                                                  {"z", losses.z},
                                                  {"importance", losses.importance},
                                                  {"device", losses.device},
                                                  {"communication", losses.communication},
                                                  {"entropy", losses.entropy}};
  for (const auto& [name, value] : wants) {
    require(value == 0, "{}, but {}={} is there to move it: want {} 0, or {}", what, name, value,
            name, otherwise);
  }
}

/// What would move a router, and so wants one that is free.
void check_frozen_router(const ModelConfig& model) {
  require_no_losses(model, "freeze: router", "no freeze");
  require(model.bias_rate == 0,
          "freeze: router, but bias_rate={} is there to move it: want bias_rate 0, or no freeze",
          model.bias_rate);
  if (soft_moe_config(model)) return;
  const RouterConfig router = layer_config(model).router;
  require(!std::holds_alternative<ReluRouter>(router.kind) &&
              !std::holds_alternative<ExpertThresholdRouter>(router.kind),
          "freeze: router, but the router {} moves by its own rule in training: want another "
          "router, or no freeze",
          model.router);
}

/// Selection biases and thresholds stay as they are: Model::update_routers().
void check_adapters(const ModelConfig& model, const std::vector<Group>& freeze) {
  require(freeze.empty(),
          "freeze: {}, but beside adapters of kind {} all else is frozen as it is: want no freeze",
          freeze.empty() ? "" : to_string(freeze.front()), to_string(model.adapters->kind));
  require_no_losses(model, "adapters beside a router that is frozen", "no adapters");
}

void check_freeze(const ModelConfig& model, const std::vector<Group>& freeze) {
  for (auto group = freeze.begin(); group != freeze.end(); ++group) {
    require(std::find(freeze.begin(), group, *group) == group, "freeze: {} is there twice",
            to_string(*group));
    require(has(model, *group), "freeze: the model has no parameters of the group {}{}",
            to_string(*group), *group == Group::kRouter ? ", its router is " + model.router : "");
  }
  if (has(freeze, Group::kRouter)) check_frozen_router(model);
  bool all = true;
  for (const Group group : kAllGroups) {
    all = all && (has(freeze, group) || !has(model, group));
  }
  require(!all, "freeze: all groups are frozen, nothing is left to train");
}

}  // namespace

void check(const TrainConfig& config) {
  check(config.model);
  check(config.schedule);
  check(config.adamw);
  require(config.sequences >= 1 && config.sequences <= (1 << 20), "{} sequences of a step",
          config.sequences);
  require(config.accumulate >= 1 && config.sequences % config.accumulate == 0,
          "{} sequences of a step do not divide into {} calls", config.sequences,
          config.accumulate);
  if (config.model.adapters) check_adapters(config.model, config.freeze);
  check_freeze(config.model, config.freeze);
}

std::vector<Group> frozen_groups(const TrainConfig& config) {
  if (!config.model.adapters) return config.freeze;
  std::vector<Group> frozen(std::begin(kAllGroups), std::end(kAllGroups));
  std::erase(frozen, Group::kAdapters);
  return frozen;
}

void check(const TrainConfig& config, int ranks) {
  check(config);
  check_ranks(config.model, ranks);
  require(!config.model.adapters || !config.init.empty(),
          "adapters of kind {} want a base to learn beside: init, a run or a checkpoint",
          to_string(config.model.adapters ? config.model.adapters->kind : PerftKind::kRouted));
  const std::int64_t rows = config.sequences / config.accumulate;
  require(rows % ranks == 0, "{} sequences of a call do not divide into {} ranks", rows, ranks);
}

}  // namespace switchyard::models

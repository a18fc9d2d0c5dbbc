// The rules that the configuration of a run keeps.
#include <algorithm>
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
    case Group::kRouter:
      return has_experts && (model.shared_gated || layer_config(model).router.has_logits());
    case Group::kEmbedding:
    case Group::kNorm:
    case Group::kAttention: return true;
  }
  return true;
}

/// What would move a router, and so wants one that is free.
void check_frozen_router(const ModelConfig& model) {
  const LossConfig& losses = model.losses;
  const std::pair<const char*, double> wants[] = {{"balance", losses.balance},
                                                  {"z", losses.z},
                                                  {"importance", losses.importance},
                                                  {"device", losses.device},
                                                  {"communication", losses.communication},
                                                  {"entropy", losses.entropy},
                                                  {"bias_rate", model.bias_rate}};
  for (const auto& [name, value] : wants) {
    require(value == 0, "freeze: router, but {}={} is there to move it: want {} 0, or no freeze",
            name, value, name);
  }
  const RouterConfig router = layer_config(model).router;
  require(!std::holds_alternative<ReluRouter>(router.kind) &&
              !std::holds_alternative<ExpertThresholdRouter>(router.kind),
          "freeze: router, but the router {} moves by its own rule in training: want another "
          "router, or no freeze",
          model.router);
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
  for (const Group group : {Group::kEmbedding, Group::kNorm, Group::kAttention, Group::kRouter,
                            Group::kExperts, Group::kDense, Group::kHead}) {
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
  check_freeze(config.model, config.freeze);
}

void check(const TrainConfig& config, int ranks) {
  check(config);
  check_ranks(config.model, ranks);
  const std::int64_t rows = config.sequences / config.accumulate;
  require(rows % ranks == 0, "{} sequences of a call do not divide into {} ranks", rows, ranks);
}

}  // namespace switchyard::models

// The rules that the configuration of a run keeps.
#include "core/check.hpp"
#include "switchyard/models/trainer.hpp"

namespace switchyard::models {

void check(const TrainConfig& config) {
  check(config.model);
  check(config.schedule);
  check(config.adamw);
  require(config.model.vocabulary == kByteVocabulary,
          "the model has a vocabulary of {}, text is bytes: want {}", config.model.vocabulary,
          kByteVocabulary);
  require(config.sequences >= 1 && config.sequences <= (1 << 20), "{} sequences of a step",
          config.sequences);
  require(config.accumulate >= 1 && config.sequences % config.accumulate == 0,
          "{} sequences of a step do not divide into {} calls", config.sequences,
          config.accumulate);
}

}  // namespace switchyard::models

#pragma once

// What a run trains: a model and its optimiser, or, over ranks that are threads of this process, a
// model and an optimiser of each.

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "models/training/tensor_files.hpp"
#include "switchyard/models/optimizer.hpp"
#include "switchyard/models/trainer.hpp"

namespace switchyard::models {

class Replicas {
 public:
  /// @throws Error, as Model.
  Replicas(const TrainConfig& config, const TrainOptions& options);

  [[nodiscard]] int size() const { return static_cast<int>(replicas_.size()); }
  [[nodiscard]] Model& model(int rank = 0) { return at(rank).model; }
  [[nodiscard]] AdamW& optimizer(int rank = 0) { return at(rank).optimizer; }

  /// Runs body(rank) on every rank at once, and comes back when all have ended; of one rank here.
  /// @throws The first rank's error that is none of waiting for another; over ranks these can work
  ///         together again then.
  void on_each(const std::function<void(int rank)>& body);

  /// The optimisers' step, by the norm of all ranks' gradients. @returns it; where it is not finite
  /// nothing was changed.
  double step(double learning_rate);

  /// The first number that is not finite, in order of tensors and then of ranks.
  [[nodiscard]] std::optional<NonFinite> find_non_finite(bool gradients);

  /// Whose numbers: what all ranks have alike once, as files have it, or on every rank, to be read.
  enum class Copies : std::uint8_t { kOne, kAll };
  [[nodiscard]] std::vector<NamedNumbers> values(Copies copies);
  [[nodiscard]] std::vector<NamedNumbers> moments(Copies copies);

  /// As load_parameters(), each rank its share.
  void load_values(const std::filesystem::path& directory);

 private:
  struct Replica {
    Replica(const TrainConfig& config, const ModelOptions& options)
        : model(config.model, options), optimizer(model.parameters(), config.adamw) {}
    Model model;
    AdamW optimizer;
  };
  [[nodiscard]] Replica& at(int rank) { return *replicas_[static_cast<std::size_t>(rank)]; }
  /// Of how many ranks, from the first on, numbers of a tensor are meant.
  [[nodiscard]] int holders(Copies copies, const ParameterTensor& tensor) const;

  std::vector<std::unique_ptr<Communicator>> ranks_;  ///< Empty: one rank.
  std::vector<std::unique_ptr<Replica>> replicas_;
};

}  // namespace switchyard::models

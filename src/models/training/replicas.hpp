#pragma once

// What a run trains: a model and its optimiser, or, over ranks, one of each rank of this process:
// all of them, which are threads, or the one that a launcher's process is.

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "models/training/tensor_files.hpp"
#include "switchyard/models/optimizer.hpp"
#include "switchyard/models/trainer.hpp"

namespace switchyard::models {

class Replicas {
 public:
  /// @throws Error, as Model.
  Replicas(const TrainConfig& config, const TrainOptions& options);
  /// All ranks' at once: on GPUs each waits for the others' to end.
  ~Replicas();
  Replicas(const Replicas&) = delete;
  Replicas& operator=(const Replicas&) = delete;

  /// Of all processes.
  [[nodiscard]] int size() const { return size_; }
  /// The lowest rank of this process.
  [[nodiscard]] int first() const { return first_; }
  /// Of one rank here: by itself the first.
  [[nodiscard]] Model& model() { return model(first_); }
  [[nodiscard]] Model& model(int rank) { return at(rank).model; }
  [[nodiscard]] AdamW& optimizer() { return optimizer(first_); }
  [[nodiscard]] AdamW& optimizer(int rank) { return at(rank).optimizer; }
  /// This process's rank of a launcher's; null: all ranks are here.
  [[nodiscard]] Communicator* world() const { return world_; }

  /// Runs body(rank) on every rank at once, and comes back when all have ended; of one rank here.
  /// Collective over processes, as all that says so.
  /// @throws The first rank's error that is none of waiting for another; over ranks these can work
  ///         together again then.
  void on_each(const std::function<void(int rank)>& body);

  /// The optimisers' step, by the norm of all ranks' gradients. @returns it; where it is not finite
  /// nothing was changed. Collective.
  double step(double learning_rate);

  /// The first number that is not finite, in order of tensors and then of ranks. Collective.
  [[nodiscard]] std::optional<NonFinite> find_non_finite(bool gradients);

  enum class Numbers : std::uint8_t { kValues, kMoments };
  /// A rank's own, where they lie; without moments of what is frozen, which has none.
  [[nodiscard]] std::vector<NamedNumbers> numbers(Numbers which, int rank);

  /// A file of all ranks' numbers, what they have alike once, and of `others`: the same bytes for
  /// any number of ranks. Over processes rank 0 writes, and the others' shares come to it through a
  /// window of 4 MiB; elsewhere `file` is not looked at. Collective within on_each() or together().
  void write(Numbers which, const std::filesystem::path& file,
             std::span<const StoredTensor> others = {});
  /// The other way: each rank reads its share of what may be a larger model's, as load_parts().
  /// Collective, likewise.
  void load(Numbers which, const std::filesystem::path& file,
            const std::set<std::string>& others = {});
  /// Of all optimisers here.
  void set_steps(std::int64_t steps);
  /// What a run begins with: all values, or, of a model with adapters that the directory's has not,
  /// all but theirs. One rank where there are adapters.
  /// @throws Error{kInvalidArgument}: its adapters are others; as load_values().
  void load_base(const std::filesystem::path& directory);
  /// Values, as load_parameters().
  void load_values(const std::filesystem::path& directory);

 private:
  /// Without numbers.
  void append_frozen_moments(std::vector<NamedNumbers>& moments);
  struct Replica {
    Replica(const TrainConfig& config, const ModelOptions& options)
        : model(config.model, options), optimizer(model.parameters(), config.adamw) {}
    Model model;
    AdamW optimizer;
  };
  [[nodiscard]] Replica& at(int rank) {
    return *replicas_[static_cast<std::size_t>(rank - first_)];
  }
  [[nodiscard]] int num_here() const { return static_cast<int>(replicas_.size()); }

  void use_gpu(int rank) const;

  int size_ = 1;
  Backend backend_;
  int first_ = 0;
  Communicator* world_ = nullptr;
  std::vector<std::unique_ptr<Communicator>> ranks_;  ///< Threads; empty: one rank, or processes.
  std::vector<std::unique_ptr<Replica>> replicas_;    ///< Of this process.
};

/// How many ranks a run has.
[[nodiscard]] int num_ranks_of(const TrainOptions& options);
/// This process's rank among others of a launcher; null: there are none.
[[nodiscard]] Communicator* world_of(const TrainOptions& options);

}  // namespace switchyard::models

#include "models/training/replicas.hpp"

#include <algorithm>
#include <cmath>
#include <exception>

#include "checkpoint/file_names.hpp"
#include "comm/ranks/run_ranks.hpp"

namespace switchyard::models {

Replicas::Replicas(const TrainConfig& config, const TrainOptions& options) {
  ModelOptions of_model{.backend = options.backend,
                        .num_threads = options.num_threads,
                        .seed = config.seed,
                        .max_tokens = config.sequences / config.accumulate * config.model.sequence,
                        .compute = config.compute,
                        .recompute = options.recompute,
                        .frozen = config.freeze};
  replicas_.resize(static_cast<std::size_t>(options.ranks));
  if (options.ranks == 1) {
    replicas_.front() = std::make_unique<Replica>(config, of_model);
    return;
  }
  of_model.max_tokens /= options.ranks;
  of_model.num_threads = std::max(1, options.num_threads / options.ranks);
  ranks_ = make_thread_ranks(options.ranks);
  for (const auto& rank : ranks_) rank->set_timeout(options.timeout);
  run_on(ranks_, [&](Communicator& rank) {
    ModelOptions own = of_model;
    own.communicator = &rank;
    replicas_[static_cast<std::size_t>(rank.rank())] = std::make_unique<Replica>(config, own);
  });
}

void Replicas::on_each(const std::function<void(int rank)>& body) {
  if (ranks_.empty()) return body(0);
  try {
    run_on(ranks_, [&](Communicator& rank) { body(rank.rank()); });
  } catch (...) {
    const std::exception_ptr cause = std::current_exception();
    try {
      run_on(ranks_, [](Communicator& rank) { rank.recover(); });
    } catch (const std::exception&) {
      // The cause says more, and whoever goes on hears of it again.
    }
    std::rethrow_exception(cause);
  }
}

double Replicas::step(double learning_rate) {
  if (ranks_.empty()) return optimizer().step(learning_rate, &model().pool());
  // Of what all have alike once, then each rank's experts, in the order of ranks.
  std::vector<double> norms(ranks_.size() + 1);
  on_each([&](int rank) {
    std::vector<ParameterTensor> alike, sharded;
    for (const ParameterTensor& tensor : model(rank).parameters()) {
      (tensor.sharded ? sharded : alike).push_back(tensor);
    }
    ThreadPool* const pool = &model(rank).pool();
    if (rank == 0) norms[0] = gradient_norm(alike, pool);
    norms[static_cast<std::size_t>(rank) + 1] = gradient_norm(sharded, pool);
  });
  double squares = 0;
  for (const double norm : norms) squares += norm * norm;
  const double norm = std::sqrt(squares);
  if (!std::isfinite(norm)) return norm;
  on_each([&](int rank) { optimizer(rank).apply(learning_rate, norm, &model(rank).pool()); });
  return norm;
}

int Replicas::holders(Copies copies, const ParameterTensor& tensor) const {
  return copies == Copies::kAll || tensor.sharded ? size() : 1;
}

std::optional<NonFinite> Replicas::find_non_finite(bool gradients) {
  if (ranks_.empty()) {
    return models::find_non_finite(model().parameters(), gradients, &model().pool());
  }
  for (std::size_t i = 0; i < model().parameters().size(); ++i) {
    for (int rank = 0; rank < size(); ++rank) {
      auto found = models::find_non_finite(model(rank).parameters().subspan(i, 1), gradients);
      if (found) return found;
    }
  }
  return std::nullopt;
}

std::vector<NamedNumbers> Replicas::values(Copies copies) {
  std::vector<NamedNumbers> numbers;
  const auto append = [&](const auto& tensors_of) {
    for (std::size_t i = 0; i < tensors_of(0).size(); ++i) {
      for (int rank = 0; rank < holders(copies, tensors_of(0)[i]); ++rank) {
        const ParameterTensor& tensor = tensors_of(rank)[i];
        numbers.push_back({&tensor, tensor.value, ""});
      }
    }
  };
  append([&](int rank) { return model(rank).parameters(); });
  append([&](int rank) { return model(rank).buffers(); });
  return numbers;
}

std::vector<NamedNumbers> Replicas::moments(Copies copies) {
  std::vector<NamedNumbers> numbers;
  for (std::size_t i = 0; i < model().parameters().size(); ++i) {
    const int ranks = holders(copies, model().parameters()[i]);
    for (int rank = 0; rank < ranks; ++rank) {
      numbers.push_back({&model(rank).parameters()[i], optimizer(rank).m(i).data(), "m."});
    }
    for (int rank = 0; rank < ranks; ++rank) {
      numbers.push_back({&model(rank).parameters()[i], optimizer(rank).v(i).data(), "v."});
    }
  }
  return numbers;
}

void Replicas::load_values(const std::filesystem::path& directory) {
  load_parts(values(Copies::kAll), directory / kSingleFile);
  for (int rank = 0; rank < size(); ++rank) model(rank).parameters_changed();
}

}  // namespace switchyard::models

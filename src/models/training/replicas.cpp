#include "models/training/replicas.hpp"

#include <algorithm>
#include <cmath>
#include <exception>
#include <nlohmann/json.hpp>
#include <utility>

#include "checkpoint/file_names.hpp"
#include "comm/ranks/gather.hpp"
#include "comm/ranks/packed.hpp"
#include "comm/ranks/run_ranks.hpp"
#include "comm/ranks/together.hpp"
#include "core/check.hpp"
#include "models/training/share_files.hpp"
#include "switchyard/device.hpp"
#include "switchyard/models/files.hpp"

namespace switchyard::models {

int num_ranks_of(const TrainOptions& options) {
  return options.communicator != nullptr ? options.communicator->size() : options.ranks;
}

Communicator* world_of(const TrainOptions& options) {
  return num_ranks_of(options) > 1 ? options.communicator : nullptr;
}

Replicas::Replicas(const TrainConfig& config, const TrainOptions& options)
    : size_(num_ranks_of(options)), backend_(options.backend), world_(world_of(options)) {
  ModelOptions of_model{.backend = options.backend,
                        .num_threads = options.num_threads,
                        .seed = config.seed,
                        .max_tokens = config.sequences / config.accumulate * config.model.sequence,
                        .compute = config.compute,
                        .recompute = options.recompute,
                        .frozen = frozen_groups(config)};
  of_model.max_tokens /= size_;
  if (world_ != nullptr) {
    first_ = world_->rank();
    of_model.communicator = world_;
    use_gpu(first_);
    together(world_, [&] { replicas_.push_back(std::make_unique<Replica>(config, of_model)); });
    return;
  }
  replicas_.resize(static_cast<std::size_t>(size_));
  if (size_ == 1) {
    replicas_.front() = std::make_unique<Replica>(config, of_model);
    return;
  }
  of_model.num_threads = std::max(1, options.num_threads / size_);
  ranks_ = make_thread_ranks(size_);
  for (const auto& rank : ranks_) rank->set_timeout(options.timeout);
  run_on(ranks_, [&](Communicator& rank) {
    use_gpu(rank.rank());
    ModelOptions own = of_model;
    own.communicator = &rank;
    replicas_[static_cast<std::size_t>(rank.rank())] = std::make_unique<Replica>(config, own);
  });
}

Replicas::~Replicas() {
  if (ranks_.empty()) return;
  try {
    run_on(ranks_, [&](Communicator& rank) {
      use_gpu(rank.rank());
      replicas_[static_cast<std::size_t>(rank.rank())].reset();
    });
  } catch (const std::exception&) {
    // Nobody is left to hear of it.
  }
}

/// Ranks take turns over the GPUs; one rank alone has the caller's.
void Replicas::use_gpu(int rank) const {
  if (backend_ == Backend::kCuda && size_ > 1) use_gpu_of_rank(rank);
}

void Replicas::on_each(const std::function<void(int rank)>& body) {
  if (ranks_.empty()) {
    return together(world_, [&] { body(first_); });
  }
  try {
    run_on(ranks_, [&](Communicator& rank) {
      use_gpu(rank.rank());
      body(rank.rank());
    });
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
  if (size_ == 1) return optimizer().step(learning_rate, &model().pool());
  // Of what all have alike once, then each rank's experts, in the order of ranks.
  std::vector<double> norms(static_cast<std::size_t>(size_) + 1);
  on_each([&](int rank) {
    std::vector<ParameterTensor> alike, sharded;
    for (const ParameterTensor& tensor : model(rank).parameters()) {
      (tensor.sharded ? sharded : alike).push_back(tensor);
    }
    ThreadPool* const pool = &model(rank).pool();
    if (rank == 0) norms[0] = gradient_norm(alike, pool);
    norms[static_cast<std::size_t>(rank) + 1] = gradient_norm(sharded, pool);
    // The others' are zero here: a sum of one number.
    if (world_ != nullptr) norms = sum_over_ranks(*world_, norms);
  });
  double squares = 0;
  for (const double norm : norms) squares += norm * norm;
  const double norm = std::sqrt(squares);
  if (!std::isfinite(norm)) return norm;
  on_each([&](int rank) { optimizer(rank).apply(learning_rate, norm, &model(rank).pool()); });
  return norm;
}

std::optional<NonFinite> Replicas::find_non_finite(bool gradients) {
  // The place among the tensors, of the ranks here.
  std::pair<std::size_t, std::optional<NonFinite>> first;
  const std::size_t tensors = model().parameters().size();
  for (first.first = 0; first.first < tensors && !first.second; ++first.first) {
    for (int rank = first_; rank < first_ + num_here() && !first.second; ++rank) {
      first.second = models::find_non_finite(model(rank).parameters().subspan(first.first, 1),
                                             gradients, ranks_.empty() ? &model().pool() : nullptr);
    }
  }
  if (world_ == nullptr) return first.second;
  on_each([&](int /*rank*/) {
    nlohmann::json own = nlohmann::json::array();
    if (const auto& found = first.second) {
      own = {first.first, found->tensor, found->index, found->value};
    }
    first = {tensors + 1, std::nullopt};
    for (const auto& message : gather_to_all(*world_, pack_message(own))) {
      const nlohmann::json found = unpack_message(message);
      if (found.empty() || found[0].get<std::size_t>() >= first.first) continue;
      first = {found[0].get<std::size_t>(),
               NonFinite{found[1].get<std::string>(), found[2].get<std::int64_t>(),
                         found[3].get<float>()}};
    }
  });
  return first.second;
}

std::vector<NamedNumbers> Replicas::numbers(Numbers which, int rank) {
  if (which == Numbers::kValues) {
    std::vector<NamedNumbers> values = values_of(model(rank).parameters());
    append_values(values, model(rank).buffers());
    return values;
  }
  std::vector<NamedNumbers> moments;
  for (std::size_t i = 0; i < model(rank).parameters().size(); ++i) {
    const ParameterTensor& tensor = model(rank).parameters()[i];
    if (tensor.frozen) continue;
    moments.push_back({&tensor, optimizer(rank).m(i).data(), "m."});
    moments.push_back({&tensor, optimizer(rank).v(i).data(), "v."});
  }
  return moments;
}

/// Versions up to 0.2 wrote zeros for what is frozen; nobody reads them.
void Replicas::append_frozen_moments(std::vector<NamedNumbers>& moments) {
  for (int rank = first_; rank < first_ + num_here(); ++rank) {
    for (const ParameterTensor& tensor : model(rank).parameters()) {
      if (!tensor.frozen) continue;
      for (const char* prefix : {"m.", "v."}) moments.push_back({&tensor, nullptr, prefix});
    }
  }
}

void Replicas::write(Numbers which, const std::filesystem::path& file,
                     std::span<const StoredTensor> others) {
  std::vector<std::vector<NamedNumbers>> of_ranks;
  for (int rank = first_; rank < first_ + num_here(); ++rank) {
    of_ranks.push_back(numbers(which, rank));
  }
  if (world_ != nullptr) return write_shares(*world_, of_ranks.front(), file, others);
  std::vector<StoredTensor> tensors;
  for (std::size_t i = 0; i < of_ranks.front().size(); ++i) {
    for (const auto& own : of_ranks) {
      for (StoredTensor& part : stored_parts({&own[i], 1})) tensors.push_back(std::move(part));
      if (!own[i].tensor->sharded) break;  // all have it alike
    }
  }
  tensors.insert(tensors.end(), others.begin(), others.end());
  write_safetensors(file, tensors);
}

void Replicas::load(Numbers which, const std::filesystem::path& file,
                    const std::set<std::string>& others) {
  std::vector<NamedNumbers> all;
  for (int rank = first_; rank < first_ + num_here(); ++rank) {
    for (NamedNumbers& entry : numbers(which, rank)) all.push_back(std::move(entry));
  }
  std::vector<NamedNumbers> named = all;
  if (which == Numbers::kMoments) append_frozen_moments(named);
  std::set<std::string> known = others;
  known.merge(world_ != nullptr ? names_of_shares(*world_, named) : names_of(named));
  load_parts(all, file, known);
}

void Replicas::set_steps(std::int64_t steps) {
  for (int rank = first_; rank < first_ + num_here(); ++rank) optimizer(rank).set_steps(steps);
}

void Replicas::load_base(const std::filesystem::path& directory) {
  const std::optional<AdapterConfig>& adapters = model().config().adapters;
  if (!adapters) return load_values(directory);
  const std::optional<AdapterConfig> there = read_model_config(directory).adapters;
  require(!there || *there == *adapters,
          "init: {} has adapters of kind {}, {} of rank {}, and this run others, of kind {}, {} of "
          "rank {}: want a base without, or the same",
          directory.string(), to_string(there.value_or(*adapters).kind),
          there.value_or(*adapters).num_adapters, there.value_or(*adapters).rank,
          to_string(adapters->kind), adapters->num_adapters, adapters->rank);
  if (there) return load_values(directory);
  std::vector<NamedNumbers> base = numbers(Numbers::kValues, first_);
  std::erase_if(base,
                [](const NamedNumbers& entry) { return entry.tensor->group == Group::kAdapters; });
  load_parts(base, directory / kSingleFile);
  model().parameters_changed();
}

void Replicas::load_values(const std::filesystem::path& directory) {
  load(Numbers::kValues, directory / kSingleFile);
  for (int rank = first_; rank < first_ + num_here(); ++rank) model(rank).parameters_changed();
}

}  // namespace switchyard::models

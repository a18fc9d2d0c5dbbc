// Model's calls: what they ask of their arguments, then the lists of model.cpp.
#include <cmath>

#include "comm/ranks/collectively.hpp"
#include "comm/ranks/gather.hpp"
#include "core/check.hpp"
#include "core/shape_check.hpp"
#include "models/cpu/cross_entropy.hpp"
#include "models/model_state.hpp"
#include "switchyard/models/evaluate.hpp"
#include "switchyard/names.hpp"

namespace switchyard::models {
namespace {

/// Other ranks would wait for one that has thrown until their deadline.
template <class Body>
auto together(Communicator* ranks, const Body& body) {
  return ranks == nullptr ? body() : collectively(*ranks, body);
}

void require_length(const ModelConfig& config, std::int64_t positions) {
  require(positions <= config.sequence, "{} positions exceed the model's sequence of {}", positions,
          config.sequence);
}

}  // namespace

void Model::State::check_tokens(const char* what, Matrix<const std::int32_t> ids,
                                bool or_none) const {
  for (std::int64_t i = 0; i < ids.size(); ++i) {
    const std::int32_t id = ids.data[i];
    require((id >= 0 && id < config.vocabulary) || (or_none && id == -1),
            "{}[{}][{}] is {}, want 0 to {}{}", what, i / ids.shape[1], i % ids.shape[1], id,
            config.vocabulary - 1, or_none ? ", or -1" : "");
  }
}

Model::Model(const ModelConfig& config, const ModelOptions& options) {
  check(config);
  require(options.max_tokens >= 0, "max_tokens={} is negative", options.max_tokens);
  require(options.num_threads >= 0, "num_threads={} is negative", options.num_threads);
  if (ranks_of(options) != nullptr) {
    check_ranks(config, options.communicator->size());
    require(options.max_tokens > 0, "max_tokens must be given when {} ranks share a model",
            options.communicator->size());
  }
  state_ = std::make_unique<State>(config, options);
}
Model::~Model() = default;
Model::Model(Model&&) noexcept = default;
Model& Model::operator=(Model&&) noexcept = default;

const ModelConfig& Model::config() const { return state_->config; }
const ModelOptions& Model::options() const { return state_->options; }
std::span<const ParameterTensor> Model::parameters() const { return state_->parameters.tensors(); }
std::int64_t Model::num_parameters() const { return state_->parameters.size(); }
std::span<const ParameterTensor> Model::buffers() const { return state_->parameters.buffers(); }
DeviceModel* Model::device() { return state_->device.get(); }
ThreadPool& Model::pool() { return state_->pool; }
std::vector<StageTime> Model::stage_times(bool reset) { return state_->clock.read(reset); }

void Model::parameters_changed() {
  state_->stale = true;
  state_->stale_backward = true;
  for (MoeBlock& block : state_->blocks) block.weights_changed();
  if (state_->device) state_->device->values_changed();
}

void Model::reset_routers(std::uint64_t seed) {
  state_->parameters.reset_routers(seed);
  parameters_changed();
}

void Model::forward(Matrix<const std::int32_t> tokens, Matrix<float> logits) {
  State& state = *state_;
  together(state.ranks, [&] {
    require_length(state.config, tokens.shape[1]);
    require_shape("logits", logits, tokens.size(), state.config.vocabulary);
    state.check_tokens("tokens", tokens, false);
    if (tokens.size() == 0) return state.serve_experts();
    if (state.device) return state.device->forward(tokens, logits);
    const float* const normed = state.run({.tokens = tokens});
    state.clock.time(
        "head", products(tokens.size(), state.config.hidden, state.config.vocabulary),
        [&] { state.head.forward(normed, tokens.size(), logits.data, false, state.threads); });
  });
}

void Model::State::serve_experts() {
  if (ranks == nullptr) return;
  if (device) return device->serve_experts();
  const Matrix<float> none{kept.block.reserve(config.hidden), {0, config.hidden}};
  const std::int32_t no_id = 0;
  for (MoeBlock& block : blocks) {
    if (!block.is_dense()) block.forward({.x = none, .ids = &no_id}, none);
  }
}

double Model::evaluate(Matrix<const std::int32_t> tokens, Matrix<const std::int32_t> targets,
                       Matrix<float> nll) {
  return together(state_->ranks, [&] { return state_->evaluate(tokens, targets, nll, nullptr); });
}

double Model::evaluate(Matrix<const std::int32_t> tokens, Matrix<const std::int32_t> targets,
                       Matrix<float> nll, const RoutingHook& hook) {
  if (state_->device != nullptr || state_->ranks != nullptr) {
    fail(ErrorCode::kUnsupported,
         "reading and changing the routing of a model runs on a CPU and one rank so far, not {}",
         state_->device != nullptr ? "on a GPU" : "over ranks");
  }
  require(hook != nullptr, "the hook of a routing is empty");
  if (state_->config.first_dense < state_->config.layers && soft_moe_config(state_->config)) {
    fail(ErrorCode::kUnsupported,
         "the router {} gives no token to an expert: a hook has no routing", state_->config.router);
  }
  return state_->evaluate(tokens, targets, nll, &hook);
}

double Model::State::evaluate(Matrix<const std::int32_t> tokens, Matrix<const std::int32_t> targets,
                              Matrix<float> nll, const RoutingHook* hook) {
  const auto [batch, positions] = tokens.shape;
  require_length(config, positions);
  require_shape("targets", targets, batch, positions);
  require_shape("nll", nll, batch, positions);
  check_tokens("tokens", tokens, false);
  check_tokens("targets", targets, true);
  if (tokens.size() == 0) {
    serve_experts();
    return 0;
  }
  if (device) return device->evaluate(tokens, targets, nll);
  const float* const normed = run({.tokens = tokens, .hook = hook});
  std::vector<double>& values = kept.nll;
  values.resize(static_cast<std::size_t>(tokens.size()));
  logits_by_pieces(normed, tokens.size(),
                   [&](std::int64_t first, std::int64_t rows, float* logits) {
                     clock.time("cross entropy", 0, [&] {
                       cross_entropy({.logits = logits,
                                      .targets = targets.data + first,
                                      .rows = rows,
                                      .vocabulary = config.vocabulary,
                                      .nll = values.data() + first,
                                      .backward = false,
                                      .scale = 0,
                                      .pool = threads});
                     });
                   });
  double sum = 0;
  for (std::size_t t = 0; t < values.size(); ++t) {
    nll.data[t] = static_cast<float>(values[t]);
    sum += values[t];
  }
  return sum;
}

double Model::loss_and_gradients(const StepArgs& args) {
  return together(state_->ranks, [&] { return state_->loss_and_gradients(args); });
}

double Model::State::loss_and_gradients(const StepArgs& args) {
  const auto [batch, positions] = args.tokens.shape;
  require(batch > 0 && positions > 0, "tokens are [{}, {}], want at least one", batch, positions);
  require_length(config, positions);
  require_shape("targets", args.targets, batch, positions);
  require(std::isfinite(args.scale), "scale={} is not finite", args.scale);
  check_tokens("tokens", args.tokens, false);
  check_tokens("targets", args.targets, true);
  std::int64_t targets = 0;
  for (std::int64_t i = 0; i < args.targets.size(); ++i) targets += args.targets.data[i] >= 0;
  if (ranks != nullptr) {
    const std::vector<std::int64_t> all =
        sum_over_ranks(*ranks, std::vector<std::int64_t>{targets, args.tokens.size()});
    require(all[1] == ranks->size() * args.tokens.size(),
            "rank {} has {} tokens of {} on {} ranks: want as many on each", ranks->rank(),
            args.tokens.size(), all[1], ranks->size());
    targets = all[0];
  }
  if (device) return device->loss_and_gradients(args, targets);

  const Call call{
      .tokens = args.tokens, .training = true, .step = args.step, .first_token = args.first_token};
  pack_backward();
  const float* const normed = run(call);
  CallSums said{.nll = head_backward(args, normed, targets)};
  if (ranks == nullptr) take_stats(said);
  for (std::int32_t l = config.layers - 1; l >= 0; --l) {
    block_backward(args, l);
    attention_backward(call, l, args.accumulate);
  }
  embedding_backward(args);
  if (ranks != nullptr) {
    take_stats(said);  // a batch's losses are known once a backward has had the counts of all
    add_over_ranks(*ranks, said);
  }

  const double mean = targets == 0 ? 0 : said.nll / static_cast<double>(targets);
  if (StepStats* const stats = args.stats) {
    if (!args.accumulate) *stats = {};
    add_call(said, ++stats->calls, stats->layers);
    stats->nll += said.nll;
    stats->targets += targets;
    stats->loss += args.scale * (mean + said.router_losses);
  }
  return mean;
}

void Model::sum_gradients() {
  State& state = *state_;
  if (state.ranks == nullptr) return;
  if (state.sums == nullptr || !state.sums->usable()) {
    state.sums.reset();
    // As large as the table: what comes behind goes in the same chunks.
    state.sums =
        std::make_unique<RankSums>(*state.ranks, state.config.vocabulary * state.config.hidden);
  }
  // Neighbours in memory go together.
  float* first = nullptr;
  std::int64_t size = 0;
  const auto add_up = [&] {
    if (size > 0) state.sums->add_up(first, size);
    size = 0;
  };
  for (const ParameterTensor& tensor : state.parameters.tensors()) {
    if (tensor.frozen || !sums_once_a_step(tensor)) {
      add_up();
      continue;
    }
    if (size == 0) first = tensor.gradient;
    size += tensor.size();
  }
  add_up();
}

void Model::State::take_stats(CallSums& said) {
  for (MoeBlock& block : blocks) {
    if (!block.is_dense()) said.router_losses += block.take_stats(said.layers.emplace_back());
  }
}

void Model::update_routers(const StepStats& stats) {
  for (const RoutingStats& layer : stats.layers) {
    require(layer.layer >= 0 && layer.layer < state_->config.layers,
            "statistics are of layer {}, the model has {}", layer.layer, state_->config.layers);
    if (state_->device) continue;
    state_->blocks[static_cast<std::size_t>(layer.layer)].update_router(layer);
  }
  if (state_->device) state_->device->update_routers(stats);
}

Cache::Cache() : state_(std::make_unique<State>()) {}
Cache::~Cache() = default;
Cache::Cache(Cache&&) noexcept = default;
Cache& Cache::operator=(Cache&&) noexcept = default;
std::int64_t Cache::batch() const { return state_->batch; }
std::int64_t Cache::capacity() const { return state_->capacity; }
std::int64_t Cache::length() const { return state_->length; }
void Cache::truncate(std::int64_t length) {
  require(length >= 0 && length <= state_->length, "cannot keep {} positions of {}", length,
          state_->length);
  state_->length = length;
}

Cache Model::make_cache(std::int64_t batch, std::int64_t positions) const {
  const ModelConfig& config = state_->config;
  require(batch >= 1, "a cache of {} sequences, want at least 1", batch);
  require(positions >= 1, "a cache of {} positions, want at least 1", positions);
  require_length(config, positions);
  Cache cache;
  Cache::State& state = cache.state();
  state.batch = batch;
  state.capacity = positions;
  if (state_->device) {
    state.device = state_->device->make_cache(batch, positions);
    return cache;
  }
  const auto size = static_cast<std::size_t>(batch * positions * config.kv_heads * config.head_dim);
  for (std::int32_t l = 0; l < config.layers; ++l) {
    const bool soft = !config.is_dense(l) && soft_moe_config(config);
    const auto read = static_cast<std::size_t>(soft ? batch * positions * config.hidden : 0);
    state.layers.push_back(
        {std::vector<float>(size), std::vector<float>(size), std::vector<float>(read)});
  }
  return cache;
}

void Model::decode(Matrix<const std::int32_t> tokens, Cache& cache, Matrix<float> logits) {
  State& state = *state_;
  const ModelConfig& config = state.config;
  const auto [batch, positions] = tokens.shape;
  Cache::State& behind = cache.state();
  if (state.ranks != nullptr) {
    fail(ErrorCode::kUnsupported, "decoding token by token runs on one rank so far, not on {}",
         state.ranks->size());
  }
  if (config.first_dense < config.layers && !has_causal_router(config)) {
    fail(ErrorCode::kUnsupported,
         "decoding token by token: the router {} looks at later tokens of a sequence",
         config.router);
  }
  require((state.device == nullptr) == (behind.device == nullptr),
          "the model is on a {}, the cache on a {}", state.device ? "GPU" : "CPU",
          behind.device ? "GPU" : "CPU");
  require(batch == behind.batch && (state.device || std::ssize(behind.layers) == config.layers),
          "tokens are of {} sequences in {} layers, the cache of {} in {}", batch, config.layers,
          behind.batch, behind.layers.size());
  require(positions >= 1 && behind.length + positions <= behind.capacity,
          "{} more positions behind {}: the cache has room for {}", positions, behind.length,
          behind.capacity);
  const bool last_only = logits.shape[0] == batch;
  require_shape("logits", logits, last_only ? batch : tokens.size(), config.vocabulary);
  state.check_tokens("tokens", tokens, false);
  if (state.device) {
    state.device->decode(tokens, *behind.device, behind.length, logits);
    behind.length += positions;
    return;
  }
  const float* normed = state.run({.tokens = tokens, .cache = &behind});
  behind.length += positions;
  std::vector<float> last;
  if (last_only && positions > 1) {
    for (std::int64_t b = 0; b < batch; ++b) {
      const float* const row = normed + ((b + 1) * positions - 1) * config.hidden;
      last.insert(last.end(), row, row + config.hidden);
    }
    normed = last.data();
  }
  state.clock.time("head", products(logits.shape[0], config.hidden, config.vocabulary), [&] {
    state.head.forward(normed, logits.shape[0], logits.data, false, state.threads);
  });
}

}  // namespace switchyard::models

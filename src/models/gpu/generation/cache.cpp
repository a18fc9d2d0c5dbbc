// The memory of a cache and of its steps, all of it made before the first one; and what a model is
// asked with a cache.
#include "models/gpu/generation/cache.hpp"

#include "core/check.hpp"
#include "core/gpu/device_wide.hpp"
#include "models/gpu/model.hpp"

namespace switchyard::models::gpu {
namespace {

/// A step drops nothing and keeps nothing for a backward.
ModelConfig without_training(ModelConfig config) {
  config.capacity_factor.reset();
  config.drop_policy = DropPolicy::kToken;
  config.losses = {};
  return config;
}

}  // namespace

bool chooses_by_softmax(const RouterConfig& router) {
  const auto* const top_k = std::get_if<TopKRouter>(&router.kind);
  return top_k != nullptr && top_k->score == Score::kSoftmax && top_k->groups == 1 &&
         !router.is_chain() && router.network.is_linear() && router.num_experts <= kMostRouted &&
         router.top_k() <= kMostChosen;
}

GpuCache::GpuCache(const ModelConfig& config, const ModelOptions& options,
                   const DeviceParameters& parameters, std::int64_t batch, std::int64_t capacity)
    : config_(without_training(config)),
      parameters_(&parameters),
      host_(&parameters.host()),
      bf16_(options.compute == DType::kBF16),
      batch_(batch),
      capacity_(capacity) {
  const std::int64_t c = bf16_ ? 2 : 4, dim = config.head_dim;
  const std::int64_t of_q = config.heads * dim;
  few_ = batch <= kFewRows && of_q * c % 16 == 0;
  const std::int64_t of_cache =
      c * config.layers * batch * config.kv_heads * capacity * cache_row(dim, bf16_);
  keys_.reserve(of_cache);
  values_.reserve(of_cache);
  for (DeviceBuffer* const buffer : {&x_, &middle_}) buffer->reserve(4 * batch * config.hidden);
  qkv_.reserve(c * batch * (of_q + std::int64_t{2} * config.kv_heads * dim));
  mixed_.reserve(c * batch * of_q);
  logits_.reserve(4 * batch * config.vocabulary);
  const auto of_ids = 4 * static_cast<std::size_t>(batch);
  input_.reserve(static_cast<std::int64_t>(kIdsAt + of_ids));
  sent_.reserve(kIdsAt + of_ids);
  told_.reserve(kRing * of_ids);
  if (!reserve_for_one_kernel(options) && !reserve_for_batch(options)) reserve_for_calls(options);
}

void GpuCache::reserve_for_calls(const ModelOptions& options) {
  const RouterConfig router = layer_config(config_).router;
  routes_ = config_.first_dense < config_.layers && chooses_by_softmax(router) &&
            router.num_experts * config_.hidden <= kMostOfGate;
  if (routes_) reserve_for_choice(router.top_k());
  ModelOptions of_steps = options;
  of_steps.max_tokens = batch_;
  blocks_.reserve(static_cast<std::size_t>(config_.layers));
  const BlockScratch scratch;
  for (std::int32_t l = 0; l < config_.layers; ++l) {
    blocks_.emplace_back(config_, of_steps, *parameters_, l, scratch);
  }
  for (DeviceBuffer* const buffer : {&norm_, &attended_, &block_}) {
    buffer->reserve((bf16_ ? 2 : 4) * batch_ * config_.hidden);
  }
  scale_.reserve(4 * batch_);
  if (!few_) workspace_.reserve(DenseProducts::kWorkspace);
  if (few_) reserve_splits(attend_splits(batch_, config_.heads, config_.kv_heads, capacity_));
}

void GpuCache::reserve_for_choice(std::int32_t top_k) {
  expert_.reserve(4 * batch_ * top_k);
  share_.reserve(4 * batch_ * top_k);
}

void GpuCache::reserve_splits(std::int32_t splits) {
  splits_ = splits;
  if (splits == 1) return;
  parts_.reserve(4 * batch_ * config_.heads * config_.head_dim * splits);
  stats_.reserve(8 * batch_ * config_.heads * splits);
}

GpuCache::~GpuCache() {
  if (next_ >= 0) (void)wait_for_device();  // a step may be under way
}

CacheLayer GpuCache::layer(std::int32_t l) const {
  const std::int64_t row = cache_row(config_.head_dim, bf16_);
  const std::int64_t size = bf16_ ? 2 : 4;
  const std::int64_t at = size * l * batch_ * config_.kv_heads * capacity_ * row;
  return {
      .keys = keys_.data() + at, .values = values_.data() + at, .capacity = capacity_, .row = row};
}

std::unique_ptr<DeviceCache> GpuModel::make_cache(std::int64_t batch, std::int64_t positions) {
  return std::make_unique<GpuCache>(config_, options_, parameters_, batch, positions);
}

GpuCache& GpuModel::own(DeviceCache& cache) const {
  auto& own = static_cast<GpuCache&>(cache);
  require(own.is_of(parameters_), "the cache is of another model");
  return own;
}

StepTools GpuModel::step_tools() {
  return {.products = &products_,
          .cosine = reinterpret_cast<const float*>(cosine_.data()),
          .sine = reinterpret_cast<const float*>(sine_.data()),
          .stream = stream_.get()};
}

void GpuModel::decode(Matrix<const std::int32_t> tokens, DeviceCache& cache, std::int64_t length,
                      Matrix<float> logits) {
  GpuCache& of = own(cache);
  const auto [batch, positions] = tokens.shape;
  upload_if_stale();
  if (positions == 1) {
    of.start(tokens.data, length, step_tools());
    SWITCHYARD_CUDA(cudaMemcpyAsync(logits.data, of.logits(),
                                    static_cast<std::size_t>(4 * logits.size()),
                                    cudaMemcpyDeviceToHost, stream_.get()));
    stream_.wait();
    (void)of.finish();
    return of.check();
  }
  const Call call{.batch = batch, .positions = positions, .cache = &of, .before = length};
  reserve(call);
  send(tokens, {}, {});
  run(call);
  const std::byte* normed = norm();
  if (logits.shape[0] == batch) {
    const auto row = static_cast<std::size_t>((bf16_ ? 2 : 4) * config_.hidden);
    const std::size_t pitch = row * static_cast<std::size_t>(positions);
    // attended() is done with: as large as norm().
    SWITCHYARD_CUDA(cudaMemcpy2DAsync(attended(), row, normed + pitch - row, pitch, row,
                                      static_cast<std::size_t>(batch), cudaMemcpyDeviceToDevice,
                                      stream_.get()));
    normed = attended();
  }
  logits_to_host(normed, logits);
}

void GpuModel::start_token(const std::int32_t* tokens, DeviceCache& cache, std::int64_t position) {
  GpuCache& of = own(cache);
  if (tokens != nullptr) upload_if_stale();
  of.start(tokens, position, step_tools());
}

std::span<const std::int32_t> GpuModel::finish_token(DeviceCache& cache) {
  GpuCache& of = own(cache);
  const std::span<const std::int32_t> ids = of.finish();
  bool fine = true;
  for (const std::int32_t id : ids) fine = fine && id >= 0;
  if (!fine || of.under_way() == 0) of.check();
  return ids;
}

}  // namespace switchyard::models::gpu

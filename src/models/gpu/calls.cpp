// What is asked of a model on a GPU: its calls from host memory, its steps, and what they leave.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/check.hpp"
#include "core/gpu/cuda_memory.hpp"
#include "models/gpu/model.hpp"
#include "switchyard/routing/selection_bias.hpp"

namespace switchyard::models::gpu {
namespace {

void require_supported(const ModelConfig& config, const ModelOptions& options) {
  if (options.compute != DType::kF32 && options.compute != DType::kBF16) {
    fail(ErrorCode::kUnsupported, "a model on a GPU computes in f32 or bf16, not in {}",
         to_string(options.compute));
  }
  if (config.hidden % 8 != 0 || config.hidden > kMaxHidden) {
    fail(ErrorCode::kUnsupported, "a model on a GPU: hidden={}, want a multiple of 8 of at most {}",
         config.hidden, kMaxHidden);
  }
  if (!attention_takes(static_cast<std::int32_t>(config.head_dim),
                       options.compute == DType::kBF16)) {
    fail(ErrorCode::kUnsupported,
         "a model on a GPU: head_dim={} in {}, want 32, 64 or 128 in bf16, at most {} in f32",
         config.head_dim, to_string(options.compute), kMaxHeadDim);
  }
  if (config.qk_norm == QkNorm::kWhole) {
    fail(ErrorCode::kUnsupported,
         "a model on a GPU: qk_norm whole runs on a CPU so far, want head or none");
  }
}

}  // namespace

GpuModel::GpuModel(const ModelConfig& config, const ModelOptions& options,
                   const Parameters& parameters)
    : config_(config),
      options_(options),
      host_(&parameters),
      ranks_(ranks_of(options)),
      bf16_(options.compute == DType::kBF16),
      parameters_(config, parameters, bf16_, ranks_) {
  record_.reserve(record_bytes());
  for (Slot& slot : slots_) slot.record.reserve(static_cast<std::size_t>(record_bytes()));
  if (ranks_ != nullptr) {
    // Ranks may share a GPU, where making memory waits for what waits for them.
    const Call largest{.batch = 1, .positions = options.max_tokens, .training = true};
    reserve(largest);
    for (Slot& slot : slots_) slot.inputs.reserve(input_bytes(options.max_tokens));
    rehearse(largest);
  }
  blocks_.reserve(static_cast<std::size_t>(config.layers));
  for (std::int32_t l = 0; l < config.layers; ++l) {
    blocks_.emplace_back(config, options_, parameters_, l, scratch_);
  }
  std::vector<float> cosine, sine;
  const auto dim = static_cast<double>(config.head_dim);
  for (std::int64_t position = 0; position < config.sequence; ++position) {
    for (std::int64_t i = 0; i < config.head_dim / 2; ++i) {
      const double frequency =
          std::pow(double{config.rope_theta}, -2.0 * static_cast<double>(i) / dim);
      cosine.push_back(static_cast<float>(std::cos(static_cast<double>(position) * frequency)));
      sine.push_back(static_cast<float>(std::sin(static_cast<double>(position) * frequency)));
    }
  }
  const auto upload = [](const std::vector<float>& from, DeviceBuffer& to) {
    const auto bytes = static_cast<std::int64_t>(4 * from.size());
    copy_to_device(to.reserve(bytes), from.data(), static_cast<std::size_t>(bytes));
  };
  upload(cosine, cosine_);
  upload(sine, sine_);
}

GpuModel::~GpuModel() { cudaStreamSynchronize(stream_.get()); }

std::int64_t GpuModel::record_bytes() const {
  const std::int64_t of_block = 8 * (kLossValues + std::int64_t{2} * std::max(config_.experts, 1));
  return static_cast<std::int64_t>(sizeof(CallRecord)) + config_.layers * of_block;
}

BlockRecord GpuModel::record_of(std::byte* base, std::size_t index) const {
  const std::int64_t experts = std::max(config_.experts, 1);
  const std::int64_t of_block = 8 * (kLossValues + 2 * experts);
  std::byte* const at = base + sizeof(CallRecord) + static_cast<std::size_t>(of_block) * index;
  auto* const losses = reinterpret_cast<double*>(at);
  auto* const counts = reinterpret_cast<std::int64_t*>(losses + kLossValues);
  return {losses, counts, counts + experts};
}

const std::int32_t* GpuModel::device_tokens() const {
  return reinterpret_cast<const std::int32_t*>(inputs_.data() + sizeof(CallInputs));
}

void GpuModel::upload_if_stale() {
  if (!stale_) return;
  parameters_.upload_values(stream_.get());
  stale_ = false;
}

CallInputs GpuModel::inputs_of(std::int64_t targets, double scale) const {
  CallInputs inputs;
  inputs.optimizer = {.learning_rate = 0,
                      .beta1 = adamw_.beta1,
                      .beta2 = adamw_.beta2,
                      .epsilon = adamw_.epsilon,
                      .weight_decay = adamw_.weight_decay,
                      .clip = adamw_.clip};
  inputs.scale = targets == 0 ? 0.0F : static_cast<float>(scale / static_cast<double>(targets));
  return inputs;
}

void GpuModel::send(Matrix<const std::int32_t> tokens, Matrix<const std::int32_t> targets,
                    const CallInputs& inputs) {
  const auto ids = static_cast<std::size_t>(4 * tokens.size());
  const std::size_t bytes = input_bytes(tokens.size());
  Slot& slot = slots_[next_slot_];
  std::byte* const to = slot.inputs.reserve(bytes);
  std::memcpy(to, &inputs, sizeof(inputs));
  std::memcpy(to + sizeof(inputs), tokens.data, ids);
  if (targets.data != nullptr) std::memcpy(to + sizeof(inputs) + ids, targets.data, ids);
  SWITCHYARD_CUDA(
      cudaMemcpyAsync(inputs_.data(), to, bytes, cudaMemcpyHostToDevice, stream_.get()));
}

void GpuModel::enqueue(const Call& call, bool with_update) {
  if (call.training && !call.accumulate) {
    std::byte* const blocks = record_.data() + sizeof(CallRecord);
    SWITCHYARD_CUDA(cudaMemsetAsync(
        blocks, 0, static_cast<std::size_t>(record_bytes()) - sizeof(CallRecord), stream_.get()));
  }
  run(call);
  losses(call);
  if (call.training) backward(call);
  if (with_update) update();
}

void GpuModel::update() {
  StepFactors* const factors = &device_record()->factors;
  DeviceParameters::Counts counts{};
  if (std::ranges::any_of(blocks_, [](const DeviceBlock& block) { return block.has_bias(); })) {
    const std::int64_t* const first = record_of(record_.data(), 0).counts;
    counts = {first, record_of(record_.data(), 1).counts - first};
  }
  const auto of_all = parameters_.step(&device_inputs()->optimizer, factors, counts, stream_.get());
  for (DeviceBlock& block : blocks_) {
    block.update_bias(of_all.data + block.layer() * of_all.stride, factors, stream_.get());
  }
}

void GpuModel::fetch_record(std::size_t slot) {
  SWITCHYARD_CUDA(cudaMemcpyAsync(slots_[slot].record.data(), record_.data(),
                                  static_cast<std::size_t>(record_bytes()), cudaMemcpyDeviceToHost,
                                  stream_.get()));
  slots_[slot].done.record(stream_.get());
}

/// Counts of all calls so far: they have been added up on the GPU.
CallSums GpuModel::said_in(std::byte* record, const Call& call) const {
  CallSums said{.nll = reinterpret_cast<const CallRecord*>(record)->nll};
  for (const DeviceBlock& block : blocks_) {
    if (block.is_dense()) continue;
    const BlockRecord from = record_of(record, static_cast<std::size_t>(block.layer()));
    RoutingStats& of = said.layers.emplace_back();
    of.layer = block.layer();
    of.tokens = call.size();
    of.counts.assign(from.counts, from.counts + config_.experts);
    of.counts_kept.assign(from.counts_kept, from.counts_kept + config_.experts);
    of.losses = loss_values(from.losses);
    said.router_losses += of.losses.total;
  }
  return said;
}

/// As Model's on a CPU: sums and counts of all calls, means of the layers' losses.
double GpuModel::read_record(std::size_t slot, const Call& call, StepStats& stats) const {
  CallSums said = said_in(slots_[slot].record.data(), call);
  if (ranks_ != nullptr) add_over_ranks(*ranks_, said);
  if (!call.accumulate) stats = {};
  for (RoutingStats& layer : stats.layers) {
    std::ranges::fill(layer.counts, 0);
    std::ranges::fill(layer.counts_kept, 0);
  }
  add_call(said, ++stats.calls, stats.layers);
  const std::int64_t targets = slots_[slot].targets;
  stats.nll += said.nll;
  stats.targets += targets;
  const double mean = targets == 0 ? 0 : said.nll / static_cast<double>(targets);
  stats.loss += call.scale * (mean + said.router_losses);
  return said.nll;
}

void GpuModel::check_blocks() {
  parameters_.check();
  for (DeviceBlock& block : blocks_) block.check();
}

void GpuModel::forward(Matrix<const std::int32_t> tokens, Matrix<float> logits) {
  const Call call{.batch = tokens.shape[0], .positions = tokens.shape[1]};
  upload_if_stale();
  reserve(call);
  send(tokens, {}, {});
  run(call);
  logits_to_host(norm(), logits);
}

void GpuModel::logits_to_host(const std::byte* normed, Matrix<float> logits) {
  const std::int64_t piece = piece_of_logits(), c = bf16_ ? 2 : 4;
  for (std::int64_t first = 0; first < logits.shape[0]; first += piece) {
    const std::int64_t count = std::min(piece, logits.shape[0] - first);
    head_forward(normed + c * first * config_.hidden, count);
    SWITCHYARD_CUDA(cudaMemcpyAsync(logits.data + first * config_.vocabulary, this->logits(),
                                    static_cast<std::size_t>(4 * count * config_.vocabulary),
                                    cudaMemcpyDeviceToHost, stream_.get()));
  }
  stream_.wait();
  check_blocks();
}

double GpuModel::evaluate(Matrix<const std::int32_t> tokens, Matrix<const std::int32_t> targets,
                          Matrix<float> nll) {
  const Call call{.batch = tokens.shape[0], .positions = tokens.shape[1]};
  upload_if_stale();
  reserve(call);
  send(tokens, targets, {});
  enqueue(call, false);
  SWITCHYARD_CUDA(cudaMemcpyAsync(nll.data, nll_.data(), static_cast<std::size_t>(4 * call.size()),
                                  cudaMemcpyDeviceToHost, stream_.get()));
  stream_.wait();
  check_blocks();
  double sum = 0;
  for (std::int64_t i = 0; i < nll.size(); ++i) sum += double{nll.data[i]};
  return sum;
}

double GpuModel::loss_and_gradients(const StepArgs& args, std::int64_t targets) {
  const Call call{.batch = args.tokens.shape[0],
                  .positions = args.tokens.shape[1],
                  .training = true,
                  .accumulate = args.accumulate,
                  .scale = args.scale,
                  .step = args.step,
                  .first_token = args.first_token};
  upload_if_stale();
  reserve(call);
  send(args.tokens, args.targets, inputs_of(targets, args.scale));
  enqueue(call, false);
  Slot& slot = slots_[next_slot_];
  slot.targets = targets;
  fetch_record(next_slot_);
  stream_.wait();
  check_blocks();
  download_gradients();
  StepStats own;
  StepStats& stats = args.stats == nullptr ? own : *args.stats;
  const double nll = read_record(next_slot_, call, stats);
  return targets == 0 ? 0 : nll / static_cast<double>(targets);
}

void GpuModel::serve_experts() {
  if (ranks_ == nullptr) return;
  upload_if_stale();
  const Call none{};
  reserve(none);
  for (DeviceBlock& block : blocks_) {
    if (block.is_dense()) continue;
    block.forward({.x = rows(norm(), 0),
                   .out = rows(block_.data(), 0),
                   .ids = device_tokens(),
                   .stream = stream_.get()},
                  nullptr);
  }
  stream_.wait();
  check_blocks();
}

void GpuModel::update_routers(const StepStats& stats) {
  for (const RoutingStats& layer : stats.layers) {
    const std::int64_t bias = host_->layer(layer.layer).bias;
    if (bias < 0) continue;
    update_selection_bias({.counts = {layer.counts.data(), {std::ssize(layer.counts)}},
                           .rate = config_.bias_rate,
                           .bias = {host_->buffer(bias), {config_.experts}}});
    stale_ = true;
  }
}

void GpuModel::download_values() {
  upload_if_stale();
  parameters_.download_values(stream_.get());
}
void GpuModel::download_gradients() { parameters_.download_gradients(stream_.get()); }

}  // namespace switchyard::models::gpu

namespace switchyard::models {

std::unique_ptr<DeviceModel> make_device_model(const ModelConfig& config,
                                               const ModelOptions& options,
                                               const Parameters& parameters) {
  gpu::require_supported(config, options);
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    cudaGetLastError();
    fail(ErrorCode::kDevice, "a model on a GPU: there is no GPU here");
  }
  return std::make_unique<gpu::GpuModel>(config, options, parameters);
}

}  // namespace switchyard::models

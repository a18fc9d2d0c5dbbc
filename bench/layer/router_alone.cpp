// The router by itself.
#include "bench/layer/router_alone.hpp"

#include <algorithm>
#include <span>

#include "core/check.hpp"
#include "core/half.hpp"
#include "switchyard/device.hpp"

namespace switchyard::bench {
namespace {

/// As the layer of the backend keeps it: on CUDA in the tokens' type where that loses nothing.
ConstRawMatrix place_gate(StageMemory& memory, std::span<const float> gate,
                          std::int64_t num_experts, ConstRawMatrix tokens, Backend backend) {
  const auto* bytes = reinterpret_cast<const std::byte*>(gate.data());
  const bool exact = std::all_of(gate.begin(), gate.end(),
                                 [&](float x) { return round_to(tokens.dtype, x) == x; });
  if (backend == Backend::kCpu || tokens.dtype == DType::kF32 || !exact) {
    return memory.place({bytes, DType::kF32, num_experts, tokens.cols});
  }
  std::vector<std::byte> rounded(gate.size() * static_cast<std::size_t>(size_of(tokens.dtype)));
  for (std::size_t i = 0; i < gate.size(); ++i) {
    store_float(rounded.data(), tokens.dtype, static_cast<std::int64_t>(i), gate[i]);
  }
  return memory.place({rounded.data(), tokens.dtype, num_experts, tokens.cols});
}

}  // namespace

RouterAlone::RouterAlone(const LayerModel& model, ConstRawMatrix tokens, Backend backend,
                         int num_threads, const RouteRequest& request)
    : config_(model.config.router),
      tokens_(tokens),
      request_(request),
      pool_(num_threads),
      memory_(backend),
      seen_(tokens) {
  const std::int64_t columns = config_.num_logits();
  if (!config_.network.is_linear()) {
    fail(ErrorCode::kUnsupported,
         "the router by itself with network={}: its logits are timed in a layer, by the stage "
         "router_gemm of run and bench --suite layer",
         to_string(config_.network.kind));
  }
  if (draws(RouterNoise::Kind::kInputJitter)) {
    jittered_ = memory_.make_matrix<float>(tokens.rows, tokens.cols);
    seen_ = {reinterpret_cast<const std::byte*>(jittered_.data), DType::kF32, tokens.rows,
             tokens.cols};
  }
  if (config_.has_logits()) {
    const auto size = static_cast<std::size_t>(columns * seen_.cols);
    gate_ = place_gate(memory_, model.gate.floats().first(size), columns, seen_, backend);
    logits_ = memory_.make_matrix<float>(tokens.rows, columns);
    if (draws(RouterNoise::Kind::kLearned)) {
      noise_logits_ = memory_.make_matrix<float>(tokens.rows, columns);
    }
  }
  const auto first_of = [](Vector<const float> biases, std::int64_t size) {
    return Vector<const float>{biases.data, {std::min(biases.size(), size)}};
  };
  router_bias_ = memory_.place(first_of(model.router_bias.vector(), columns));
  selection_bias_ =
      memory_.place(first_of(model.selection_bias.vector(), model.config.router.num_experts));
  request_.token_ids = memory_.place(request.token_ids);
  routing_ = {.expert = memory_.make_matrix<std::int32_t>(tokens.rows, config_.top_k()),
              .weight = memory_.make_matrix<float>(tokens.rows, config_.top_k())};
  execution_.backend = backend;
  execution_.pool = &pool_;
#ifdef SWITCHYARD_WITH_CUDA
  if (backend == Backend::kCuda) {
    execution_.workspace_bytes =
        stage_workspace_bytes(tokens.rows, config_.top_k(), columns, tokens.cols);
    execution_.workspace = memory_.make(execution_.workspace_bytes);
  }
#endif
}

void RouterAlone::run(StageRecorder* recorder, void* stream) {
  execution_.recorder = recorder;
  execution_.stream = stream;
  if (draws(RouterNoise::Kind::kInputJitter)) run_jitter();
  if (config_.has_logits()) run_gemm();
  if (draws(RouterNoise::Kind::kLogits) || draws(RouterNoise::Kind::kLearned)) run_noise();
  run_select();
}

bool RouterAlone::draws(RouterNoise::Kind kind) const {
  return request_.training && config_.noise.kind == kind;
}

void RouterAlone::run_jitter() {
  const ScopedStage stage(execution_, "noise",
                          {.bytes = static_cast<double>(tokens_.bytes() + 4 * jittered_.size())});
  add_noise({.tokens = tokens_,
             .jittered = jittered_,
             .noise = config_.noise,
             .request = request_,
             .execution = execution_});
}

void RouterAlone::run_gemm() {
  const double flops = 2 * static_cast<double>(logits_.size() * tokens_.cols);
  const double bytes = static_cast<double>(seen_.bytes() + gate_.bytes() + 4 * logits_.size());
  const ScopedStage stage(execution_, "router_gemm",
                          {.bytes = bytes, .flops = flops, .flops_executed = flops});
  router_gemm({.tokens = seen_,
               .gate = gate_,
               .bias = router_bias_,
               .logits = logits_,
               .execution = execution_});
}

void RouterAlone::run_noise() {
  const ScopedStage stage(execution_, "noise", {.bytes = 8 * static_cast<double>(logits_.size())});
  if (noise_logits_.data != nullptr) {  // by any gate: that of the experts has the shape
    router_gemm({.tokens = seen_, .gate = gate_, .logits = noise_logits_, .execution = execution_});
  }
  add_noise({.logits = logits_,
             .noise_logits = {noise_logits_.data, noise_logits_.shape},
             .noise = config_.noise,
             .request = request_,
             .execution = execution_});
}

void RouterAlone::run_select() {
  const double bytes = static_cast<double>(4 * logits_.size() + 8 * routing_.expert.size());
  const ScopedStage stage(execution_, "select", {.bytes = bytes});
  route({.logits = logits_,
         .selection_bias = selection_bias_,
         .config = config_,
         .routing = routing_,
         .request = request_,
         .execution = execution_});
}

}  // namespace switchyard::bench

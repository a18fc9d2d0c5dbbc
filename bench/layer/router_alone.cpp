// The router by itself.
#include "bench/layer/router_alone.hpp"

#include <algorithm>
#include <span>

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
                         int num_threads)
    : config_(model.config.router), tokens_(tokens), pool_(num_threads), memory_(backend) {
  const std::int64_t num_experts = config_.num_experts;
  gate_ = place_gate(memory_, model.gate.floats(), num_experts, tokens, backend);
  router_bias_ = memory_.place(model.router_bias.vector());
  selection_bias_ = memory_.place(model.selection_bias.vector());
  logits_ = memory_.make_matrix<float>(tokens.rows, num_experts);
  routing_ = {.expert = memory_.make_matrix<std::int32_t>(tokens.rows, config_.top_k()),
              .weight = memory_.make_matrix<float>(tokens.rows, config_.top_k())};
  execution_.backend = backend;
  execution_.pool = &pool_;
#ifdef SWITCHYARD_WITH_CUDA
  if (backend == Backend::kCuda) {
    execution_.workspace_bytes =
        stage_workspace_bytes(tokens.rows, config_.top_k(), num_experts, tokens.cols);
    execution_.workspace = memory_.make(execution_.workspace_bytes);
  }
#endif
}

void RouterAlone::run(StageRecorder* recorder, void* stream) {
  execution_.recorder = recorder;
  execution_.stream = stream;
  run_gemm();
  run_select();
}

void RouterAlone::run_gemm() {
  const double flops = 2 * static_cast<double>(logits_.size() * tokens_.cols);
  const double bytes = static_cast<double>(tokens_.bytes() + gate_.bytes() + 4 * logits_.size());
  const ScopedStage stage(execution_, "router_gemm",
                          {.bytes = bytes, .flops = flops, .flops_executed = flops});
  router_gemm({.tokens = tokens_,
               .gate = gate_,
               .bias = router_bias_,
               .logits = logits_,
               .execution = execution_});
}

void RouterAlone::run_select() {
  const double bytes = static_cast<double>(4 * logits_.size() + 8 * routing_.expert.size());
  const ScopedStage stage(execution_, "select", {.bytes = bytes});
  route({.logits = logits_,
         .selection_bias = selection_bias_,
         .config = config_,
         .routing = routing_,
         .execution = execution_});
}

}  // namespace switchyard::bench

// The router by itself.
#include "bench/router_alone.hpp"

namespace switchyard::bench {
namespace {

Vector<const float> vector_of(const std::vector<float>& values) {
  return {values.data(), {std::ssize(values)}};
}

}  // namespace

RouterAlone::RouterAlone(const LayerModel& model, ConstRawMatrix tokens, StageRecorder& recorder,
                         int num_threads)
    : model_(model), tokens_(tokens), pool_(num_threads) {
  execution_.pool = &pool_;
  execution_.recorder = &recorder;
  const auto num_tokens = static_cast<std::size_t>(tokens.rows);
  const RouterConfig& config = model.config.router;
  logits_.resize(num_tokens * static_cast<std::size_t>(config.num_experts));
  expert_.resize(num_tokens * static_cast<std::size_t>(config.top_k));
  weight_.resize(expert_.size());
}

void RouterAlone::run() {
  const Matrix<float> logits{logits_.data(), {tokens_.rows, model_.config.router.num_experts}};
  run_gemm(logits);
  run_select(logits);
}

void RouterAlone::run_gemm(Matrix<float> logits) {
  const ConstRawMatrix gate{reinterpret_cast<const std::byte*>(model_.gate.data()), DType::kF32,
                            model_.config.router.num_experts, tokens_.cols};
  const double flops = 2 * static_cast<double>(logits.size() * tokens_.cols);
  const double bytes = static_cast<double>(tokens_.bytes() + gate.bytes() + 4 * logits.size());
  const ScopedStage stage(execution_, "router_gemm",
                          {.bytes = bytes, .flops = flops, .flops_executed = flops});
  router_gemm({.tokens = tokens_,
               .gate = gate,
               .bias = vector_of(model_.router_bias),
               .logits = logits,
               .execution = execution_});
}

void RouterAlone::run_select(Matrix<const float> logits) {
  const RouterConfig& config = model_.config.router;
  const std::int64_t top_k = config.top_k;
  const double bytes = static_cast<double>(4 * logits.size() + 8 * tokens_.rows * top_k);
  const ScopedStage stage(execution_, "select", {.bytes = bytes});
  route({.logits = logits,
         .selection_bias = vector_of(model_.selection_bias),
         .config = config,
         .routing = {.expert = {expert_.data(), {tokens_.rows, top_k}},
                     .weight = {weight_.data(), {tokens_.rows, top_k}},
                     .top_score = {}},
         .execution = execution_});
}

}  // namespace switchyard::bench

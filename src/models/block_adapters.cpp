#include "models/block_adapters.hpp"

#include "core/row_ops.hpp"
#include "models/layer_arguments.hpp"
#include "switchyard/backward.hpp"

namespace switchyard::models {
namespace {

PerftOptions perft_options(const ModelOptions& options) {
  PerftOptions perft;
  perft.compute = options.compute;
  perft.num_threads = options.num_threads;
  perft.max_tokens = options.max_tokens;
  return perft;
}

}  // namespace

BlockAdapters::BlockAdapters(const ModelConfig& config, const ModelOptions& options,
                             const Parameters& parameters, const LayerTensors& tensors,
                             ThreadPool* threads)
    : what_(perft_config(config)),
      parameters_(&parameters),
      tensors_(tensors),
      threads_(threads),
      adapters_(perft_model(), perft_options(options)) {}

PerftModel BlockAdapters::perft_model() const {
  const Parameters& p = *parameters_;
  return {.config = what_,
          .gate = parameter(p.value(tensors_.adapters_gate),
                            what_.router.num_logits() * what_.hidden, Backend::kCpu),
          .adapters = make_memory_source(what_.experts(), DType::kF32, p.value(tensors_.adapters_a),
                                         p.value(tensors_.adapters_b))};
}

void BlockAdapters::forward(const ForwardArgs& layer) {
  if (stale_) adapters_.reload();
  stale_ = false;
  request_ = layer.request;
  PerftForwardArgs args{
      .tokens = layer.tokens, .base = layer.out, .out = layer.out, .recorder = layer.recorder};
  if (layer.saved != nullptr) args.saved = &saved_;
  if (follow_the_layer()) {
    const RoutingRecord& routing = *request_.record;
    const std::int64_t columns = what_.router.top_k();
    args.expert = {routing.expert.data(), {layer.tokens.rows, columns}};
    args.weight = {routing.weight.data(), {layer.tokens.rows, columns}};
    args.kept = {routing.kept.data(), {std::ssize(routing.kept)}};
  }
  adapters_.forward(args);
}

void BlockAdapters::backward(BackwardArgs& layer, Matrix<const float> logits) {
  const std::int64_t num_tokens = layer.dout.rows, hidden = what_.hidden, rank = what_.rank;
  const std::int64_t count = what_.num_adapters, columns = what_.router.top_k();
  const Parameters& p = *parameters_;
  PerftBackwardArgs args{
      .saved = &saved_,
      .dout = layer.dout,
      .dtokens = raw(dtokens_.reserve(num_tokens * hidden), num_tokens, hidden),
      .da = raw(p.gradient(tensors_.adapters_a), count * rank, hidden),
      .db = raw(p.gradient(tensors_.adapters_b), count * hidden, rank),
      .dgate = raw(p.gradient(tensors_.adapters_gate), what_.router.num_logits(), hidden),
      .accumulate = layer.accumulate,
      .recorder = layer.recorder};
  // Weights of a rule without logits are constants.
  const bool through_gate = follow_the_layer() && logits.data != nullptr;
  if (through_gate) args.dweight = {dweight_.reserve(num_tokens * columns), {num_tokens, columns}};
  adapters_.backward(args);
  if (!through_gate) return;
  const Matrix<float> dlogits{dlogits_.reserve(logits.size()), logits.shape};
  route_backward({.logits = logits,
                  .expert = {request_.record->expert.data(), {num_tokens, columns}},
                  .dweight = args.dweight,
                  .config = what_.router,
                  .request = request_,
                  .dlogits = dlogits,
                  .execution = {.pool = threads_, .recorder = layer.recorder}});
  layer.dlogits = dlogits;
}

void BlockAdapters::add_to_dtokens(const BackwardArgs& layer) {
  const std::int64_t hidden = what_.hidden;
  auto* const to = reinterpret_cast<float*>(layer.dtokens.data);
  parallel_for(threads_, layer.dtokens.rows, [&](std::int64_t t, int) {
    row_ops::add(dtokens_.data() + t * hidden, to + t * hidden, hidden);
  });
}

}  // namespace switchyard::models

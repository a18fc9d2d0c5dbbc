// The layer over ranks on GPUs. All memory is made once, before the exchange: growing would wait
// for the device, on which the exchange of another rank may wait for this one. What lies in host
// memory goes through pinned memory of the layer's, and then the call waits for its result.
#include "layer/gpu/exchange_layer.hpp"

#include <algorithm>

#include "core/gpu/cuda_memory.hpp"
#include "layer/add_up.hpp"
#include "layer/gpu/wire_rows.hpp"

namespace switchyard {

ExchangeLayer::ExchangeLayer(const LayerModel& model, const LayerOptions& options,
                             Communicator& communicator)
    : options_(options),
      communicator_(communicator),
      num_ranks_(communicator.size()),
      stages_(model, options, communicator.rank(), communicator.size()) {
  config = model.config;
  compute = stages_.compute();
  const std::int64_t hidden = config.experts.hidden;
  stages_.reserve(options.max_tokens);
  (void)host_tokens_.matrix(DType::kF32, options.max_tokens, hidden);
  (void)host_out_.matrix(DType::kF32, options.max_tokens, hidden);
  staging_.emplace(staging_bytes());
  rehearse();
  exchange_.emplace(communicator, config, options, compute, stages_.each_group());
  by_lists_ = exchange_->makes_lists() && stages_.experts().offer_lists(stages_.execution());
  if (!by_lists_ && exchange_->place_of_partials().data == nullptr) {
    (void)sums_.matrix(sums_type(), stages_.rows_of_sums(options.max_tokens), hidden);
  }
  communicator.barrier("all memory is taken");
}

void ExchangeLayer::forward(const ForwardArgs& args) {
  raise_status();
  cudaStream_t stream = exchange_->stream_for(args);
  stages_.begin(stream, args.recorder);
  staging_->begin();
  const std::int64_t num_tokens = args.tokens.rows;
  SavedForward::State* const saved = args.saved == nullptr ? nullptr : &begin_saving(args);
  const ConstRawMatrix given = to_device(args.tokens);
  const ConstRawMatrix tokens =
      saved == nullptr ? stages_.to_compute(given) : stages_.keep(given, args, *saved);
  const bool host_out = num_tokens > 0 && !is_on_device(args.out.data);
  const RawMatrix out =
      host_out ? host_out_.matrix(args.out.dtype, num_tokens, args.out.cols) : args.out;

  stages_.router().run(staged(args), tokens, stages_.execution(), saved);
  const TokensForExperts input = stages_.to_experts(tokens, stages_.run_shared(tokens, saved));
  count_forward();
  if (by_lists_ && saved == nullptr) {
    run_by_lists(input, out);
  } else {
    run_by_plan(input, out, saved);
  }
  if (saved != nullptr) saved->use = SavedForward::State::Use::kReady;

  // Copies of ranks share queues: not before the exchange is over, or one would stand before what
  // another rank wants to send.
  const bool to_host = host_out || args.request.record != nullptr;
  if (to_host) SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
  if (host_out) {
    staging_->download(args.out.data, out.data, static_cast<std::size_t>(out.bytes()), stream);
  }
  if (args.request.record != nullptr) {
    stages_.router().download(*args.request.record, stream, &*staging_);
  }
  if (to_host || staging_->used()) {
    check();
    staging_->finish();
  }
}

void ExchangeLayer::check() {
  SWITCHYARD_CUDA(cudaStreamSynchronize(stages_.stream()));
  raise_status();
  rows_used = rows_executed = 0;
  traffic = {};
  for (std::int32_t i = 0; i < stages_.num_iterations(); ++i) {
    const CallStatus& told = stages_.told(i);
    rows_used += told.rows_used;
    rows_executed += told.rows_executed;
    add_up(traffic, exchange_->traffic(told.rows_between_ranks));
  }
}

void ExchangeLayer::raise_status() {
  exchange_->check();
  if (gradients_ != nullptr) gradients_->check();
  stages_.raise_status();
}

DType ExchangeLayer::sums_type() const {
  return options_.combine_wire != DType::kF8E4M3 ? options_.combine_wire : DType::kF32;
}

std::size_t ExchangeLayer::staging_bytes() const {
  constexpr std::int64_t kPieces = std::int64_t{11} * 256;
  const std::int64_t picks = options_.max_tokens * config.router.top_k();
  const std::int64_t previous =
      config.router.gating_residual ? 4 * options_.max_tokens * config.router.num_logits() : 0;
  return static_cast<std::size_t>(8 * options_.max_tokens * config.experts.hidden +
                                  (8 + 9) * picks + 4 * options_.max_tokens + previous +
                                  std::int64_t{16} * config.router.num_experts + kPieces);
}

void ExchangeLayer::rehearse() {
  const std::int64_t hidden = config.experts.hidden;
  // The router has a kernel for few tokens, some, many: doubling meets them all.
  for (std::int64_t doubled = 1; doubled < 2 * options_.max_tokens; doubled *= 2) {
    const std::int64_t num_tokens = std::min(doubled, options_.max_tokens);
    const RawMatrix tokens = stages_.converted(num_tokens, hidden);
    SWITCHYARD_CUDA(cudaMemsetAsync(tokens.data, 0, static_cast<std::size_t>(tokens.bytes()),
                                    stages_.stream()));
    stages_.router().rehearse(tokens, stages_.execution());
    (void)stages_.to_experts(tokens, stages_.run_shared(tokens));
  }
  if (stages_.crosses()) load_wire_kernels(compute, *options_.dispatch_wire);
  if (stages_.experts().computes_fp8()) (void)stages_.quantised(stages_.converted(1, hidden));
  DeviceBuffer sums;  // gone before the window is made
  stages_.experts().rehearse(
      sums.matrix(sums_type(), stages_.rows_of_sums(options_.max_tokens), hidden),
      stages_.each_group(), stages_.execution());
}

ConstRawMatrix ExchangeLayer::to_device(ConstRawMatrix tokens) {
  if (tokens.rows == 0 || is_on_device(tokens.data)) return tokens;
  const RawMatrix copy = host_tokens_.matrix(tokens.dtype, tokens.rows, tokens.cols);
  const auto bytes = static_cast<std::size_t>(copy.bytes());
  SWITCHYARD_CUDA(cudaMemcpyAsync(copy.data, staging_->keep(tokens.data, bytes), bytes,
                                  cudaMemcpyHostToDevice, stages_.stream()));
  return copy;
}

ForwardArgs ExchangeLayer::staged(ForwardArgs args) {
  const Vector<const std::int32_t>& ids = args.request.token_ids;
  const bool goes_by_ids = std::holds_alternative<HashRouter>(config.router.kind);
  if (goes_by_ids && ids.data != nullptr && ids.shape[0] > 0 && !is_on_device(ids.data)) {
    args.request.token_ids.data = static_cast<const std::int32_t*>(
        staging_->keep(ids.data, static_cast<std::size_t>(4 * ids.shape[0])));
  }
  Matrix<const float>& previous = args.request.previous_logits;
  if (previous.data != nullptr && previous.size() > 0 && !is_on_device(previous.data)) {
    previous.data = static_cast<const float*>(
        staging_->keep(previous.data, static_cast<std::size_t>(4 * previous.size())));
  }
  if (args.expert.data == nullptr || args.expert.size() == 0 || is_on_device(args.expert.data)) {
    return args;
  }
  const auto bytes = static_cast<std::size_t>(4 * args.expert.size());
  args.expert.data = static_cast<const std::int32_t*>(staging_->keep(args.expert.data, bytes));
  args.weight.data = static_cast<const float*>(staging_->keep(args.weight.data, bytes));
  return args;
}

ConstRawMatrix ExchangeLayer::decoded(const DeviceReceived& received) {
  if (!stages_.crosses()) return received.x;
  const RawMatrix out = stages_.crossed(received.x.rows, received.x.cols);
  const ScopedStage stage(stages_.execution(), "dequantize",
                          {.bytes = static_cast<double>(received.x.bytes() + out.bytes())});
  decode_rows({.x = received.x, .scale = received.scale, .expert = received.expert}, out,
              stages_.stream());
  return out;
}

RowsForExperts ExchangeLayer::rows_of(const DeviceReceived& received, bool fp8) {
  if (fp8 && received.x.dtype == DType::kF8E4M3) return {.x = received.x, .scale = received.scale};
  const ConstRawMatrix x = decoded(received);
  return fp8 ? stages_.quantised(x, received.expert) : RowsForExperts{.x = x};
}

void ExchangeLayer::run_by_lists(const TokensForExperts& input, RawMatrix out) {
  CudaExperts& experts = stages_.experts();
  const Execution& execution = stages_.execution();
  const DeviceExpertLists& lists = experts.lists();
  const DeviceReceived received =
      exchange_->dispatch(input.x, input.routing, stages_.router().kept(), lists, execution);
  const ConstRawMatrix rows =
      experts.rows_by_lists(rows_of(received, experts.computes_fp8()), execution);
  exchange_->combine_rows(rows, lists, input.around, out, execution);
  // A dispatch's lists are compact: all rows of the experts are used.
  const PlanView& view = experts.plan();
  report(view.expert_begin.data + view.num_experts, received);
}

void ExchangeLayer::run_by_plan(const TokensForExperts& input, RawMatrix out,
                                SavedForward::State* saved) {
  CudaExperts& experts = stages_.experts();
  const Execution& execution = stages_.execution();
  const ConstRawMatrix tokens = input.x;
  const DeviceReceived received =
      exchange_->dispatch(tokens, input.routing, stages_.router().kept(), {}, execution);
  const RawMatrix read_there = exchange_->place_of_partials();
  const RawMatrix sums =
      read_there.data != nullptr
          ? read_there
          : sums_.matrix(sums_type(), received.x.rows * stages_.groups_per_row(), tokens.cols);
  RowsForExperts x{};
  if (saved != nullptr) x.x = keep_received(received, *saved);
  if (experts.num_local() > 0) {
    const RowAssignments work{.expert = received.expert, .weight = received.weight};
    experts.make_plan(work, tokens.rows, execution);
    RawMatrix preactivation{};
    if (saved != nullptr && saved->recompute == Recompute::kNone) {
      preactivation = saved->preactivation =
          saved->room(SavedMemory::kPreactivation, compute, experts.plan().row_token.shape[0],
                      experts.preactivation_cols());
    }
    const ReducedRows reduced{.sums = sums, .each_group = stages_.each_group()};
    if (saved == nullptr) {
      x = rows_of(received, experts.takes_fp8(work, tokens.rows, received.x, reduced, execution));
    }
    experts.reduce(x, reduced, execution, preactivation);
  }
  exchange_->combine(sums, input.around, out, execution);
  const PlanView& view = experts.plan();
  report(view.token_begin.data + view.num_tokens(), received);
}

void ExchangeLayer::report(const std::int32_t* used, const DeviceReceived& received) {
  stages_.report(used, received.counts, num_ranks_ * num_ranks_);
}

}  // namespace switchyard

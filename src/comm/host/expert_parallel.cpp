// Dispatch and combine across ranks: checks and order of the steps; the steps themselves are in
// expert_parallel_state.cpp.
#include "switchyard/dispatch.hpp"

#include "comm/expert_parallel_check.hpp"
#include "comm/host/expert_parallel_state.hpp"
#include "comm/ranks/collectively.hpp"
#include "core/check.hpp"

namespace switchyard {
namespace {

ExpertParallelConfig checked(Communicator& communicator, const ExpertParallelConfig& config) {
  require_same_config(communicator, config);  // first: then all ranks refuse a bad value together
  check_config(config, communicator.size());
  return config;
}

}  // namespace

ExpertParallel::ExpertParallel(Communicator& communicator, const ExpertParallelConfig& config)
    : state_(std::make_unique<State>(communicator, checked(communicator, config))) {}
ExpertParallel::~ExpertParallel() = default;
ExpertParallel::ExpertParallel(ExpertParallel&&) noexcept = default;
ExpertParallel& ExpertParallel::operator=(ExpertParallel&&) noexcept = default;

Received ExpertParallel::dispatch(const DispatchArgs& args) {
  State& state = *state_;
  const OneCaller::Call call(state.caller, "ExpertParallel::dispatch");
  check_dispatch(args, state.config);
  return collectively(state.exchange.communicator(), [&] {
    state.start(args);
    state.exchange_counts();
    state.send_rows(args);
    Received received = state.receive_rows(args);
    received.number = state.dispatches;
    state.report_dispatch();
    return received;
  });
}

void ExpertParallel::combine(const ReturnArgs& args) {
  State& state = *state_;
  const OneCaller::Call call(state.caller, "ExpertParallel::combine");
  const ExchangeLayout& layout = state.exchange.layout();
  require(state.results_pending && state.recoveries == state.exchange.communicator().recoveries(),
          "combine without a dispatch to return the rows of");
  require(args.of == 0 || args.of == state.dispatches,
          "partials are of dispatch {}, the last is {}", args.of, state.dispatches);
  const std::int64_t rows =
      state.source_begin[ExchangeLayout::buffer_of(state.epoch)].back() * state.groups_per_row;
  const DType type = layout.combine_wire == DType::kF8E4M3 ? DType::kF32 : layout.combine_wire;
  require(args.partials.rows == rows && (rows == 0 || args.partials.cols == layout.hidden),
          "partials is [{}, {}], want [{}, {}]", args.partials.rows, args.partials.cols, rows,
          layout.hidden);
  require(rows == 0 || args.partials.dtype == type, "partials is {}, want {}",
          to_string(args.partials.dtype), to_string(type));
  require(args.out.rows == state.num_tokens &&
              (state.num_tokens == 0 || args.out.cols == layout.hidden),
          "out is [{}, {}], want [{}, {}]", args.out.rows, args.out.cols, state.num_tokens,
          layout.hidden);
  ConstRawMatrix partials;
  collectively(state.exchange.communicator(), [&] {
    const std::vector<std::int64_t> sent = state.send_results(args);
    state.exchange.publish("results", state.epoch, sent, layout.returned(state.rank),
                           layout.results_signal(state.rank));
    partials = state.receive_results(args);
    state.report_results();
  });
  state.results_pending = false;
  if (state.num_tokens == 0) return;
  finish({.partials = partials,
          .partial_row = {state.partial_row.data(), {state.num_tokens, state.num_ranks}},
          .groups_per_row = state.groups_per_row,
          .shared = args.shared,
          .out = args.out,
          .execution = args.execution});
}

Subtree ExpertParallel::subtree() const { return state_->subtree; }

const Traffic& ExpertParallel::traffic() const { return state_->traffic; }

}  // namespace switchyard

// What the library's own layer and interfaces ask of an exchange between GPUs.
#include "comm/device/device_exchange.hpp"

#include "comm/device/expert_parallel_state.hpp"

namespace switchyard {

DeviceExchange::DeviceExchange(Communicator& communicator, const ExpertParallelConfig& config,
                               const DeviceExchangeOptions& options,
                               const DeviceExchangeExtent& extent)
    : DeviceExpertParallel(State::make(communicator, config, options, extent)) {}

DeviceReceived DeviceExchange::dispatch(const DispatchArgs& args, const DeviceExpertLists& lists,
                                        const std::int64_t* counts) {
  return state_->dispatch(args, lists, counts);
}

void DeviceExchange::combine(const ReturnArgs& args, Vector<const std::int32_t> partial_row) {
  state_->combine_partials(args, partial_row);
}

void DeviceExchange::combine_rows(const ReturnArgs& args, const DeviceExpertLists& lists) {
  state_->combine_rows(args, lists);
}

bool DeviceExchange::makes_lists() const { return state_->makes_lists(); }

RawMatrix DeviceExchange::place_of_partials() const {
  const ExchangeLayout& layout = state_->params.layout;
  if (!state_->can_pull()) return {};
  return {state_->place_of_partials(), layout.combine_wire,
          layout.max_rows << state_->params.group_bits, layout.hidden};
}

Matrix<float> DeviceExchange::place_of_weights() const {
  const DeviceExchangeParams& params = state_->params;
  std::byte* const own = params.window[params.rank];
  return {reinterpret_cast<float*>(own + params.layout.weights(0, 0)),
          {params.layout.max_rows, params.layout.top_k}};
}

void DeviceExchange::bring_weights_home(const WeightGradientsArgs& args) {
  state_->bring_weights_home(args);
}

Vector<float> DeviceExchange::place_of_summed() const {
  const DeviceExchangeParams& params = state_->params;
  std::byte* const own = params.window[params.rank];
  return {reinterpret_cast<float*>(own + params.layout.summed()), {params.layout.most_summed}};
}

void DeviceExchange::sum_over_ranks(std::int64_t count, const Execution& execution) {
  state_->sum_over_ranks(count, execution);
}

DeviceReadiness DeviceExchange::readiness() const {
  const DeviceExchangeParams& params = state_->params;
  const std::byte* const own = params.window[params.rank];
  return {.ready = reinterpret_cast<const std::uint64_t*>(own + params.layout.rows_flag(0, 0)),
          .chunks = params.chunks,
          .chunks_stride = ExchangeLayout::kRowChunks,
          .tokens_per_chunk = (params.max_tokens + params.chunks - 1) / params.chunks};
}

}  // namespace switchyard

// What the library's own layer and interfaces ask of an exchange between GPUs.
#include "comm/device/device_exchange.hpp"

#include "comm/device/expert_parallel_state.hpp"

namespace switchyard {

DeviceExchange::DeviceExchange(Communicator& communicator, const ExpertParallelConfig& config,
                               const DeviceExchangeOptions& options, int copies)
    : DeviceExpertParallel(State::make(communicator, config, options, copies)) {}

DeviceReceived DeviceExchange::dispatch(const DispatchArgs& args, const DeviceExpertLists& lists) {
  return state_->dispatch(args, lists);
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

DeviceReadiness DeviceExchange::readiness() const {
  const DeviceExchangeParams& params = state_->params;
  const std::byte* const own = params.window[params.rank];
  return {.ready = reinterpret_cast<const std::uint64_t*>(own + params.layout.rows_flag(0, 0)),
          .chunks = params.chunks,
          .chunks_stride = ExchangeLayout::kRowChunks,
          .tokens_per_chunk = (params.max_tokens + params.chunks - 1) / params.chunks};
}

}  // namespace switchyard

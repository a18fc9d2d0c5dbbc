// The host's side of the fixed-size exchange between GPUs: its memory has the layout of the other
// exchange, of which it uses the rows and the flags.
#include "bench/variants/device_fixed_size.hpp"

#include <algorithm>
#include <optional>

#include "bench/variants/device_fixed_size_kernel.hpp"
#include "comm/device/setup.hpp"
#include "comm/device/windows/windows.hpp"
#include "comm/ranks/agreement.hpp"
#include "core/check.hpp"
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/device_buffer.hpp"
#include "core/shape_check.hpp"

namespace switchyard {
namespace {

DeviceSharing checked(Communicator& communicator, const FixedSizeRouting& routing,
                      std::int64_t hidden, DType dtype, const DeviceExchangeOptions& options) {
  const DeviceSharing sharing = device_sharing(communicator, options.device);
  const int ctas = ctas_of(options, sharing);
  const AgreedValue values[] = {{"hidden", hidden},
                                {"dtype", static_cast<std::int64_t>(dtype)},
                                {"rows_per_pair", routing.rows_per_pair},
                                {"ctas", ctas}};
  require_agreement(communicator, values);
  require(is_float(dtype), "dtype={}, want f32, bf16 or f16", to_string(dtype));
  require(ctas >= 1 && ctas <= 128, "ctas={}, want 1 to 128", ctas);
  if (communicator.size() > kMaxDeviceRanks || hidden % 8 != 0 ||
      sharing.here * ctas > num_multiprocessors()) {
    fail(ErrorCode::kUnsupported,
         "the fixed-size exchange between GPUs: {} ranks (at most {}), hidden={} (a multiple of "
         "8), {} blocks of {} ranks on {} multiprocessors",
         communicator.size(), kMaxDeviceRanks, hidden, ctas, sharing.here, num_multiprocessors());
  }
  return sharing;
}

}  // namespace

struct DeviceFixedSize::State {
  State(Communicator& comm, const FixedSizeRouting& routing, std::int64_t hidden, DType dtype,
        const DeviceExchangeOptions& options, const DeviceSharing& sharing)
      : communicator(comm), ctas(ctas_of(options, sharing)) {
    DeviceExchangeParams& p = params.exchange;
    p.layout = {.num_ranks = comm.size(),
                .top_k = 1,
                .hidden = hidden,
                .max_rows = comm.size() * routing.rows_per_pair,
                .max_results = 0,
                .dispatch_wire = dtype,
                .combine_wire = dtype};
    p.places = ExchangePlaces(p.layout);
    windows.emplace(comm, static_cast<std::size_t>(p.layout.bytes_with_flags()), options.engine);
    for (int rank = 0; rank < comm.size(); ++rank) p.window[rank] = windows->part(rank);
    p.state = reinterpret_cast<DeviceExchangeState*>(state.reserve(sizeof(DeviceExchangeState)));
    p.failure = &*failure;
    p.timeout_ns = static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(options.timeout).count());
    p.rank = comm.rank();
    const auto count = std::ssize(routing.token);
    params.token = token.vector<std::int32_t>(std::max<std::int64_t>(1, count)).data;
    SWITCHYARD_CUDA(cudaMemcpy(token.data(), routing.token.data(),
                               static_cast<std::size_t>(4 * count), cudaMemcpyHostToDevice));
    std::copy(routing.begin.begin(), routing.begin.end(), params.begin);
    params.rows_per_pair = routing.rows_per_pair;
    load_fixed_size_kernel();
    comm.barrier("fixed-size exchange");
  }
  ~State() { windows->end(communicator.timeout()); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  Communicator& communicator;
  const int ctas;
  FixedSizeParams params{};
  DeviceBuffer state, token;
  PinnedValue<DeviceFailure> failure;
  std::optional<DeviceWindows> windows;
};

DeviceFixedSize::DeviceFixedSize(Communicator& communicator, const FixedSizeRouting& routing,
                                 std::int64_t hidden, DType dtype,
                                 const DeviceExchangeOptions& options) {
  SWITCHYARD_CUDA(cudaSetDevice(options.device));
  const DeviceSharing sharing = checked(communicator, routing, hidden, dtype, options);
  state_ = std::make_unique<State>(communicator, routing, hidden, dtype, options, sharing);
}
DeviceFixedSize::~DeviceFixedSize() = default;

void DeviceFixedSize::exchange(ConstRawMatrix x, void* stream) {
  const ExchangeLayout& layout = state_->params.exchange.layout;
  require(x.cols == layout.hidden && x.dtype == layout.dispatch_wire,
          "x is [{}, {}] {}, want [T, {}] {}", x.rows, x.cols, to_string(x.dtype), layout.hidden,
          to_string(layout.dispatch_wire));
  require(is_aligned_16(x.data), "x is not aligned to 16 bytes");
  FixedSizeParams params = state_->params;
  params.x = x.data;
  launch_fixed_size(params, state_->ctas, stream);
}

ConstRawMatrix DeviceFixedSize::received() const {
  SWITCHYARD_CUDA(cudaDeviceSynchronize());
  const DeviceExchangeParams& p = state_->params.exchange;
  std::uint64_t epoch = 0;
  SWITCHYARD_CUDA(cudaMemcpy(&epoch, &p.state->dispatches, sizeof(epoch), cudaMemcpyDeviceToHost));
  return {p.window[p.rank] + p.layout.row(p.layout.buffer_in_turn(epoch), 0),
          p.layout.dispatch_wire, p.layout.max_rows, p.layout.hidden};
}

void DeviceFixedSize::check() const {
  state_->windows->check();
  const volatile DeviceFailure& failure = *state_->failure;
  if (failure.set == 0) return;
  fail(ErrorCode::kTimeout, "rows: waiting for rank {}, expected {}, seen {}{}",
       std::int32_t{failure.rank}, std::uint64_t{failure.expected}, std::uint64_t{failure.seen},
       failure.set == 2 ? "; left because another rank gave up" : "");
}

std::int64_t DeviceFixedSize::wire_bytes() const {
  const ExchangeLayout& layout = state_->params.exchange.layout;
  return (layout.num_ranks - 1) * state_->params.rows_per_pair * layout.row_bytes();
}

}  // namespace switchyard

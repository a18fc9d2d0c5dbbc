// Sends and receives between pairs in place of stores into each other's memory: kernels pack before
// them and take over after them, all on one stream. Bound by NCCL, and by moving all rows once
// more.
#include "comm/nccl/pairs/transfer.hpp"

#include <cuda_runtime_api.h>

#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "comm/nccl/pairs/kernels.hpp"
#include "comm/nccl/pairs/pairs.hpp"
#include "comm/nccl/pairs/watch.hpp"
#include "core/check.hpp"
#include "core/gpu/cuda_check.hpp"
#include "core/gpu/device_buffer.hpp"
#include "core/gpu/device_wide.hpp"

namespace switchyard {
namespace {

using std::chrono::milliseconds;

/// The counts of all ranks: R messages of R + 2 words.
using Messages = std::array<std::uint64_t, std::size_t{kMaxDeviceRanks} * (kMaxDeviceRanks + 2)>;

cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

ExchangeLayout with_one_buffer(ExchangeLayout layout) {
  layout.num_buffers = 1;
  return layout;
}

}  // namespace

struct NcclTransfer::State {
  State(Communicator& comm, const NcclTransferArgs& transfer)
      : communicator(comm),
        args(transfer),
        timeout(std::chrono::duration_cast<milliseconds>(
            std::chrono::nanoseconds(transfer.timeout_ns))),
        counts(static_cast<std::size_t>(layout.num_ranks * layout.num_ranks), args.max_tokens) {
    SWITCHYARD_CUDA(cudaGetDevice(&device));
    window.reserve(layout.bytes_with_flags());
    staging.layout = with_one_buffer(layout);
    staging.memory = packed.reserve(staging.layout.bytes());
    staging.progress = &*progress;
    load_pairs_kernels(args.dtype, layout.dispatch_wire, layout.combine_wire,
                       layout.num_ranks * args.groups);
    pairs.emplace(comm);
    watch.emplace(&*progress, timeout, [this] { pairs->abort(); });
    connect();
  }
  ~State() {
    int before = device;
    cudaGetDevice(&before);
    cudaSetDevice(device);
    (void)wait_for_device();  // what does not end in time is given up
    watch.reset();
    pairs.reset();
    cudaSetDevice(before);
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  /// Rows from s to d that are moved.
  [[nodiscard]] std::int64_t rows(int source, int to) const {
    return counts[static_cast<std::size_t>(std::int64_t{source} * layout.num_ranks + to)];
  }
  /// Where rows of `source` begin here.
  [[nodiscard]] std::int64_t place(int source) const {
    if (args.padded) return source * args.max_tokens;
    std::int64_t begin = 0;
    for (int s = 0; s < source; ++s) begin += rows(s, communicator.rank());
    return begin;
  }

  /// Calls `body(to, from)` for this rank's pairs, itself at first.
  template <typename Body>
  void for_pairs(const Body& body) const {
    for (int i = 0; i < layout.num_ranks; ++i) {
      body((communicator.rank() + i) % layout.num_ranks,
           (communicator.rank() + layout.num_ranks - i) % layout.num_ranks);
    }
  }
  void add(int to, std::int64_t sent_from, std::int64_t sent, int from, std::int64_t received_at,
           std::int64_t received) {
    sends.push_back({to, staging.memory + sent_from, static_cast<std::size_t>(sent)});
    receives.push_back({from, window.data() + received_at, static_cast<std::size_t>(received)});
  }
  void run(void* stream) {
    std::vector<RankBytes> out;
    std::vector<RankBytes> in;
    for (std::size_t i = 0; i < sends.size(); ++i) {
      if (sends[i].rank != communicator.rank()) {
        out.push_back(sends[i]);
        in.push_back(receives[i]);
      } else if (sends[i].bytes > 0) {
        SWITCHYARD_CUDA(cudaMemcpyAsync(receives[i].data, sends[i].data, sends[i].bytes,
                                        cudaMemcpyDeviceToDevice, stream_of(stream)));
      }
    }
    sends.clear();
    receives.clear();
    const auto lock = watch->calls();
    if (watch->expired() < 0) pairs->exchange(out, in, stream);
  }

  /// The same message to all.
  void add_counts(std::int64_t buffer) {
    for_pairs([&](int to, int from) {
      add(to, staging.layout.counts(0, communicator.rank()), layout.message_bytes(), from,
          layout.counts(buffer, from), layout.message_bytes());
    });
  }

  void add_rows(std::int64_t buffer) {
    const ExchangeLayout& l = layout;
    const ExchangeLayout& s = staging.layout;
    const std::int64_t ids = std::int64_t{l.top_k} * 4;
    const std::int64_t scales = l.row_scales() * 4;
    for_pairs([&](int to, int from) {
      const std::int64_t out = to * args.max_tokens;
      const std::int64_t in = place(from);
      const std::int64_t sent = rows(communicator.rank(), to);
      const std::int64_t received = rows(from, communicator.rank());
      add(to, s.row(0, out), sent * l.row_bytes(), from, l.row(buffer, in),
          received * l.row_bytes());
      add(to, s.scales(0, out), sent * scales, from, l.scales(buffer, in), received * scales);
      add(to, s.ids(0, out), sent * ids, from, l.ids(buffer, in), received * ids);
      add(to, s.weights(0, out), sent * ids, from, l.weights(buffer, in), received * ids);
    });
  }

  /// Results of the rows that came from `to`, and of those that went to `from`.
  void add_results() {
    const ExchangeLayout& l = layout;
    const ExchangeLayout& s = staging.layout;
    const std::int64_t most = l.max_results / l.num_ranks;
    const std::int64_t scales = l.result_scales() * 4;
    for_pairs([&](int to, int from) {
      const std::int64_t sent = rows(to, communicator.rank()) * args.groups;
      const std::int64_t received = rows(communicator.rank(), from) * args.groups;
      add(to, s.returned(communicator.rank()), l.message_bytes(), from, l.returned(from),
          l.message_bytes());
      add(to, s.result(to * most), sent * l.result_bytes(), from, l.result(from * most),
          received * l.result_bytes());
      add(to, s.result_scale(to * most), sent * scales, from, l.result_scale(from * most),
          received * scales);
    });
  }

  /// Collective: pairs are connected when they are first used.
  void connect() {
    cudaStream_t stream = nullptr;
    SWITCHYARD_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    // No message of an earlier life is taken for one of this.
    SWITCHYARD_CUDA(cudaMemsetAsync(
        staging.memory + staging.layout.counts(0, 0), 0,
        static_cast<std::size_t>(layout.num_ranks * layout.message_bytes()), stream));
    add_counts(0);
    run(stream);
    progress->packed[0] = 1;  // so that it is looked at
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
    *progress = {};
    SWITCHYARD_CUDA(cudaStreamDestroy(stream));
    check();
  }

  void read_counts(std::int64_t buffer, std::uint64_t epoch, void* stream) {
    const auto bytes = static_cast<std::size_t>(layout.num_ranks * layout.message_bytes());
    SWITCHYARD_CUDA(cudaMemcpyAsync(messages->data(), window.data() + layout.counts(buffer, 0),
                                    bytes, cudaMemcpyDeviceToHost, stream_of(stream)));
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream_of(stream)));  // the watch ends it in time
    check();
    for (int source = 0; source < layout.num_ranks; ++source) {
      const std::uint64_t* message = messages->data() + source * layout.message_words();
      bool right = message[0] == epoch && message[layout.num_ranks + 1] == ~epoch;
      for (int to = 0; to < layout.num_ranks; ++to) {
        const std::uint64_t sent = message[to + 1];
        right = right && sent <= static_cast<std::uint64_t>(args.max_tokens);
        counts[static_cast<std::size_t>(std::int64_t{source} * layout.num_ranks + to)] =
            right ? static_cast<std::int64_t>(sent) : 0;
      }
      if (!right) {
        fail(ErrorCode::kTimeout, "counts: of rank {}, expected epoch {}, seen {}", source, epoch,
             message[0]);
      }
    }
  }

  void check() const {
    if (const int direction = watch->expired(); direction >= 0) {
      fail(ErrorCode::kTimeout,
           "{}: ncclSend and ncclRecv wait for another rank, not done after {} ms",
           direction == 0 ? "rows" : "results", timeout.count());
    }
    const auto lock = watch->calls();
    pairs->check();
  }

  Communicator& communicator;
  const NcclTransferArgs args;
  const ExchangeLayout layout = args.layout;
  const milliseconds timeout;
  int device = 0;
  DeviceBuffer window;
  DeviceBuffer packed;
  Staging staging;
  PinnedValue<TransferProgress> progress;
  PinnedValue<Messages> messages;    // as read on the host
  std::vector<std::int64_t> counts;  // [R*R] of the last dispatch
  std::vector<RankBytes> sends;
  std::vector<RankBytes> receives;
  std::optional<NcclPairs> pairs;
  std::optional<NcclWatch> watch;
};

NcclTransfer::NcclTransfer(Communicator& communicator, const NcclTransferArgs& args)
    : state_(std::make_unique<State>(communicator, args)) {}
NcclTransfer::~NcclTransfer() = default;

std::byte* NcclTransfer::window() const { return state_->window.data(); }

bool NcclTransfer::padded() const { return state_->args.padded; }

void NcclTransfer::dispatch(const DeviceDispatchParams& params, std::uint64_t epoch, void* stream) {
  State& state = *state_;
  const std::int64_t buffer = state.layout.buffer_in_turn(epoch);
  if (!state.args.padded) {
    cudaStreamCaptureStatus captured = cudaStreamCaptureStatusNone;
    SWITCHYARD_CUDA(cudaStreamIsCapturing(stream_of(stream), &captured));
    if (captured != cudaStreamCaptureStatusNone) {
      fail(ErrorCode::kUnsupported,
           "engine nccl-pairs reads counts on the host in throughput mode: for a graph take low "
           "latency");
    }
  }
  launch_pairs_slots(params, state.staging, stream);
  state.add_counts(buffer);
  if (!state.args.padded) {
    state.run(stream);
    state.read_counts(buffer, epoch, stream);
  }
  launch_pairs_rows(params, state.staging, state.args.dtype, state.args.ctas, stream);
  state.add_rows(buffer);
  state.run(stream);
  launch_pairs_received(params.exchange, state.staging, state.args.ctas, stream);
}

void NcclTransfer::combine(const DeviceCombineParams& params, void* stream) {
  State& state = *state_;
  launch_pairs_results(params, state.staging, state.args.ctas, stream);
  state.add_results();
  state.run(stream);
  launch_pairs_sums(params, state.staging, state.args.ctas, stream);
}

void NcclTransfer::check() const { state_->check(); }

void NcclTransfer::renew() {
  State& state = *state_;
  {
    const auto lock = state.watch->calls();
    state.pairs->keep();
    state.pairs.reset();
    state.pairs.emplace(state.communicator);
    *state.progress = {};
    state.watch->renew();
  }
  state.connect();
}

}  // namespace switchyard

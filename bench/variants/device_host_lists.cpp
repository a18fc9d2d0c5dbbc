// Ids come to the host, lists go back. Rows lie in each GPU's window in the order of their sources;
// the host's barrier says that all copies have ended. Bound by the host, then by the copies.
#include "bench/variants/device_host_lists.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "bench/variants/byte_exchange.hpp"
#include "bench/variants/device_host_lists_kernels.hpp"
#include "comm/device/windows/windows.hpp"
#include "comm/ranks/collectively.hpp"
#include "core/check.hpp"
#include "core/gpu/cuda_check.hpp"
#include "core/gpu/device_buffer.hpp"
#include "switchyard/combine.hpp"

namespace switchyard {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

/// Global expert, source rank, source token, source k, padding.
using Meta = std::array<std::int32_t, 5>;

template <typename T>
std::vector<std::byte> bytes_of(const T* values, std::size_t count) {
  const auto* const begin = reinterpret_cast<const std::byte*>(values);
  return {begin, begin + count * sizeof(T)};
}

template <typename T>
std::vector<T> joined(const std::vector<std::vector<std::byte>>& parts) {
  std::vector<T> all;
  for (const auto& part : parts) {
    const std::size_t before = all.size();
    all.resize(before + part.size() / sizeof(T));
    if (!part.empty()) std::memcpy(&all[before], part.data(), part.size());
  }
  return all;
}

}  // namespace

struct DeviceHostLists::State {
  State(Communicator& comm, const TransportConfig& settings, HostLists kind,
        const DeviceExchangeOptions& options)
      : communicator(comm),
        config(settings),
        lists(kind),
        ranks(comm.size()),
        row_bytes(settings.hidden * size_of(settings.dtype)),
        max_sent(settings.max_tokens * settings.top_k),
        max_rows(ranks * max_sent),
        counts_exchange(comm, at(8 * ranks * ranks)),
        meta_exchange(comm, at(max_rows) * sizeof(Meta)) {
    require(config.hidden % 8 == 0, "hidden={} is no multiple of 8", config.hidden);
    windows = std::make_unique<DeviceWindows>(comm, at((max_rows + max_sent) * row_bytes),
                                              options.engine);
    packed.reserve(max_rows * row_bytes);
    buckets.reserve(max_rows * row_bytes);
    (void)index.vector<std::int32_t>(max_rows);
    comm.barrier("host lists");
  }
  ~State() { windows->end(communicator.timeout()); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  [[nodiscard]] std::int64_t count(std::int64_t source, std::int64_t to) const {
    return counts[at(source * ranks + to)];
  }
  [[nodiscard]] int owner(std::int32_t expert) const {
    int rank = 0;
    while (first_expert_of(config.num_experts, ranks, rank + 1) <= expert) ++rank;
    return rank;
  }

  /// The list of each destination.
  [[nodiscard]] std::vector<std::vector<Meta>> list_rows(const TransportInput& input,
                                                         void* stream) {
    std::vector<std::int32_t> ids(at(input.expert.size()));
    SWITCHYARD_CUDA(cudaMemcpyAsync(ids.data(), input.expert.data, 4 * ids.size(),
                                    cudaMemcpyDeviceToHost, stream_of(stream)));
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream_of(stream)));
    std::vector<std::vector<Meta>> to(at(ranks));
    for (std::int32_t i = 0; i < std::ssize(ids); ++i) {
      const std::int32_t expert = ids[at(i)];
      const std::int32_t token = i / config.top_k;
      require(expert >= -1 && expert < config.num_experts, "token {} has expert {}, want -1 to {}",
              token, expert, config.num_experts - 1);
      if (expert < 0) continue;
      to[at(owner(expert))].push_back({expert, communicator.rank(), token, i % config.top_k, 0});
    }
    if (lists == HostLists::kSorted) {
      for (auto& list : to) std::ranges::stable_sort(list, {}, [](const Meta& m) { return m[0]; });
    }
    return to;
  }

  /// Row i of `target` is row from[i] of `source`.
  void copy_rows(const std::byte* source, const std::vector<std::int32_t>& from, std::byte* target,
                 void* stream) {
    if (lists == HostLists::kReference) {
      for (std::int64_t i = 0; i < std::ssize(from); ++i) {
        SWITCHYARD_CUDA(cudaMemcpyAsync(target + i * row_bytes, source + from[at(i)] * row_bytes,
                                        at(row_bytes), cudaMemcpyDeviceToDevice,
                                        stream_of(stream)));
      }
      return;
    }
    gather_rows(source, upload(from, stream), target, std::ssize(from), row_bytes,
                stream_of(stream));
  }
  const std::int32_t* upload(const std::vector<std::int32_t>& list, void* stream) {
    auto* const memory = reinterpret_cast<std::int32_t*>(index.data());
    SWITCHYARD_CUDA(cudaMemcpyAsync(memory, list.data(), 4 * list.size(), cudaMemcpyHostToDevice,
                                    stream_of(stream)));
    return memory;
  }

  std::vector<Meta> exchange_meta(const std::vector<std::vector<Meta>>& to) {
    std::vector<std::vector<std::byte>> send;
    for (const auto& list : to) send.push_back(bytes_of(list.data(), list.size()));
    return joined<Meta>(meta_exchange.all_to_all(send));
  }

  /// Rows that lie in `packed` in the order of their destinations.
  template <typename Place, typename Count>
  void send_rows(const Place& place, const Count& rows_to, void* stream) {
    std::int64_t first = 0;
    for (int to = 0; to < ranks; ++to) {
      const std::int64_t rows = rows_to(to);
      SWITCHYARD_CUDA(cudaMemcpyAsync(windows->part(to) + place(to) * row_bytes,
                                      packed.data() + first * row_bytes, at(rows * row_bytes),
                                      cudaMemcpyDefault, stream_of(stream)));
      first += rows;
    }
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream_of(stream)));
    communicator.barrier("rows of the lists");
  }

  Communicator& communicator;
  const TransportConfig config;
  const HostLists lists;
  const std::int64_t ranks;
  const std::int64_t row_bytes;
  const std::int64_t max_sent;
  const std::int64_t max_rows;
  ByteExchange counts_exchange;
  ByteExchange meta_exchange;
  std::unique_ptr<DeviceWindows> windows;  // [rows of dispatch | results]
  DeviceBuffer packed, buckets, index;
  const float* weight = nullptr;
  std::int64_t num_tokens = 0;
  std::vector<std::int64_t> counts;  // [R, R] from s to d
  std::vector<Meta> sent;            // in the order of destinations
  std::vector<Meta> received;        // in the order of sources
  std::vector<std::int32_t> order;   // of the rows of a dispatch: indices into received
  std::int64_t there = 0;
  std::int64_t back = 0;
};

DeviceHostLists::DeviceHostLists(Communicator& communicator, const TransportConfig& config,
                                 HostLists lists, const DeviceExchangeOptions& options) {
  SWITCHYARD_CUDA(cudaSetDevice(options.device));
  state_ = std::make_unique<State>(communicator, config, lists, options);
}
DeviceHostLists::~DeviceHostLists() = default;

ConstRawMatrix DeviceHostLists::dispatch(const TransportInput& input, void* stream) {
  State& s = *state_;
  return collectively(s.communicator, [&]() -> ConstRawMatrix {
    s.weight = input.weight.data;
    s.num_tokens = input.x.rows;
    const std::vector<std::vector<Meta>> to = s.list_rows(input, stream);
    std::vector<std::int64_t> own;
    s.sent.clear();
    std::vector<std::int32_t> tokens;
    for (const auto& list : to) {
      own.push_back(std::ssize(list));
      s.sent.insert(s.sent.end(), list.begin(), list.end());
      for (const Meta& meta : list) tokens.push_back(meta[2]);
    }
    s.copy_rows(input.x.data, tokens, s.packed.data(), stream);
    s.counts = joined<std::int64_t>(s.counts_exchange.all_to_all(
        std::vector<std::vector<std::byte>>(at(s.ranks), bytes_of(own.data(), own.size()))));
    s.received = s.exchange_meta(to);
    const int self = s.communicator.rank();
    const auto place = [&](int target) {
      std::int64_t rows = 0;
      for (int source = 0; source < self; ++source) rows += s.count(source, target);
      return rows;
    };
    s.send_rows(
        place, [&](int target) { return s.count(self, target); }, stream);
    s.there = (std::ssize(s.sent) - s.count(self, self)) *
              (s.row_bytes + static_cast<std::int64_t>(sizeof(Meta)));
    s.order.resize(s.received.size());
    for (std::size_t i = 0; i < s.order.size(); ++i) s.order[i] = static_cast<std::int32_t>(i);
    // Sorted lists are sorted again: of each source they are, over sources they are not. Of one
    // source and expert rows stay in the order token, k.
    std::ranges::stable_sort(s.order, {}, [&](std::int32_t i) { return s.received[at(i)][0]; });
    s.copy_rows(s.windows->part(self), s.order, s.buckets.data(), stream);
    return {s.buckets.data(), s.config.dtype, std::ssize(s.order), s.config.hidden};
  });
}

void DeviceHostLists::combine(ConstRawMatrix rows, RawMatrix out, void* stream) {
  State& s = *state_;
  collectively(s.communicator, [&] {
    require(rows.rows >= std::ssize(s.order) && rows.dtype == s.config.dtype &&
                out.dtype == s.config.dtype && out.rows == s.num_tokens,
            "rows are [{}, {}] {}, want at least {} of {}", rows.rows, rows.cols,
            to_string(rows.dtype), s.order.size(), to_string(s.config.dtype));
    const int self = s.communicator.rank();
    // Back in the order in which they came (sorted), or as the buckets have them (reference).
    std::vector<std::int32_t> from(s.order.size());
    std::vector<std::vector<Meta>> meta(at(s.ranks));
    if (s.lists == HostLists::kSorted) {
      for (std::size_t i = 0; i < s.order.size(); ++i) {
        from[at(s.order[i])] = static_cast<std::int32_t>(i);
      }
    } else {
      std::vector<std::vector<std::int32_t>> to(at(s.ranks));
      for (std::size_t i = 0; i < s.order.size(); ++i) {
        const Meta& numbers = s.received[at(s.order[i])];
        to[at(numbers[1])].push_back(static_cast<std::int32_t>(i));
        meta[at(numbers[1])].push_back(numbers);
      }
      from.clear();
      for (const auto& list : to) from.insert(from.end(), list.begin(), list.end());
    }
    s.copy_rows(rows.data, from, s.packed.data(), stream);
    const bool with_meta = s.lists == HostLists::kReference;
    const std::vector<Meta> home = with_meta ? s.exchange_meta(meta) : s.sent;
    const auto place = [&](int target) {
      std::int64_t before = s.max_rows;
      for (int owner = 0; owner < self; ++owner) before += s.count(target, owner);
      return before;
    };
    s.send_rows(
        place, [&](int target) { return s.count(target, self); }, stream);
    s.back = (std::ssize(s.order) - s.count(self, self)) *
             (s.row_bytes + static_cast<std::int64_t>(with_meta ? sizeof(Meta) : 0));
    std::vector<std::int32_t> row_of(at(s.num_tokens * s.config.top_k), -1);
    for (std::size_t i = 0; i < home.size(); ++i) {
      row_of[at(std::int64_t{home[i][2]} * s.config.top_k + home[i][3])] =
          static_cast<std::int32_t>(i);
    }
    sum_weighted_rows({.rows = s.windows->part(self) + s.max_rows * s.row_bytes,
                       .index = s.upload(row_of, stream),
                       .weight = s.weight,
                       .top_k = s.config.top_k,
                       .out = out},
                      stream_of(stream));
  });
}

std::int64_t DeviceHostLists::bytes_there() const { return state_->there; }
std::int64_t DeviceHostLists::bytes_back() const { return state_->back; }

}  // namespace switchyard

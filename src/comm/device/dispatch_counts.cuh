#pragma once

// How ranks tell each other how many rows they send: a message of every rank to every other, read
// by the blocks that need it; and what the next kernels are told.

#include "comm/device/exchange.cuh"

namespace switchyard {

struct ExchangeCounts {
  std::int64_t counts[kMaxDeviceRanks * kMaxDeviceRanks];  // rows from s to d
};

/// Warp w writes to one rank how many rows this one sends to each; lane d has those to rank d.
/// Returns that rank's window; null: the warp has none.
__device__ inline std::byte* write_counts(const DeviceExchangeParams& p, std::int32_t rows,
                                          std::uint64_t epoch) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int ranks = p.layout.num_ranks;
  if (warp >= ranks) return nullptr;
  std::byte* const to = p.window[(p.rank + warp) % ranks];
  auto* const message = reinterpret_cast<std::uint64_t*>(
      to + p.places.counts(p.layout.buffer_in_turn(epoch), p.rank));
  if (lane == 0) message[0] = epoch;
  if (lane < ranks) message[lane + 1] = static_cast<std::uint64_t>(rows);
  if (lane == ranks) message[ranks + 1] = ~epoch;
  return to;
}

/// All threads of a block agree.
struct WholeBlock {
  __device__ __forceinline__ bool operator()(bool holds) const {
    return __syncthreads_and(holds ? 1 : 0) != 0;
  }
};
/// The first kCountWarps warps of a block agree.
inline constexpr int kCountWarps = 4;
struct FirstWarps {
  __device__ __forceinline__ bool operator()(bool holds) const {
    std::uint32_t all;
    asm volatile(
        "{\n.reg .pred in, out;\nsetp.ne.u32 in, %1, 0;\n"
        "barrier.cta.red.and.pred out, 15, %2, in;\nselp.u32 %0, 1, 0, out;\n}"
        : "=r"(all)
        : "r"(holds ? 1U : 0U), "n"(kCountWarps * 32)
        : "memory");
    return all != 0;
  }
};

/// The threads that `agree` joins: the counts of all ranks, in shared memory, once the flags of all
/// have reached `target`. False: leave.
template <typename Agree>
__device__ bool read_counts(const DeviceExchangeParams& p, ExchangeCounts& shared,
                            std::uint64_t epoch, std::uint64_t target, Agree agree) {
  static_assert(kMaxDeviceRanks * (kMaxDeviceRanks + 2) <= kCountWarps * 32);
  const int ranks = p.layout.num_ranks;
  const auto thread = static_cast<int>(threadIdx.x);
  bool here = thread >= ranks ||
              wait_for(p, p.places.counts_flag(thread), target, DevicePhase::kCounts, thread);
  if (!agree(here)) return false;
  // One word a thread, all at once. A damaged message would become a wrong place: as good as none.
  const int from = thread / (kMaxDeviceRanks + 2);
  const int word = thread % (kMaxDeviceRanks + 2);
  if (from < ranks && word < ranks + 2) {
    const auto* message = reinterpret_cast<const std::uint64_t*>(
        p.window[p.rank] + p.places.counts(p.layout.buffer_in_turn(epoch), from));
    const std::uint64_t value = message[word];
    if (word == 0) {
      here = value == epoch;
    } else if (word == ranks + 1) {
      here = value == ~epoch;
    } else {
      here = value <= static_cast<std::uint64_t>(p.max_tokens);
      shared.counts[from * kMaxDeviceRanks + word - 1] = static_cast<std::int64_t>(value);
    }
    if (!here) give_up(p, 1, DevicePhase::kCounts, from, epoch, value);
  }
  return agree(here);
}

/// Rows of sources before `source` at `to`.
__device__ inline std::int64_t rows_before(const ExchangeCounts& shared, int source, int to) {
  std::int64_t rows = 0;
  for (int s = 0; s < source; ++s) rows += shared.counts[s * kMaxDeviceRanks + to];
  return rows;
}

/// Block 0, last: what the next kernels need to know of this dispatch.
__device__ inline void write_state(const DeviceExchangeParams& p, const ExchangeCounts& shared) {
  const int from = static_cast<int>(threadIdx.x);
  const int ranks = p.layout.num_ranks;
  if (from < ranks * ranks) {
    p.state->counts[from] = shared.counts[from / ranks * kMaxDeviceRanks + from % ranks];
  }
  if (from >= ranks) return;
  const std::int64_t limit = p.layout.max_rows;
  const std::int64_t begin = rows_before(shared, from, p.rank);
  const std::int64_t end = rows_before(shared, from + 1, p.rank);
  p.state->source_begin[from] = p.fixed_places != 0 ? from * p.max_tokens : min(begin, limit);
  p.state->source_rows[from] =
      p.fixed_places != 0 ? end - begin : min(end, limit) - min(begin, limit);
  if (from == ranks - 1) {
    p.state->num_rows = min(end, limit);
    p.state->dropped_rows = end - min(end, limit);
  }
}

}  // namespace switchyard

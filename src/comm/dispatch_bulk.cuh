#pragma once

// Rows of many tokens on their way to their experts' ranks, by bulk copies (Hopper). Each warp has
// a ring of three stages in shared memory: a piece of a row is copied in, encoded there where the
// wire has another type, and copied to each destination, while the next pieces come. Warps take
// pieces when they get to them: the warp that tells the destinations of a chunk waits for stores,
// and with pieces dealt out beforehand it would fall behind and be the one to wait for each chunk.
// Bound by the wire.

#include <algorithm>
#include <type_traits>

#include "comm/dispatch_counts.cuh"
#include "core/ptx.cuh"

namespace switchyard {

inline constexpr std::uint16_t kNoSlot = 0xffff;

/// What a block knows of the places of rows.
struct DispatchShared : ExchangeCounts {
  std::uint8_t owner[kMaxDeviceExperts];
  std::int32_t warp_rows[kExchangeWarps][kMaxDeviceRanks];
  std::int32_t rows_to[kMaxDeviceRanks];  // this rank's, before dropping
  std::int64_t base[kMaxDeviceRanks];     // first row of this rank at each destination
};

inline constexpr int kBulkStages = 3;
inline constexpr int kBulkBytes = 4096;  // of a stage, at most

/// Of the values of a piece, where an fp8 wire has them.
inline constexpr int kBulkScales = kBulkBytes / 2 / static_cast<int>(kScaleBlock);

/// Where this rank's rows begin at a destination, and how many have room there.
struct BulkDestination {
  std::byte *rows, *scales, *ids, *weights;
  std::int64_t room;
};

struct alignas(16) BulkShared {
  float scales[kExchangeWarps][kBulkStages][kBulkScales];
  BulkDestination to[kMaxDeviceRanks];
  std::uint64_t here[kExchangeWarps][kBulkStages];  // barriers: a piece has come
  std::int32_t taken;                               // pieces of the block's tokens
  std::int32_t done[ExchangeLayout::kRowChunks];    // pieces of a chunk that have arrived
};

/// What a Hopper block has for its places and rings (less what the driver keeps, rounded up).
inline constexpr std::int64_t kMostBulkShared =
    227 * 1024 - 2048 - static_cast<std::int64_t>(sizeof(DispatchShared) + sizeof(BulkShared));

/// Values of a piece; the last of a row may have fewer. Whole blocks that share a scale, and four
/// such where that lets a piece's scales be copied as its values are, 16 bytes at a time.
[[nodiscard]] __host__ __device__ constexpr int bulk_piece_values(std::int64_t hidden,
                                                                  int widest_bytes, DType wire) {
  const std::int64_t most = kBulkBytes / widest_bytes;
  const std::int64_t scales = scales_per_row(wire, hidden);
  const std::int64_t unit = scales == 0 ? 8 : (scales % 4 == 0 ? 4 * kScaleBlock : kScaleBlock);
  const std::int64_t pieces = (hidden + most - 1) / most;
  return static_cast<int>(((hidden + unit - 1) / unit + pieces - 1) / pieces * unit);
}
static_assert(bulk_piece_values(7168, 2, DType::kBF16) == 1792);
static_assert(bulk_piece_values(7168, 2, DType::kF8E4M3) == 2048);
static_assert(bulk_piece_values(2056, 2, DType::kF8E4M3) == 1152);  // 17 scales
static_assert(bulk_piece_values(8, 4, DType::kBF16) == 8);

[[nodiscard]] inline std::int64_t bulk_stage_bytes(std::int64_t hidden, DType dtype, DType wire) {
  const auto widest = static_cast<int>(std::max(size_of(dtype), size_of(wire)));
  return ExchangeLayout::align(std::int64_t{bulk_piece_values(hidden, widest, wire)} * widest);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

/// All threads, before a barrier of the block.
__device__ __forceinline__ void begin_bulk(BulkShared& bulk) {
  if (threadIdx.x < ExchangeLayout::kRowChunks) bulk.done[threadIdx.x] = 0;
  if (threadIdx.x == 0) bulk.taken = 0;
  if (threadIdx.x % 32 == 0) {
    for (std::uint64_t& barrier : bulk.here[threadIdx.x / 32]) {
      ptx::mbarrier_init(ptx::shared_address(&barrier), 1);
    }
    ptx::fence_mbarrier_init();
  }
}

/// Behind the masks of all tokens and the slots of the block's.
__device__ __forceinline__ std::byte* rings_after(std::uint32_t* masks,
                                                  const DeviceExchangeParams& p, unsigned blocks) {
  const std::int64_t of_block = (p.num_tokens + blocks - 1) / blocks;
  const std::int64_t places = (p.num_tokens + 3) / 4 * 4 + of_block * kMaxDeviceRanks * 2;
  return reinterpret_cast<std::byte*>(masks) + ExchangeLayout::align(places);
}

/// A warp's pieces of rows. `token` of an Item is of the block's: q for token b + q G.
template <typename In, typename Wire>
class BulkSender {
 public:
  static constexpr int kWidest =
      static_cast<int>(sizeof(In) > sizeof(Wire) ? sizeof(In) : sizeof(Wire));
  static constexpr int kSteps = kBulkBytes / kWidest / 256;

  __device__ __forceinline__ BulkSender(const DeviceDispatchParams& args,
                                        const DispatchShared& shared, BulkShared& bulk,
                                        const std::uint16_t* slots, std::byte* rings)
      : args_(args),
        p_(args.exchange),
        shared_(shared),
        bulk_(bulk),
        slots_(slots),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        hidden_(static_cast<int>(args.exchange.layout.hidden)),
        values_(bulk_piece_values(args.exchange.layout.hidden, kWidest,
                                  args.exchange.layout.dispatch_wire)),
        pieces_((hidden_ + values_ - 1) / values_),
        stage_bytes_(static_cast<int>(ExchangeLayout::align(values_ * kWidest))),
        ring_(rings + warp_ * kBulkStages * stage_bytes_),
        to_((p_.rank + lane_) % p_.layout.num_ranks) {}

  __device__ __forceinline__ void run() {
    if (warp_ < p_.chunks && pieces_until(warp_ + 1) == pieces_until(warp_)) tell(warp_);
    const int pieces = pieces_until(p_.chunks);
    int now = ask(0, pieces);
    int next = ask(1, pieces);
    int last = -1, before_last = -1;  // sent, not known to have arrived
    int chunk = 0;                    // of the piece that has arrived last
    int chunk_end = pieces_until(1);
    int arrived = 0;  // pieces of it that the block does not know of
    int stage = 0;
    std::uint32_t parity = 0;
    for (;;) {
      const bool more = now < pieces;
      int after = pieces;
      if (more) {
        send(now, stage, parity);
        // The stage of the piece before this one is free once its copies have read it.
        ptx::bulk_wait_read<1>();
        __syncwarp();
        after = ask(stage == 0 ? kBulkStages - 1 : stage - 1, pieces);
        if (++stage == kBulkStages) {
          stage = 0;
          parity ^= 1;
        }
      } else {
        ptx::bulk_wait<0>();
      }
      const bool end = !more && last < 0 && before_last < 0;
      if (end || before_last >= chunk_end) {
        ptx::bulk_wait<2>();  // all but the last two have arrived
        count(chunk, arrived);
        if (end) break;
        arrived = 0;
        while (before_last >= chunk_end) chunk_end = pieces_until(++chunk + 1);
      }
      if (before_last >= 0) ++arrived;
      before_last = last;
      last = more ? now : -1;
      now = next;
      next = after;
    }
  }

 private:
  /// Of choice `lane` of a token. No owner: it goes nowhere.
  struct Meta {
    std::int32_t id = -1;
    float weight = 0.0F;
    int owner = -1;
  };

  /// This block's pieces of the chunks before `chunk`.
  [[nodiscard]] __device__ __forceinline__ int pieces_until(int chunk) const {
    const auto chunk_tokens = static_cast<int>((p_.max_tokens + p_.chunks - 1) / p_.chunks);
    const int tokens = min(static_cast<int>(p_.num_tokens), chunk * chunk_tokens);
    return (tokens + static_cast<int>(gridDim.x - 1 - blockIdx.x)) / static_cast<int>(gridDim.x) *
           pieces_;
  }
  /// Of all of this rank's.
  [[nodiscard]] __device__ __forceinline__ int token_of(Item item) const {
    return static_cast<int>(blockIdx.x) + item.token * static_cast<int>(gridDim.x);
  }

  /// All lanes: the next piece starts on its way into a stage. Returns its number; beyond `pieces`
  /// there is none.
  __device__ __forceinline__ int ask(int stage, int pieces) {
    int number = 0;
    if (lane_ == 0) {
      number = atomicAdd(&bulk_.taken, 1);
      if (number < pieces) ask_for(Item(number, pieces_), stage);
    }
    return __shfl_sync(0xffffffffU, number, 0);
  }
  __device__ __forceinline__ void ask_for(Item item, int stage) {
    const int begin = item.piece * values_;
    const auto bytes =
        static_cast<std::uint32_t>(min(values_, hidden_ - begin) * static_cast<int>(sizeof(In)));
    const int token = token_of(item);
    const std::int64_t row = args_.copies == 1 ? token : token / args_.copies;
    const std::uint32_t barrier = ptx::shared_address(&bulk_.here[warp_][stage]);
    ptx::mbarrier_arrive_expect(barrier, bytes);
    ptx::bulk_load(ptx::shared_address(ring_ + stage * stage_bytes_),
                   static_cast<const In*>(args_.x) + row * hidden_ + begin, bytes, barrier);
  }

  __device__ __forceinline__ void send(int number, int stage, std::uint32_t parity) {
    const Item item(number, pieces_);
    const int begin = item.piece * values_;
    const int size = min(values_, hidden_ - begin);
    std::byte* const values = ring_ + stage * stage_bytes_;
    float* const scales = bulk_.scales[warp_][stage];
    // Lane i sends to one destination, each rank starting at another one.
    const std::uint16_t slot =
        lane_ < p_.layout.num_ranks ? slots_[item.token * kMaxDeviceRanks + to_] : kNoSlot;
    const bool fits = slot != kNoSlot && slot < bulk_.to[to_].room;
    const Meta meta = item.piece == 0 ? load_meta(token_of(item)) : Meta{};
    ptx::mbarrier_wait(ptx::shared_address(&bulk_.here[warp_][stage]), parity);
    if constexpr (!std::is_same_v<In, Wire>) encode_in_place(values, size, scales);
    if (fits) {
      ptx::bulk_store(bulk_.to[to_].rows +
                          (std::int64_t{slot} * hidden_ + begin) * static_cast<int>(sizeof(Wire)),
                      ptx::shared_address(values),
                      static_cast<std::uint32_t>(size * static_cast<int>(sizeof(Wire))));
    }
    if constexpr (kIsFp8<Wire>) send_scales(begin, size, scales, slot, fits);
    ptx::bulk_commit();
    if (item.piece == 0) send_meta(token_of(item), meta, slot, fits);
  }

  __device__ __forceinline__ void send_scales(int begin, int size, const float* scales,
                                              std::uint16_t slot, bool fits) {
    constexpr auto kBlock = static_cast<int>(kScaleBlock);
    const int count = (size + kBlock - 1) / kBlock;
    const int of_row = (hidden_ + kBlock - 1) / kBlock;
    std::byte* const to = bulk_.to[to_].scales + (slot * of_row + begin / kBlock) * 4;
    if (of_row % 4 == 0) {
      if (fits) {
        ptx::bulk_store(to, ptx::shared_address(scales), static_cast<std::uint32_t>(count * 4));
      }
      return;
    }
    for (std::uint32_t all = __ballot_sync(0xffffffffU, fits); all != 0; all &= all - 1) {
      auto* const out = reinterpret_cast<float*>(of_lane(to, __ffs(static_cast<int>(all)) - 1));
      if (lane_ < count) out[lane_] = scales[lane_];
    }
  }

  /// Ids and weights of a token, and for its way home where it has gone.
  __device__ __forceinline__ void send_meta(int token, const Meta& meta, std::uint16_t slot,
                                            bool fits) {
    const int top_k = p_.layout.top_k;
    const int ranks = p_.layout.num_ranks;
    if (lane_ < ranks) {
      p_.slot[std::int64_t{token} * ranks + to_] = fits ? std::int32_t{slot} : -1;
    }
    for (std::uint32_t all = __ballot_sync(0xffffffffU, fits); all != 0; all &= all - 1) {
      const int from = __ffs(static_cast<int>(all)) - 1;
      const int to = __shfl_sync(0xffffffffU, to_, from);
      const int at = __shfl_sync(0xffffffffU, int{slot}, from) * top_k + lane_;
      if (lane_ >= top_k) continue;
      const bool here = meta.owner == to;
      reinterpret_cast<std::int32_t*>(bulk_.to[to].ids)[at] = here ? meta.id : -1;
      reinterpret_cast<float*>(bulk_.to[to].weights)[at] = here ? meta.weight : 0.0F;
    }
  }

  [[nodiscard]] static __device__ __forceinline__ std::byte* of_lane(std::byte* address, int lane) {
    return reinterpret_cast<std::byte*>(
        __shfl_sync(0xffffffffU, reinterpret_cast<unsigned long long>(address), lane));
  }

  [[nodiscard]] __device__ __forceinline__ Meta load_meta(int token) const {
    Meta meta;
    if (lane_ >= p_.layout.top_k) return meta;
    const std::int64_t k = std::int64_t{token} * p_.layout.top_k + lane_;
    meta.id = args_.expert[k];
    meta.weight = args_.weight[k];
    const bool kept = args_.kept == nullptr || args_.kept[k] != 0;
    if (meta.id >= 0 && meta.id < p_.num_experts && kept) meta.owner = shared_.owner[meta.id];
    return meta;
  }

  /// A piece becomes what travels, where it lies, and its scales.
  __device__ __forceinline__ void encode_in_place(std::byte* piece, int size, float* scales) const {
    Eight<In> in[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int at = step * 256 + lane_ * 8;
      in[step] = {};
      if (at < size) in[step] = reinterpret_cast<const Eight<In>*>(piece)[at / 8];
    }
    Eight<Wire> out[kSteps];
    const float scale = encode<Wire>(in, out);
    __syncwarp();  // all of it has been read
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int at = step * 256 + lane_ * 8;
      if (at < size) reinterpret_cast<Eight<Wire>*>(piece)[at / 8] = out[step];
    }
    const int block = block_of_lane();
    if (kIsFp8<Wire> && block >= 0 && block < kBulkScales) scales[block] = scale;
    ptx::fence_proxy_async();
    __syncwarp();
  }

  /// All lanes, once `pieces` of a chunk are at their destinations: who brings the last of the
  /// block's tells them.
  __device__ __forceinline__ void count(int chunk, int pieces) {
    if (pieces == 0) return;
    fence_bulk_copies();
    __syncwarp();
    int others = 0;
    if (lane_ == 0) {
      __threadfence_block();
      others = atomicAdd(&bulk_.done[chunk], pieces);
      __threadfence_block();
    }
    others = __shfl_sync(0xffffffffU, others, 0);
    if (others + pieces == pieces_until(chunk + 1) - pieces_until(chunk)) tell(chunk);
  }
  __device__ __forceinline__ void tell(int chunk) {
    if (lane_ < p_.layout.num_ranks) {
      add_release_system(p_.window[to_] + p_.layout.rows_flag(p_.rank, chunk));
    }
  }

  const DeviceDispatchParams& args_;
  const DeviceExchangeParams& p_;
  const DispatchShared& shared_;
  BulkShared& bulk_;
  const std::uint16_t* slots_;
  int warp_, lane_, hidden_, values_, pieces_, stage_bytes_;
  std::byte* ring_;
  int to_;  // this lane's destination
};

template <typename In, typename Wire>
__device__ __forceinline__ void send_in_bulk(const DeviceDispatchParams& args,
                                             const DispatchShared& shared, BulkShared& bulk,
                                             const std::uint16_t* slots, std::byte* rings,
                                             std::int64_t buffer) {
  const ExchangeLayout& layout = args.exchange.layout;
  if (static_cast<int>(threadIdx.x) < layout.num_ranks) {
    std::byte* const window = args.exchange.window[threadIdx.x];
    const std::int64_t base = shared.base[threadIdx.x];
    bulk.to[threadIdx.x] = {.rows = window + layout.row(buffer, base),
                            .scales = window + layout.scales(buffer, base),
                            .ids = window + layout.ids(buffer, base),
                            .weights = window + layout.weights(buffer, base),
                            .room = layout.max_rows - base};
  }
  __syncthreads();
  BulkSender<In, Wire>(args, shared, bulk, slots, rings).run();
}

#else  // launched on no such chip

__device__ inline void begin_bulk(BulkShared& /*bulk*/) {}
__device__ inline std::byte* rings_after(std::uint32_t* /*masks*/,
                                         const DeviceExchangeParams& /*p*/, unsigned /*blocks*/) {
  return nullptr;
}
template <typename In, typename Wire>
__device__ void send_in_bulk(const DeviceDispatchParams& /*args*/, const DispatchShared& /*shared*/,
                             BulkShared& /*bulk*/, const std::uint16_t* /*slots*/,
                             std::byte* /*rings*/, std::int64_t /*buffer*/) {}

#endif

}  // namespace switchyard

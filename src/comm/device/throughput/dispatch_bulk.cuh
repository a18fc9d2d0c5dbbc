#pragma once

// Rows of many tokens on their way to their experts' ranks, by bulk copies (Hopper). Each warp has
// a ring of three stages in shared memory: a piece of a row is copied in, encoded there where the
// wire has another type, and copied to each destination, while the next pieces come. The warps of
// all blocks take pieces when they get to them: the wire does not serve all blocks alike, and with
// pieces dealt out beforehand the last block would end a fifth later than all do on average.
// Bound by the wire.

#include <algorithm>
#include <type_traits>

#include "comm/device/throughput/token_places.cuh"
#include "core/gpu/ptx.cuh"

namespace switchyard {

inline constexpr int kBulkStages = 3;
/// Warps of all blocks that send, at most (four in each at least): what these have under way fills
/// the wire, and with more the last pieces of all stand in a longer queue. Where rows are encoded
/// it takes more of them.
inline constexpr int kBulkWarps = 256;
inline constexpr int kEncodingBulkWarps = 512;
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
  std::int32_t past[ExchangeLayout::kRowChunks];    // warps whose pieces of a chunk have arrived
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
  if (threadIdx.x < ExchangeLayout::kRowChunks) bulk.past[threadIdx.x] = 0;
  if (threadIdx.x % 32 == 0) {
    for (std::uint64_t& barrier : bulk.here[threadIdx.x / 32]) {
      ptx::mbarrier_init(ptx::shared_address(&barrier), 1);
    }
    ptx::fence_mbarrier_init();
  }
}

/// A warp's pieces of rows, of all of the rank's, which are numbered token by token.
template <typename In, typename Wire>
class BulkSender {
 public:
  static constexpr int kWidest =
      static_cast<int>(sizeof(In) > sizeof(Wire) ? sizeof(In) : sizeof(Wire));
  static constexpr int kSteps = kBulkBytes / kWidest / 256;
  static constexpr int kMostWarps = std::is_same_v<In, Wire> ? kBulkWarps : kEncodingBulkWarps;

  __device__ __forceinline__ BulkSender(const DeviceDispatchParams& args,
                                        const DispatchShared& shared, BulkShared& bulk,
                                        const TokenGroup* groups, std::byte* rings)
      : args_(args),
        p_(args.exchange),
        shared_(shared),
        bulk_(bulk),
        groups_(groups),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        hidden_(static_cast<int>(args.exchange.layout.hidden)),
        values_(bulk_piece_values(args.exchange.layout.hidden, kWidest,
                                  args.exchange.layout.dispatch_wire)),
        pieces_((hidden_ + values_ - 1) / values_),
        stage_bytes_(static_cast<int>(ExchangeLayout::align(values_ * kWidest))),
        ring_(rings + warp_ * kBulkStages * stage_bytes_),
        to_((p_.rank + lane_) % p_.layout.num_ranks),
        warps_(min(kExchangeWarps, max(4, kMostWarps / static_cast<int>(gridDim.x)))) {}

  __device__ __forceinline__ void run() {
    if (warp_ >= warps_) return;
    const auto tokens = static_cast<int>(p_.num_tokens);
    // The first two are dealt out; then the counter tells, which is asked one piece ahead.
    const auto blocks = static_cast<int>(gridDim.x);
    const int warps = blocks * warps_;
    const int first = static_cast<int>(blockIdx.x) + blocks * warp_;
    Item now(first, pieces_);
    Item next(first + warps, pieces_);
    ask_for(now, 0);
    ask_for(next, 1);
    int ahead = take();
    int last = -1, before_last = -1;  // tokens of pieces sent, not known to have arrived
    int chunk = 0;                    // those before have arrived
    int chunk_end = tokens_until(1);
    int stage = 0;
    std::uint32_t parity = 0;
    for (;;) {
      const bool more = now.token < tokens;
      Item after = next;
      if (more) {
        send(now, stage, parity);
        // The stage of the piece before this one is free once its copies have read it.
        ptx::bulk_wait_read<1>();
        after = Item(2 * warps + __shfl_sync(0xffffffffU, ahead, 0), pieces_);
        ask_for(after, stage == 0 ? kBulkStages - 1 : stage - 1);
        if (after.token < tokens) ahead = take();
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
        const int begin = chunk;
        do {
          chunk_end = tokens_until(++chunk + 1);
        } while (chunk < p_.chunks && (end || before_last >= chunk_end));
        pass(begin, chunk);
        if (end) break;
      }
      before_last = last;
      last = more ? now.token : -1;
      now = next;
      next = after;
    }
  }

 private:
  /// Of choice `lane` of a token, as it was given: not looked at before the token is sent.
  struct Meta {
    std::int32_t id = -1;
    float weight = 0.0F;
    std::uint8_t kept = 1;
  };

  /// Of the chunks before `chunk`.
  [[nodiscard]] __device__ __forceinline__ int tokens_until(int chunk) const {
    const auto chunk_tokens = static_cast<int>((p_.max_tokens + p_.chunks - 1) / p_.chunks);
    return min(static_cast<int>(p_.num_tokens), chunk * chunk_tokens);
  }

  /// Of those that are not dealt out; known to lane 0.
  __device__ __forceinline__ int take() const {
    return lane_ == 0 ? static_cast<int>(atomicAdd(&p_.state->dispatch_taken, 1U)) : 0;
  }
  /// All lanes, when their copies have read the stage: a piece, if there is one, starts on its way
  /// there.
  __device__ __forceinline__ void ask_for(Item item, int stage) {
    __syncwarp();
    if (lane_ != 0 || item.token >= static_cast<int>(p_.num_tokens)) return;
    const int begin = item.piece * values_;
    const auto bytes =
        static_cast<std::uint32_t>(min(values_, hidden_ - begin) * static_cast<int>(sizeof(In)));
    const std::int64_t row = args_.copies == 1 ? item.token : item.token / args_.copies;
    const std::uint32_t barrier = ptx::shared_address(&bulk_.here[warp_][stage]);
    ptx::mbarrier_arrive_expect(barrier, bytes);
    ptx::bulk_load(ptx::shared_address(ring_ + stage * stage_bytes_),
                   static_cast<const In*>(args_.x) + row * hidden_ + begin, bytes, barrier);
  }

  __device__ __forceinline__ void send(Item item, int stage, std::uint32_t parity) {
    const int begin = item.piece * values_;
    const int size = min(values_, hidden_ - begin);
    std::byte* const values = ring_ + stage * stage_bytes_;
    float* const scales = bulk_.scales[warp_][stage];
    // Lane i sends to one destination, each rank starting at another one.
    const std::uint16_t slot =
        lane_ < p_.layout.num_ranks ? slot_of(groups_, item.token, to_) : kNoSlot;
    const bool fits = slot != kNoSlot && slot < bulk_.to[to_].room;
    const Meta meta = item.piece == 0 ? load_meta(item.token) : Meta{};
    ptx::mbarrier_wait(ptx::shared_address(&bulk_.here[warp_][stage]), parity);
    if constexpr (!std::is_same_v<In, Wire>) {
      if (size <= kSteps / 2 * 256) {
        encode_in_place<kSteps / 2>(values, size, scales);
      } else {
        encode_in_place<kSteps>(values, size, scales);
      }
    }
    if (fits) {
      ptx::bulk_store(bulk_.to[to_].rows +
                          (std::int64_t{slot} * hidden_ + begin) * static_cast<int>(sizeof(Wire)),
                      ptx::shared_address(values),
                      static_cast<std::uint32_t>(size * static_cast<int>(sizeof(Wire))));
    }
    if constexpr (kIsFp8<Wire>) send_scales(begin, size, scales, slot, fits);
    ptx::bulk_commit();
    if (item.piece == 0) send_meta(item.token, meta, slot, fits);
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
    const bool stays = meta.id >= 0 && meta.id < p_.num_experts && meta.kept != 0;
    const int owner = stays ? shared_.owner[meta.id] : -1;
    for (std::uint32_t all = __ballot_sync(0xffffffffU, fits); all != 0; all &= all - 1) {
      const int from = __ffs(static_cast<int>(all)) - 1;
      const int to = __shfl_sync(0xffffffffU, to_, from);
      const int at = __shfl_sync(0xffffffffU, int{slot}, from) * top_k + lane_;
      if (lane_ >= top_k) continue;
      const bool here = owner == to;
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
    if (args_.kept != nullptr) meta.kept = args_.kept[k];
    return meta;
  }

  /// A piece becomes what travels, where it lies, and its scales.
  template <int kVectors>
  __device__ __forceinline__ void encode_in_place(std::byte* piece, int size, float* scales) const {
    Eight<In> in[kVectors];
#pragma unroll
    for (int step = 0; step < kVectors; ++step) {
      const int at = step * 256 + lane_ * 8;
      in[step] = {};
      if (at < size) in[step] = reinterpret_cast<const Eight<In>*>(piece)[at / 8];
    }
    Eight<Wire> out[kVectors];
    const float scale = encode<Wire>(in, out);
    __syncwarp();  // all of it has been read
#pragma unroll
    for (int step = 0; step < kVectors; ++step) {
      const int at = step * 256 + lane_ * 8;
      if (at < size) reinterpret_cast<Eight<Wire>*>(piece)[at / 8] = out[step];
    }
    const int block = block_of_lane();
    if (kIsFp8<Wire> && block >= 0 && block < 2 * kVectors) scales[block] = scale;
    ptx::fence_proxy_async();
    __syncwarp();
  }

  /// All lanes, once this warp's pieces of chunks [first, end) have arrived, and it will get no
  /// more of them: the last warp of the block tells the destinations.
  __device__ __forceinline__ void pass(int first, int end) {
    fence_bulk_copies();
    __syncwarp();
    bool last = false;
    if (first + lane_ < end) {
      __threadfence_block();
      last = atomicAdd(&bulk_.past[first + lane_], 1) == warps_ - 1;
      __threadfence_block();
    }
    for (std::uint32_t told = __ballot_sync(0xffffffffU, last); told != 0; told &= told - 1) {
      tell(first + __ffs(static_cast<int>(told)) - 1);
    }
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
  const TokenGroup* groups_;
  int warp_, lane_, hidden_, values_, pieces_, stage_bytes_;
  std::byte* ring_;
  int to_;     // this lane's destination
  int warps_;  // of the block, that send
};

template <typename In, typename Wire>
__device__ __forceinline__ void send_in_bulk(const DeviceDispatchParams& args,
                                             const DispatchShared& shared, BulkShared& bulk,
                                             const TokenGroup* groups, std::byte* rings,
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
  ptx::fence_proxy_async();  // the masks have lain where the rings are
  __syncthreads();
  BulkSender<In, Wire>(args, shared, bulk, groups, rings).run();
}

#else  // launched on no such chip

__device__ inline void begin_bulk(BulkShared& /*bulk*/) {}
template <typename In, typename Wire>
__device__ void send_in_bulk(const DeviceDispatchParams& /*args*/, const DispatchShared& /*shared*/,
                             BulkShared& /*bulk*/, const TokenGroup* /*groups*/,
                             std::byte* /*rings*/, std::int64_t /*buffer*/) {}

#endif

}  // namespace switchyard

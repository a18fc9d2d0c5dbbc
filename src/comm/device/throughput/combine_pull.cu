// Combine between GPUs by pull: the sums of a rank's experts lie in its own window, and the tokens'
// ranks read them from there. Each warp has a ring in shared memory that bulk copies fill with all
// parts of one piece of a token after the other, over NVLink or from its own memory; it adds a
// piece while the next are under way. Nothing lands in memory before it is summed, so this is bound
// by the wire: 16 blocks keep some 3 MB under way.
//
// Why nobody overwrites what is still read: a rank makes new sums from the rows of its next
// dispatch; that dispatch has ended only when every rank's rows have come, and a rank sends rows
// after its own combine, which comes before them in its order of calls and ends with its last read.
#include "comm/device/combine_parts.cuh"
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/ptx.cuh"

namespace switchyard {
namespace {

constexpr int kPullWarps = 12;  // with 8 it takes 564 instead of 504 us on 8 blocks (4 H200s)
constexpr int kPullThreads = kPullWarps * 32;
constexpr int kPieceBytes = 2048;  // 7168 values of 16 bits are 7 whole pieces
constexpr int kRingPieces = 9;     // of a warp; at least the parts that a token can have
constexpr int kMostAsked = 6;      // pieces of tokens that a warp has under way
constexpr int kPullBytes = kPullWarps * kRingPieces * kPieceBytes;
static_assert(kRingPieces >= kMaxDeviceRanks && kPullBytes <= 220 * 1024);

/// What is under way of the warps' rings.
struct PullShared {
  std::uint64_t here[kPullWarps][kMostAsked];   // barriers: all parts of a piece have come
  std::uint32_t parts[kPullWarps][kMostAsked];  // which they are, a bit each
};

/// How tokens are cut, the same for all warps.
template <typename Wire>
struct Pieces {
  static constexpr int kValues = kPieceBytes / static_cast<int>(sizeof(Wire));
  static constexpr int kSteps = kValues / 256;  // vectors of 8 values of a lane
  int hidden;
  int count;   // of a token
  int values;  // of a piece but the last

  __device__ __forceinline__ explicit Pieces(std::int64_t h)
      : hidden(static_cast<int>(h)),
        count((hidden + kValues - 1) / kValues),
        values((hidden / 8 + count - 1) / count * 8) {}
  [[nodiscard]] __device__ __forceinline__ int begin(int piece) const { return piece * values; }
  [[nodiscard]] __device__ __forceinline__ int size(int piece) const {
    return min(values, hidden - piece * values);
  }
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

/// Which of this rank's rows to the owner of a lane's part a token is, for the pieces that a warp
/// takes: those of four are loaded at once, and four ahead.
class SlotQueue {
 public:
  __device__ __forceinline__ SlotQueue(const DeviceExchangeParams& p, int pieces, int first,
                                       int stride)
      : p_(p),
        pieces_(pieces),
        items_(static_cast<int>(p.num_tokens) * pieces),
        stride_(stride),
        lane_(static_cast<int>(threadIdx.x) % 32),
        next_item_(first) {
    now_ = load();
    then_ = load();
  }
  /// All lanes of a warp. Of the next item; -1 where the lane has no part, or a token no row.
  __device__ __forceinline__ std::int32_t take() {
    const std::int32_t slot =
        __shfl_sync(0xffffffffU, now_, taken_ * kMaxDeviceRanks + lane_ % kMaxDeviceRanks);
    if (++taken_ == kItems) {
      taken_ = 0;
      now_ = then_;
      then_ = load();
    }
    return lane_ < kMaxDeviceRanks ? slot : -1;
  }

 private:
  static constexpr int kItems = 32 / kMaxDeviceRanks;  // that the lanes load at a time
  __device__ __forceinline__ std::int32_t load() {
    const int item = next_item_ + lane_ / kMaxDeviceRanks * stride_;
    const int rank = lane_ % kMaxDeviceRanks >> p_.group_bits;
    next_item_ += kItems * stride_;
    if (item >= items_ || rank >= p_.layout.num_ranks) return -1;
    return p_.slot[static_cast<std::int64_t>(item / pieces_) * p_.layout.num_ranks + rank];
  }

  const DeviceExchangeParams& p_;
  int pieces_, items_, stride_, lane_, next_item_;
  int taken_ = 0;
  std::int32_t now_, then_;
};

/// Where part `lane` of this rank's first row lies at its owner. Rows of a window are sorted by
/// source: before them are those of the ranks before this one.
template <typename Wire>
__device__ const std::byte* rows_of_part(const DeviceExchangeParams& p, int lane) {
  const int ranks = p.layout.num_ranks;
  const int owner = lane >> p.group_bits;
  if (owner >= ranks) return nullptr;
  std::int64_t row = 0;
  for (int source = 0; source < p.rank; ++source) row += p.state->counts[source * ranks + owner];
  const int group = lane - (owner << p.group_bits);
  return p.window[owner] + p.layout.result((row << p.group_bits) + group);
}

/// The rings of all warps: by its name the compiler knows that it is shared memory.
__device__ __forceinline__ std::byte* pull_rings() {
  extern __shared__ __align__(128) std::byte rings[];
  return rings;
}

/// Of this warp's ring: its oldest piece is at `tail`, and its parts follow each other there.
template <typename Wire, int kParts>
__device__ __forceinline__ void add_piece(const DeviceCombineParams& args,
                                          const Pieces<Wire>& pieces, Item item, int tail,
                                          std::uint32_t parts,
                                          const float (&shared)[Pieces<Wire>::kSteps][8]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int size = pieces.size(item.piece);
  const std::int64_t begin = std::int64_t{item.token} * pieces.hidden + pieces.begin(item.piece);
  const int ring = static_cast<int>(threadIdx.x) / 32 * kRingPieces;
  int from[kParts];
#pragma unroll
  for (int r = 0; r < kParts; ++r) {
    int at = tail + __popc(parts & ((1U << r) - 1U));
    if (at >= kRingPieces) at -= kRingPieces;
    from[r] = (ring + at) * kPieceBytes;
  }
#pragma unroll
  for (int step = 0; step < Pieces<Wire>::kSteps; ++step) {
    const int at = step * 256 + lane * 8;
    if (at >= size) continue;
    Part<Wire> part[kParts];
#pragma unroll
    for (int r = 0; r < kParts; ++r) {
      part[r] = {};  // an absent part is +0
      if ((parts >> r & 1U) != 0) {
        part[r].values = *reinterpret_cast<const Eight<Wire>*>(pull_rings() + from[r] +
                                                               at * static_cast<int>(sizeof(Wire)));
      }
    }
    float sum[8];
    add_parts<Wire, kParts>(part, sum);
    if (args.shared != nullptr) {
#pragma unroll
      for (int v = 0; v < 8; ++v) sum[v] = __fadd_rn(sum[v], shared[step][v]);
    }
    store_out(args, begin + at, sum);
  }
}

/// What is added to a piece last, asked for before its parts are waited for.
template <typename Wire>
__device__ __forceinline__ void load_shared(const DeviceCombineParams& args,
                                            const Pieces<Wire>& pieces, Item item,
                                            float (&shared)[Pieces<Wire>::kSteps][8]) {
  if (args.shared == nullptr) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t begin = std::int64_t{item.token} * pieces.hidden + pieces.begin(item.piece);
#pragma unroll
  for (int step = 0; step < Pieces<Wire>::kSteps; ++step) {
    const int at = step * 256 + lane * 8;
    if (at >= pieces.size(item.piece)) continue;
    const auto* from = reinterpret_cast<const float4*>(args.shared + begin + at);
    *reinterpret_cast<float4*>(&shared[step][0]) = from[0];
    *reinterpret_cast<float4*>(&shared[step][4]) = from[1];
  }
}

/// A warp takes items (a piece of a token each) `first`, first + stride, ...
template <typename Wire, int kParts>
__device__ void pull_pieces(const DeviceCombineParams& args, std::uint64_t* here,
                            std::uint32_t* parts_of, int first, int stride) {
  const DeviceExchangeParams& p = args.exchange;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::byte* const ring =
      pull_rings() + static_cast<int>(threadIdx.x) / 32 * kRingPieces * kPieceBytes;
  const Pieces<Wire> pieces(p.layout.hidden);
  const auto tokens = static_cast<int>(p.num_tokens);
  const std::byte* const rows = rows_of_part<Wire>(p, lane);
  const std::int64_t row_bytes = p.layout.result_bytes() << p.group_bits;
  SlotQueue slots(p, pieces.count, first, stride);
  std::int32_t slot = slots.take();
  const Item step(stride, pieces.count);
  Item asked(first, pieces.count);  // the next to ask for: `slot` is its
  int head = 0, tail = 0;           // of the ring
  int room = kRingPieces;
  int under_way = 0;
  int ask_at = 0, take_at = 0;
  std::uint32_t parity = 0;
  for (Item item = asked; item.token < tokens; item.advance(step, pieces.count)) {
    while (asked.token < tokens && under_way < kMostAsked) {
      const std::uint32_t parts = __ballot_sync(0xffffffffU, slot >= 0);
      const int count = __popc(parts);
      if (count > room) break;
      const int begin = pieces.begin(asked.piece);
      const auto bytes = static_cast<std::uint32_t>(pieces.size(asked.piece)) *
                         static_cast<std::uint32_t>(sizeof(Wire));
      const std::uint32_t barrier = ptx::shared_address(here + ask_at);
      if (lane == 0) {
        parts_of[ask_at] = parts;
        ptx::mbarrier_arrive_expect(barrier, static_cast<std::uint32_t>(count) * bytes);
      }
      __syncwarp();
      if (slot >= 0) {
        int at = head + __popc(parts & ((1U << lane) - 1U));
        if (at >= kRingPieces) at -= kRingPieces;
        ptx::bulk_load(ptx::shared_address(ring + at * kPieceBytes),
                       rows + slot * row_bytes + begin * static_cast<int>(sizeof(Wire)), bytes,
                       barrier);
      }
      head += count;
      if (head >= kRingPieces) head -= kRingPieces;
      room -= count;
      ask_at = ask_at + 1 == kMostAsked ? 0 : ask_at + 1;
      ++under_way;
      asked.advance(step, pieces.count);
      slot = slots.take();
    }
    float shared[Pieces<Wire>::kSteps][8];
    load_shared(args, pieces, item, shared);
    ptx::mbarrier_wait(ptx::shared_address(here + take_at), parity);
    const std::uint32_t parts = parts_of[take_at];
    add_piece<Wire, kParts>(args, pieces, item, tail, parts, shared);
    __syncwarp();  // before another copy goes to the same place
    const int count = __popc(parts);
    tail += count;
    if (tail >= kRingPieces) tail -= kRingPieces;
    room += count;
    --under_way;
    if (++take_at == kMostAsked) {
      take_at = 0;
      parity ^= 1;
    }
  }
}

#endif

template <typename Wire, int kParts>
__global__ void __launch_bounds__(kPullThreads, 1)
    pull_kernel([[maybe_unused]] const __grid_constant__ DeviceCombineParams args) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __shared__ PullShared shared;
  const DeviceExchangeParams& p = args.exchange;
  const int ranks = p.layout.num_ranks;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const std::uint64_t epoch = *static_cast<volatile std::uint64_t*>(&p.state->pulls) + 1;
  // This rank's sums are there: the kernels that made them have ended.
  if (blockIdx.x == 0 && static_cast<int>(threadIdx.x) < ranks) {
    const int to = (p.rank + static_cast<int>(threadIdx.x)) % ranks;
    store_release_system(p.window[to] + p.layout.partials_flag(p.rank), epoch);
  }
  if (threadIdx.x % 32 == 0) {
    for (std::uint64_t& barrier : shared.here[warp]) {
      ptx::mbarrier_init(ptx::shared_address(&barrier), 1);
    }
    ptx::fence_mbarrier_init();
  }
  bool here = true;
  if (static_cast<int>(threadIdx.x) < ranks) {
    const int from = static_cast<int>(threadIdx.x);
    here = wait_for(p, p.layout.partials_flag(from), epoch, DevicePhase::kResults, from);
  }
  if (__syncthreads_and(here ? 1 : 0) == 0) return;
  fence_bulk_copies();
  pull_pieces<Wire, kParts>(args, shared.here[warp], shared.parts[warp],
                            static_cast<int>(blockIdx.x + gridDim.x * (threadIdx.x / 32)),
                            static_cast<int>(gridDim.x) * kPullWarps);
  __syncthreads();
  // A rank that has given up meanwhile may have gone on to make other sums.
  if (threadIdx.x == 0 && load_relaxed_system(p.window[p.rank] + p.layout.abort_flag()) != 0) {
    give_up(p, 2, DevicePhase::kResults, p.rank, epoch, epoch);
  }
  if (threadIdx.x == 0 && atomicAdd(&p.state->combine_done, 1U) == gridDim.x - 1) {
    p.state->combine_done = 0;
    p.state->pulls = epoch;
  }
#endif
}

using PullKernel = void (*)(DeviceCombineParams);

template <typename Wire>
PullKernel pull_kernel_for(int num_parts) {
  return for_parts(num_parts, []<int kParts>(NumParts<kParts>) -> PullKernel {
    return pull_kernel<Wire, kParts>;
  });
}

PullKernel pull_kernel_of(DType wire, int num_parts) {
  switch (wire) {
    case DType::kBF16: return pull_kernel_for<__nv_bfloat16>(num_parts);
    case DType::kF16: return pull_kernel_for<__half>(num_parts);
    default: return pull_kernel_for<float>(num_parts);
  }
}

}  // namespace

void load_pull_kernels(DType wire, int num_parts) {
  const int most =
      allow_most_shared_memory(reinterpret_cast<const void*>(pull_kernel_of(wire, num_parts)));
  require(kPullBytes <= most, "a block has {} bytes of shared memory, combine by pull wants {}",
          most, kPullBytes);
}

void launch_pull(const DeviceCombineParams& params, int ctas, void* stream) {
  const ExchangeLayout& layout = params.exchange.layout;
  const int num_parts = layout.num_ranks << params.exchange.group_bits;
  pull_kernel_of(layout.combine_wire,
                 num_parts)<<<static_cast<unsigned>(ctas), kPullThreads, kPullBytes,
                              static_cast<cudaStream_t>(stream)>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard

#pragma once

// The products on the way back on Hopper, 16-bit: what their roles share.
//
// Bound by the tensor cores where experts have some hundred rows. Persistent clusters of two CTAs
// take units of two tiles of 128 x 256, in steps of 64 along the sums; of an operand that both need
// each loads a half, multicast. One warpgroup loads (warp 0: units, and TMA of what is
// contiguous; warps 2 and 3: rows by index, by 16-byte cp.async; warp 1: proxy fence), two multiply
// 64 x 256 each. An operand with the sums' index across memory lies in shared memory as it lies in
// memory, 64 rows by 64 values a box, and wgmma turns it by its descriptor: nothing is transposed.

#include "core/gpu/swizzle.hpp"
#include "core/gpu/wgmma.cuh"
#include "experts/gpu/backward/chunks.cuh"
#include "experts/gpu/grouped/sm80/load.cuh"

namespace switchyard::backward::sm90 {

constexpr int kThreads = 384;
constexpr int kLoadRegisters = 56;
constexpr int kMultiplyRegisters = 224;
constexpr int kGatherThreads = 64;
constexpr int kTileM = 128;
constexpr int kTileN = 256;
constexpr int kTileK = 64;
constexpr int kStages = 4;
constexpr int kBoxBytes = 64 * 128;
constexpr int kLeftBytes = kTileM / 64 * kBoxBytes;
constexpr int kRightBytes = kTileN / 64 * kBoxBytes;
constexpr int kStageBytes = kLeftBytes + kRightBytes;
// The loading warp may be as many units ahead as there are stages (each has a step at least), and
// one more is announced.
constexpr int kUnitSlots = 16;

/// A warp's 16 rows of 64 sums on their way out.
constexpr int kOutStride = 68;
constexpr int kOutBytes = 16 * kOutStride * 4;

constexpr int kOutAt = kStages * kStageBytes;
constexpr int kUnitsAt = kOutAt + 8 * kOutBytes;
constexpr int kBarriersAt = kUnitsAt + kUnitSlots * 16;
constexpr int kSharedBytes = kBarriersAt + (3 * kStages + kUnitSlots) * 8;
static_assert(kSharedBytes <= 232448, "more shared memory than a CTA can have");
static_assert((kLoadRegisters + 2 * kMultiplyRegisters) * 128 <= 65536);

struct Cursor {
  std::uint32_t stage = 0;
  std::uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

/// What every role knows.
struct Context {
  std::uint32_t shared;
  std::uint32_t cta;  // of the two

  __device__ std::uint32_t left(const Cursor& c) const { return shared + c.stage * kStageBytes; }
  __device__ std::uint32_t right(const Cursor& c) const { return left(c) + kLeftBytes; }
  __device__ std::uint32_t barrier(std::uint32_t i) const { return shared + kBarriersAt + i * 8; }
  __device__ std::uint32_t full(const Cursor& c) const { return barrier(3 * c.stage); }
  __device__ std::uint32_t empty(const Cursor& c) const { return barrier(3 * c.stage + 1); }
  __device__ std::uint32_t gathered(const Cursor& c) const { return barrier(3 * c.stage + 2); }
  __device__ std::uint32_t unit_known(std::uint32_t index) const {
    return barrier(3 * kStages + index % kUnitSlots);
  }
  __device__ std::uint32_t unit(std::uint32_t index) const {
    return shared + kUnitsAt + index % kUnitSlots * 16;
  }

  /// One thread, before all others begin.
  __device__ void init() const {
    Cursor c;
    for (; c.stage < kStages; ++c.stage) {
      ptx::mbarrier_init(full(c), 2);    // the loading thread and the fence
      ptx::mbarrier_init(empty(c), 16);  // the warps of both CTAs that multiply
      ptx::mbarrier_init(gathered(c), kGatherThreads);
    }
    for (std::uint32_t i = 0; i < kUnitSlots; ++i) {
      ptx::mbarrier_init(unit_known(i), 1);
      rearm(i);
    }
    ptx::fence_mbarrier_init();
  }
  /// Whether this CTA's warp 0 hands out units.
  [[nodiscard]] __device__ __forceinline__ bool leads() const { return cta == 0; }
  /// Warp 0 of the CTA that leads, to all.
  __device__ __forceinline__ void announce(std::uint32_t index, const int4& message) const {
    const std::uint32_t lane = threadIdx.x % 32;
    if (lane < 2) {
      ptx::store_async_16(ptx::map_to_cta(unit(index), lane), message,
                          ptx::map_to_cta(unit_known(index), lane));
    }
  }
  /// One thread of each CTA, once it has received unit `index`: its place is free again.
  __device__ __forceinline__ void rearm(std::uint32_t index) const {
    ptx::mbarrier_arrive_expect(unit_known(index), sizeof(int4));
  }
  /// This warp has read the stage: both CTAs may fill it again.
  __device__ __forceinline__ void release(const Cursor& c) const {
    const std::uint32_t lane = threadIdx.x % 32;
    if (lane < 2) ptx::mbarrier_arrive_cluster(ptx::map_to_cta(empty(c), lane));
  }
  /// `x` is -1: no more.
  __device__ __forceinline__ int4 receive(std::uint32_t index) const {
    ptx::mbarrier_wait(unit_known(index), index / kUnitSlots % 2);
    return ptx::load_shared_16(unit(index));
  }
};

/// Warps 2 and 3: where in them a thread is.
__device__ __forceinline__ int gather_thread() { return static_cast<int>(threadIdx.x) - 64; }

/// kBoxes x 64 columns from `column` on of 64 rows, as boxes; zeros from row `count` and column
/// `cols` on. Row `i` is `source(i)` of the matrix.
template <int kBoxes, typename T, typename Source>
__device__ __forceinline__ void gather_flat(std::uint32_t to, const T* matrix, std::int64_t cols,
                                            std::int64_t column, std::int32_t count,
                                            Source&& source) {
  constexpr int kChunks = kBoxes * 8;              // of a row
  constexpr int kRowsAtOnce = 2 * (32 / kChunks);  // of both warps
  const int chunk = gather_thread() % kChunks;
  const bool exists = column + chunk * 8 < cols;
  const T* const from = matrix + column + chunk * 8;
#pragma unroll 8
  for (int turn = 0; turn < 64 / kRowsAtOnce; ++turn) {
    const int row = turn * kRowsAtOnce + gather_thread() / kChunks;
    const std::int64_t at = source(row);
    const bool inside = exists && row < count;
    const std::uint32_t place = static_cast<std::uint32_t>(chunk / 8 * kBoxBytes) +
                                static_cast<std::uint32_t>(row * 128 + ((chunk ^ row) % 8 << 4));
    ptx::cp_async_16(to + place, inside ? from + at * cols : matrix, inside ? 16 : 0);
  }
}

/// Warp 1: cp.async writes through the generic proxy and wgmma reads through the async one.
template <typename Steps>
__device__ __forceinline__ void run_fence(const Context& context, Steps&& steps_of) {
  if (threadIdx.x % 32 != 0) return;
  Cursor cursor;
  for (std::uint32_t index = 0;; ++index) {
    const int4 unit = context.receive(index);
    if (unit.x < 0) return;
    for (int step = steps_of(unit); step > 0; --step, cursor.advance()) {
      ptx::mbarrier_wait(context.gathered(cursor), cursor.phase);
      ptx::fence_proxy_async();
      ptx::mbarrier_arrive(context.full(cursor));
    }
  }
}

/// One multiplying warpgroup: `store(unit, sums)` behind each unit. kDeep: the sums' index runs
/// along the left operand's rows.
template <typename T, bool kDeep, typename Steps, typename Store>
__device__ __forceinline__ void run_multiply(const Context& context, Steps&& steps_of,
                                             Store&& store) {
  constexpr auto kTurned = kDeep ? ptx::WgmmaTurned::kB : ptx::WgmmaTurned::kBoth;
  constexpr std::uint64_t kLeftStep = kDeep ? 2 : ptx::kTurnedStep;
  const auto group = static_cast<std::uint32_t>(threadIdx.x / 128 - 1);
  float sums[kTileN / 2];
  Cursor cursor;
  for (std::uint32_t index = 0;; ++index) {
    const int4 unit = context.receive(index);
    if (unit.x < 0) return;
    const int steps = steps_of(unit);
    Cursor last;
    for (int step = 0; step < steps; ++step) {
      ptx::mbarrier_wait(context.full(cursor), cursor.phase);
      const std::uint32_t left_at = context.left(cursor) + group * kBoxBytes;
      const std::uint64_t left =
          kDeep ? ptx::wgmma_operand(left_at) : ptx::wgmma_turned_operand(left_at);
      const std::uint64_t right = ptx::wgmma_turned_operand(context.right(cursor));
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kTileK / 16; ++k) {
        ptx::wgmma<T, kTileN, kTurned>(sums, left + k * kLeftStep, right + k * ptx::kTurnedStep,
                                       k > 0 || step > 0 ? 1 : 0);
      }
      ptx::wgmma_commit();
      if (step > 0) {
        ptx::wgmma_wait<1>();
        context.release(last);
      }
      last = cursor;
      cursor.advance();
    }
    ptx::wgmma_wait<0>();
    // The compiler may not move reads of the sums above the wait.
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) asm volatile("" : "+f"(sums[i])::"memory");
    context.release(last);
    store(unit, sums);
  }
}

/// A warp's part of a unit's sums, 16 rows, in four boxes of 64 columns.
class OutBoxes {
 public:
  static constexpr int kTurns = 4;  ///< Each of four rows; a lane has eight columns of one.

  explicit __device__ OutBoxes(char* shared) {
    const int warp = static_cast<int>(threadIdx.x) / 32 - 4;
    out_ = reinterpret_cast<float*>(shared + kOutAt + warp * kOutBytes);
    lane_ = static_cast<int>(threadIdx.x) % 32;
    first_row_ = warp * 16;
  }

  /// Row of the tile that this lane has in a turn, and its first column of a box.
  [[nodiscard]] __device__ __forceinline__ int row(int turn) const {
    return first_row_ + turn * 4 + lane_ / 8;
  }
  [[nodiscard]] __device__ __forceinline__ int column() const { return lane_ % 8 * 8; }

  /// The same where a gradient is stored as its transpose: eight rows of one column.
  [[nodiscard]] __device__ __forceinline__ int turned_row() const {
    return first_row_ + lane_ % 2 * 8;
  }
  [[nodiscard]] __device__ __forceinline__ int turned_column(int turn) const {
    return turn * 16 + lane_ / 2;
  }
  __device__ __forceinline__ void get_turned(int turn, float (&values)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[i] = out_[(lane_ % 2 * 8 + i) * kOutStride + turned_column(turn)];
    }
  }

  /// Box `box` to shared memory, for the lanes of this warp.
  __device__ __forceinline__ void put(const float (&sums)[kTileN / 2], int box) const {
    __syncwarp();
    switch (box) {
      case 0: put_box<0>(sums); break;
      case 1: put_box<1>(sums); break;
      case 2: put_box<2>(sums); break;
      default: put_box<3>(sums); break;
    }
    __syncwarp();
  }
  __device__ __forceinline__ void get(int turn, float (&values)[8]) const {
    const float* const from = out_ + (turn * 4 + lane_ / 8) * kOutStride + column();
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const auto four = *reinterpret_cast<const float4*>(from + i);
      values[i] = four.x;
      values[i + 1] = four.y;
      values[i + 2] = four.z;
      values[i + 3] = four.w;
    }
  }

 private:
  template <int kBox>
  __device__ __forceinline__ void put_box(const float (&sums)[kTileN / 2]) const {
#pragma unroll
    for (int block = 0; block < 8; ++block) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int from = (kBox * 8 + block) * 4 + 2 * h;
        float* const to = out_ + (lane_ / 4 + 8 * h) * kOutStride + block * 8 + lane_ % 4 * 2;
        *reinterpret_cast<float2*>(to) = {sums[from], sums[from + 1]};
      }
    }
  }

  float* out_;
  int lane_;
  int first_row_;
};

/// Each role runs until there are no more units.
template <typename Load, typename Gather, typename Fence, typename Multiply>
__device__ __forceinline__ void run_roles(const Context& context, Load&& load, Gather&& gather,
                                          Fence&& fence, Multiply&& multiply) {
  if (threadIdx.x == 0) context.init();
  ptx::cluster_sync();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp < 4) {
    ptx::lower_registers<kLoadRegisters>();
    if (warp == 0) {
      load();
    } else if (warp == 1) {
      fence();
    } else {
      gather();
    }
  } else {
    ptx::raise_registers<kMultiplyRegisters>();
    multiply();
  }
  __syncwarp();
  ptx::cluster_sync();  // nobody leaves while the other CTA may still write here
}

}  // namespace switchyard::backward::sm90

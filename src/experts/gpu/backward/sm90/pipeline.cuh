#pragma once

// The products on the way back on Hopper, 16-bit: what their roles share.
//
// Bound by the tensor cores where experts have some hundred rows. Persistent clusters of two CTAs
// take units of two tiles of 128 x 256, in steps of 64 along the sums; of an operand that both need
// each loads a half, multicast. Two warpgroups multiply 64 x 256 each; of the other warps the first
// has the units and brings what is contiguous by TMA, some gather rows by index, by 16-byte
// cp.async, and some store: they are handed a tile rounded to 16 bits and bring it out while the
// next one's products run (store.cuh). How many do what is said by each kernel's Roles. An operand
// with the sums' index across memory lies in shared memory as it lies in memory, 64 rows by 64
// values a box, and wgmma turns it by its descriptor: nothing is transposed.

#include "core/gpu/register_pool.hpp"
#include "core/gpu/swizzle.hpp"
#include "core/gpu/wgmma.cuh"
#include "experts/gpu/backward/chunks.cuh"
#include "experts/gpu/grouped/sm80/load.cuh"
#include "experts/gpu/stage_cursor.cuh"

namespace switchyard::backward::sm90 {

constexpr int kMultiplyThreads = 256;

/// Which warps do what: the first loads, then those that gather, perhaps one that fences for them,
/// those that store, and from `multiply_from` on the eight that multiply.
struct Roles {
  int gather_warps;
  int store_warps;
  int multiply_from;

  [[nodiscard]] constexpr int threads() const { return multiply_from * 32 + kMultiplyThreads; }
  [[nodiscard]] constexpr int store_from() const { return multiply_from - store_warps; }
  /// Whether a warp of its own fences what has been gathered.
  [[nodiscard]] constexpr bool has_fence_warp() const {
    return gather_warps > 0 && 1 + gather_warps < store_from();
  }
  /// Up to 384 threads each can have 168 registers, enough for every role. With 512 setmaxnreg
  /// shares them out; but ptxas counts on the 128 before it, and refuses instructions of 128 sums:
  /// it takes two of 64, which read the left operand twice. (By count shared memory is then the
  /// limit: they ask it for 96 bytes a cycle instead of 80, beside the 48 that come in, and it has
  /// 128.)
  [[nodiscard]] constexpr bool shares_registers() const { return threads() > 384; }
};
constexpr int kLoadRegisters = 72;
constexpr int kStoreRegisters = 120;
constexpr int kMultiplyRegisters = 160;
// Of the roles that share them, which have 512 threads.
static_assert((kLoadRegisters + kStoreRegisters + 2 * kMultiplyRegisters) * 128 <=
              launch_registers(512));

constexpr int kTileM = 128;
constexpr int kTileN = 256;
constexpr int kTileK = 64;
constexpr int kStages = 3;
constexpr int kBoxBytes = 64 * 128;
constexpr int kLeftBytes = kTileM / 64 * kBoxBytes;
constexpr int kRightBytes = kTileN / 64 * kBoxBytes;
constexpr int kStageBytes = kLeftBytes + kRightBytes;
// The loading warp may be as many units ahead as there are stages (each has a step at least), and
// one more is announced.
constexpr int kUnitSlots = 16;

/// A tile of 16-bit values between the warpgroups.
constexpr int kTileBytes = kTileM * kTileN * 2;

constexpr int kTileAt = kStages * kStageBytes;
constexpr int kUnitsAt = kTileAt + kTileBytes;
constexpr int kBarriersAt = kUnitsAt + kUnitSlots * 16;
constexpr int kNumBarriers = 3 * kStages + kUnitSlots + 2;
constexpr int kSharedBytes = kBarriersAt + kNumBarriers * 8;
static_assert(kSharedBytes <= 232448, "more shared memory than a CTA can have");

using Cursor = StageCursor<kStages>;

/// What every role knows.
template <Roles kRoles_>
struct Context {
  static constexpr Roles kRoles = kRoles_;

  std::uint32_t shared;
  std::uint32_t cta;  // of the two

  __device__ std::uint32_t left(const Cursor& c) const { return shared + c.stage * kStageBytes; }
  __device__ std::uint32_t right(const Cursor& c) const { return left(c) + kLeftBytes; }
  __device__ std::uint32_t barrier(std::uint32_t i) const { return shared + kBarriersAt + i * 8; }
  __device__ std::uint32_t full(const Cursor& c) const { return barrier(2 * c.stage); }
  __device__ std::uint32_t empty(const Cursor& c) const { return barrier(2 * c.stage + 1); }
  __device__ std::uint32_t gathered(const Cursor& c) const {
    return barrier(2 * kStages + c.stage);
  }
  __device__ std::uint32_t unit_known(std::uint32_t index) const {
    return barrier(3 * kStages + index % kUnitSlots);
  }
  __device__ std::uint32_t tile() const { return shared + kTileAt; }
  __device__ std::uint32_t tile_put() const { return barrier(3 * kStages + kUnitSlots); }
  __device__ std::uint32_t tile_stored() const { return barrier(3 * kStages + kUnitSlots + 1); }
  __device__ std::uint32_t unit(std::uint32_t index) const {
    return shared + kUnitsAt + index % kUnitSlots * 16;
  }

  /// One thread, before all others begin.
  __device__ void init() const {
    Cursor c;
    for (; c.stage < kStages; ++c.stage) {
      // The loading thread, and who fences what is gathered.
      ptx::mbarrier_init(full(c), 1 + (kRoles.has_fence_warp() ? 1 : kRoles.gather_warps));
      if (kRoles.has_fence_warp()) ptx::mbarrier_init(gathered(c), kRoles.gather_warps * 32);
      ptx::mbarrier_init(empty(c), 16);  // the warps of both CTAs that multiply
    }
    for (std::uint32_t i = 0; i < kUnitSlots; ++i) {
      ptx::mbarrier_init(unit_known(i), 1);
      rearm(i);
    }
    ptx::mbarrier_init(tile_put(), kMultiplyThreads / 32);
    ptx::mbarrier_init(tile_stored(), kRoles.store_warps);
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
  /// Which of the warps of its role this is.
  [[nodiscard]] static __device__ __forceinline__ int gather_warp() {
    return static_cast<int>(threadIdx.x) / 32 - 1;
  }
  [[nodiscard]] static __device__ __forceinline__ int store_warp() {
    return static_cast<int>(threadIdx.x) / 32 - kRoles.store_from();
  }
  [[nodiscard]] static __device__ __forceinline__ int multiply_warp() {
    return static_cast<int>(threadIdx.x) / 32 - kRoles.multiply_from;
  }
};

/// A gathering warp's part of kBoxes x 64 columns from `column` on of 64 rows, as boxes; zeros from
/// row `count` and column `cols` on. Row `i` is `source(i)` of the matrix.
template <int kBoxes, typename Context, typename T, typename Source>
__device__ __forceinline__ void gather_flat(const Context& context, std::uint32_t to,
                                            const T* matrix, std::int64_t cols, std::int64_t column,
                                            std::int32_t count, Source&& source) {
  constexpr int kChunks = kBoxes * 8;  // of a row
  constexpr int kRowsAtOnce = 32 / kChunks;
  constexpr int kRows = 64 / Context::kRoles.gather_warps;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int chunk = lane % kChunks;
  const bool exists = column + chunk * 8 < cols;
  const T* const from = matrix + column + chunk * 8;
#pragma unroll 8
  for (int turn = 0; turn < kRows / kRowsAtOnce; ++turn) {
    const int row = context.gather_warp() * kRows + turn * kRowsAtOnce + lane / kChunks;
    const std::int64_t at = source(row);
    const bool inside = exists && row < count;
    const std::uint32_t place = static_cast<std::uint32_t>(chunk / 8 * kBoxBytes) +
                                static_cast<std::uint32_t>(row * 128 + ((chunk ^ row) % 8 << 4));
    ptx::cp_async_16(to + place, inside ? from + at * cols : matrix, inside ? 16 : 0);
  }
}

/// What a gathering warp has under way. cp.async writes through the generic proxy and wgmma reads
/// through the async one: where no other warp does, it waits for each step when the next one is
/// asked for, fences and tells.
template <typename Context>
class Gathered {
 public:
  explicit __device__ Gathered(const Context& context) : context_(context) {}

  /// All copies into the stage are asked for.
  __device__ __forceinline__ void asked(const Cursor& stage) {
    if constexpr (Context::kRoles.has_fence_warp()) {
      ptx::cp_async_arrive(context_.gathered(stage));
    } else {
      ptx::cp_async_commit();
      if (pending_) {
        ptx::cp_async_wait<1>();
        tell();
      }
      last_ = stage;
      pending_ = true;
    }
  }
  /// There are no more.
  __device__ __forceinline__ void end() {
    if (!pending_) return;
    ptx::cp_async_wait<0>();
    tell();
  }

 private:
  __device__ __forceinline__ void tell() const {
    ptx::fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(context_.full(last_));
  }

  const Context& context_;
  Cursor last_;
  bool pending_ = false;
};

/// The warp that fences: one thread for all that gather.
template <typename Context, typename Steps>
__device__ __forceinline__ void run_fence(const Context& context, Steps&& steps_of) {
  if (threadIdx.x % 32 != 0) return;
  Cursor cursor;
  for (std::uint32_t index = 0;; ++index) {
    const int4 unit = context.receive(index);
    if (unit.x < 0) return;
    const int steps = steps_of(unit);
    for (int step = 0; step < steps; ++step, cursor.advance()) {
      ptx::mbarrier_wait(context.gathered(cursor), cursor.phase);
      ptx::fence_proxy_async();
      ptx::mbarrier_arrive(context.full(cursor));
    }
  }
}

/// sums += a * b over 16 along the sums (= where `add` is 0): one instruction, or two where
/// registers are shared out.
template <typename T, Roles kRoles, ptx::WgmmaTurned kTurned>
__device__ __forceinline__ void add_product(float (&sums)[kTileN / 2], std::uint64_t a,
                                            std::uint64_t b, std::uint32_t add) {
  if constexpr (kRoles.shares_registers()) {
    constexpr int kHalf = kTileN / 2;
    constexpr std::uint64_t kNextHalf = kRightBytes / 2 >> 4;
    ptx::wgmma<T, kHalf, kTurned>(reinterpret_cast<float(&)[kHalf / 2]>(sums), a, b, add);
    ptx::wgmma<T, kHalf, kTurned>(reinterpret_cast<float(&)[kHalf / 2]>(sums[kHalf / 2]), a,
                                  b + kNextHalf, add);
  } else {
    ptx::wgmma<T, kTileN, kTurned>(sums, a, b, add);
  }
}

/// One multiplying warpgroup: `store(unit, sums)` behind each unit. kDeep: the sums' index runs
/// along the left operand's rows.
template <typename T, bool kDeep, typename Context, typename Steps, typename Store>
__device__ __forceinline__ void run_multiply(const Context& context, Steps&& steps_of,
                                             Store&& store) {
  constexpr auto kTurned = kDeep ? ptx::WgmmaTurned::kB : ptx::WgmmaTurned::kBoth;
  constexpr std::uint64_t kLeftStep = kDeep ? 2 : ptx::kTurnedStep;
  const auto group = static_cast<std::uint32_t>(context.multiply_warp() / 4);
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
        add_product<T, Context::kRoles, kTurned>(
            sums, left + k * kLeftStep, right + k * ptx::kTurnedStep, k > 0 || step > 0 ? 1 : 0);
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

/// Each role runs until there are no more units.
template <typename Context, typename Load, typename Gather, typename Steps, typename Multiply,
          typename Store>
__device__ __forceinline__ void run_roles(const Context& context, Load&& load, Gather&& gather,
                                          Steps&& steps_of, Multiply&& multiply, Store&& store) {
  constexpr Roles kRoles = Context::kRoles;
  if (threadIdx.x == 0) context.init();
  ptx::cluster_sync();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp < kRoles.store_from()) {
    if constexpr (kRoles.shares_registers()) ptx::lower_registers<kLoadRegisters>();
    if (warp == 0) {
      load();
    } else if (warp <= kRoles.gather_warps) {
      gather();
    } else if (kRoles.has_fence_warp()) {
      run_fence(context, steps_of);
    }
  } else if (warp < kRoles.multiply_from) {
    if constexpr (kRoles.shares_registers()) ptx::lower_registers<kStoreRegisters>();
    store();
  } else {
    if constexpr (kRoles.shares_registers()) ptx::raise_registers<kMultiplyRegisters>();
    multiply();
  }
  __syncwarp();
  ptx::cluster_sync();  // nobody leaves while the other CTA may still write here
}

}  // namespace switchyard::backward::sm90

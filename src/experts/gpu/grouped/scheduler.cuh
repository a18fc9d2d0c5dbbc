#pragma once

// Hands out the units of grouped_schedule.hpp on the device. One warp walks over the experts'
// counts, 32 at a step, and writes each unit it gets into a ring in shared memory, one ahead of its
// use, so nobody else reads the counts. Units come from a counter (dynamic), or in turn where there
// is none.

#include "core/gpu/ptx.cuh"
#include "experts/gpu/grouped/schedule.hpp"

namespace switchyard {

constexpr int kRingSlots = 8;  ///< Slots are never checked for being free: all roles are at most
                               ///< the pipeline's stages (4), so 5 units, apart.
constexpr std::uint32_t kAllLanes = 0xFFFFFFFFU;

/// A unit as it travels: one 16-byte store.
struct UnitMessage {
  std::int32_t expert;  ///< -1: no more.
  std::int32_t row;     ///< First row in the layout.
  std::int32_t rows;
  std::int32_t column_tile_and_kind;
};

__device__ __forceinline__ int4 pack_message(std::int32_t expert, std::int32_t begin,
                                             const Unit& unit) {
  return {expert, begin + unit.row, unit.rows,
          unit.column_tile * 4 + static_cast<std::int32_t>(unit.kind)};
}

/// What one CTA does next.
struct Work {
  std::int32_t expert = -1;
  CtaTile tile;
};

__device__ __forceinline__ Work unpack_message(const int4& message, std::uint32_t cta) {
  const Unit unit{message.y, message.z, message.w / 4, static_cast<UnitKind>(message.w % 4)};
  return {message.x, tile_of(unit, static_cast<std::int32_t>(cta))};
}

struct ScheduleParams {
  const std::int32_t* expert_begin;  // [E+1]
  const std::int32_t* expert_rows;   // [E]
  std::int32_t num_experts;
  std::int32_t column_tiles;
  std::int32_t* counter;  // zero before and after the launch; null: units in turn
};

/// Where one lane of a walk stands. No initialisers: it may lie in shared memory.
struct WalkState {
  std::int32_t item;
  std::int32_t drawn;  // lane 0
  bool started;
  std::int32_t first_expert;
  std::int32_t step_begin;  // units before this step's 32 experts
  std::int32_t step_end;
  std::int32_t tail_begin;  // from here on an item is half a unit
  std::int32_t items_end;
  std::int32_t rows;
  std::int32_t begin;
  std::int32_t units_end;  // units up to and with this lane's expert
};

/// The walk of one warp over the units, in ascending order. kParts: 1 where a cluster takes a whole
/// unit, 2 where a CTA by itself takes what one of the two would do.
template <int kParts, typename Cut = StackCut<false>>
class UnitWalk {
 public:
  __device__ UnitWalk(const ScheduleParams& params, std::int32_t worker, std::int32_t num_workers)
      : params_(params), num_workers_(num_workers), at_{.item = worker} {
    load();
  }

  /// Goes on from where another stood, which state() tells.
  __device__ UnitWalk(const ScheduleParams& params, const WalkState& from, std::int32_t num_workers)
      : params_(params), num_workers_(num_workers), at_(from) {}
  [[nodiscard]] __device__ __forceinline__ const WalkState& state() const { return at_; }

  /// Which of a unit's CTAs the last next() was for.
  [[nodiscard]] __device__ __forceinline__ std::int32_t part() const { return at_.item % kParts; }

  /// The next unit. All lanes call it together and get the same.
  __device__ __forceinline__ int4 next() {
    while (true) {
      if (at_.started) advance();
      at_.started = true;
      while (at_.item / kParts >= at_.items_end) {
        if (at_.first_expert + 32 >= params_.num_experts) return finish();
        at_.first_expert += 32;
        at_.step_begin = at_.step_end;
        load();
      }
      const std::int32_t in_tail = at_.item / kParts - at_.tail_begin;
      const std::int32_t index = in_tail < 0 ? at_.item / kParts : at_.tail_begin + in_tail / 2;
      const std::uint32_t hit = __ballot_sync(kAllLanes, index < at_.units_end);
      const int lane = __ffs(static_cast<int>(hit)) - 1;
      const std::int32_t rows = __shfl_sync(kAllLanes, at_.rows, lane);
      const std::int32_t begin = __shfl_sync(kAllLanes, at_.begin, lane);
      const std::int32_t units_end = __shfl_sync(kAllLanes, at_.units_end, lane);
      Unit unit = Cut::unit_at(index - (units_end - Cut::units_of(rows, params_.column_tiles)),
                               rows, params_.column_tiles);
      // The answer is not looked at before the next call, a tile later.
      if (params_.counter != nullptr && threadIdx.x % 32 == 0) {
        at_.drawn = atomicAdd(params_.counter, 1);
      }
      if (kHalves && in_tail >= 0) {
        unit = half_of(unit, in_tail % 2);
        if (unit.rows == 0) continue;
      }
      return pack_message(at_.first_expert + lane, begin, unit);
    }
  }

 private:
  static constexpr bool kHalves = kParts == 1 && Cut::kHalves;

  __device__ __forceinline__ void advance() {
    at_.item = params_.counter == nullptr ? at_.item + num_workers_
                                          : __shfl_sync(kAllLanes, at_.drawn, 0) + num_workers_;
  }

  /// Every worker that began with an item fails to draw one just once, so there are as many draws
  /// as items; who made the last one leaves the counter as it was found.
  __device__ __forceinline__ int4 finish() {
    const bool drew_last = at_.item - num_workers_ == at_.items_end * kParts - 1;
    if (params_.counter != nullptr && drew_last && threadIdx.x % 32 == 0) *params_.counter = 0;
    return {-1, 0, 0, 0};
  }

  /// Counts of 32 experts, one a lane, and the running sum of their units.
  __device__ __forceinline__ void load() {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const std::int32_t expert = at_.first_expert + lane;
    const bool exists = expert < params_.num_experts;
    at_.rows = exists ? params_.expert_rows[expert] : 0;
    at_.begin = exists ? params_.expert_begin[expert] : 0;
    at_.units_end = Cut::units_of(at_.rows, params_.column_tiles);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const std::int32_t before = __shfl_up_sync(kAllLanes, at_.units_end, distance);
      if (lane >= distance) at_.units_end += before;
    }
    at_.units_end += at_.step_begin;
    at_.step_end = __shfl_sync(kAllLanes, at_.units_end, 31);
    at_.tail_begin = at_.step_end;
    if (kHalves && at_.first_expert + 32 >= params_.num_experts) halve_last_turn();
    at_.items_end = 2 * at_.step_end - at_.tail_begin;
  }

  /// Where no more than half of the workers have something to do in the last turn, each of its
  /// units is two items. (All experts are known by now. A turn that began in an earlier step stays
  /// whole: who was there took its units for whole ones.)
  __device__ __forceinline__ void halve_last_turn() {
    const std::int32_t left = at_.step_end % num_workers_;
    if (2 * left <= num_workers_ && at_.step_end - left >= at_.step_begin)
      at_.tail_begin = at_.step_end - left;
  }

  const ScheduleParams& params_;
  std::int32_t num_workers_;
  WalkState at_;
};

}  // namespace switchyard

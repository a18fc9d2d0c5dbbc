#pragma once

// Hands out the units of grouped_schedule.hpp on the device. One warp walks over the experts'
// counts, 32 at a step, and writes each unit it gets into a ring in shared memory, one ahead of its
// use, so nobody else reads the counts. Units come from a counter (dynamic), or in turn where there
// is none.

#include "core/ptx.cuh"
#include "experts/grouped_schedule.hpp"

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

/// The walk of one warp over the units, in ascending order. kParts: 1 where a cluster takes a whole
/// unit, 2 where a CTA by itself takes what one of the two would do.
template <int kParts, typename Cut = PairCut>
class UnitWalk {
 public:
  __device__ UnitWalk(const ScheduleParams& params, std::int32_t worker, std::int32_t num_workers)
      : params_(params), num_workers_(num_workers), item_(worker) {
    load();
  }

  /// Which of a unit's CTAs the last next() was for.
  [[nodiscard]] __device__ __forceinline__ std::int32_t part() const { return item_ % kParts; }

  /// The next unit. All lanes call it together and get the same.
  __device__ __forceinline__ int4 next() {
    if (started_) advance();
    started_ = true;
    while (item_ / kParts >= step_end_) {
      if (first_expert_ + 32 >= params_.num_experts) return finish();
      first_expert_ += 32;
      step_begin_ = step_end_;
      load();
    }
    const std::uint32_t hit = __ballot_sync(kAllLanes, item_ / kParts < units_end_);
    const int lane = __ffs(static_cast<int>(hit)) - 1;
    const std::int32_t rows = __shfl_sync(kAllLanes, rows_, lane);
    const std::int32_t begin = __shfl_sync(kAllLanes, begin_, lane);
    const std::int32_t units_end = __shfl_sync(kAllLanes, units_end_, lane);
    const std::int32_t index =
        item_ / kParts - (units_end - Cut::units_of(rows, params_.column_tiles));
    const int4 message =
        pack_message(first_expert_ + lane, begin, Cut::unit_at(index, rows, params_.column_tiles));
    // The answer is not looked at before the next call, a tile later.
    if (params_.counter != nullptr && threadIdx.x % 32 == 0) drawn_ = atomicAdd(params_.counter, 1);
    return message;
  }

 private:
  __device__ __forceinline__ void advance() {
    item_ = params_.counter == nullptr ? item_ + num_workers_
                                       : __shfl_sync(kAllLanes, drawn_, 0) + num_workers_;
  }

  /// Every worker that began with an item fails to draw one just once, so there are as many draws
  /// as items; who made the last one leaves the counter as it was found.
  __device__ __forceinline__ int4 finish() {
    const bool drew_last = item_ - num_workers_ == step_end_ * kParts - 1;
    if (params_.counter != nullptr && drew_last && threadIdx.x % 32 == 0) *params_.counter = 0;
    return {-1, 0, 0, 0};
  }

  /// Counts of 32 experts, one a lane, and the running sum of their units.
  __device__ __forceinline__ void load() {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const std::int32_t expert = first_expert_ + lane;
    const bool exists = expert < params_.num_experts;
    rows_ = exists ? params_.expert_rows[expert] : 0;
    begin_ = exists ? params_.expert_begin[expert] : 0;
    units_end_ = Cut::units_of(rows_, params_.column_tiles);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const std::int32_t before = __shfl_up_sync(kAllLanes, units_end_, distance);
      if (lane >= distance) units_end_ += before;
    }
    units_end_ += step_begin_;
    step_end_ = __shfl_sync(kAllLanes, units_end_, 31);
  }

  const ScheduleParams& params_;
  std::int32_t num_workers_;
  std::int32_t item_;
  std::int32_t drawn_ = 0;  // lane 0
  bool started_ = false;
  std::int32_t first_expert_ = 0;
  std::int32_t step_begin_ = 0;  // units before this step's 32 experts
  std::int32_t step_end_ = 0;
  std::int32_t rows_ = 0;
  std::int32_t begin_ = 0;
  std::int32_t units_end_ = 0;  // units up to and with this lane's expert
};

}  // namespace switchyard

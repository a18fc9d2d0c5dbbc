#pragma once

// How units travel on Hopper: the walking warp is in a cluster's first CTA, the ring in both.

#include "core/gpu/ptx.cuh"
#include "experts/gpu/grouped/scheduler.cuh"

namespace switchyard {

/// The ring of units in shared memory, as everyone reads it.
class UnitRing {
 public:
  __device__ UnitRing(std::uint32_t messages, std::uint32_t barriers, std::uint32_t cta)
      : messages_(messages), barriers_(barriers), cta_(cta) {}

  /// One thread of the CTA, before the cluster's first barrier.
  __device__ void init() const {
    for (std::uint32_t slot = 0; slot < kRingSlots; ++slot) {
      ptx::mbarrier_init(barrier(slot), 1);
      ptx::mbarrier_arrive_expect(barrier(slot), sizeof(int4));
    }
  }

  /// The walking warp: unit number `index` for both CTAs.
  __device__ __forceinline__ void send(std::uint32_t index, const int4& message) const {
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t slot = index % kRingSlots;
    if (lane < 2) {
      ptx::store_async_16(ptx::map_to_cta(messages_ + slot * sizeof(int4), lane), message,
                          ptx::map_to_cta(barrier(slot), lane));
    }
  }

  __device__ __forceinline__ Work receive(std::uint32_t index) const {
    const std::uint32_t slot = index % kRingSlots;
    ptx::mbarrier_wait(barrier(slot), index / kRingSlots % 2);
    return unpack_message(ptx::load_shared_16(messages_ + slot * sizeof(int4)), cta_);
  }

  /// One thread of the CTA, once it has received unit `index`: the slot may be filled again.
  __device__ __forceinline__ void rearm(std::uint32_t index) const {
    ptx::mbarrier_arrive_expect(barrier(index % kRingSlots), sizeof(int4));
  }

 private:
  __device__ __forceinline__ std::uint32_t barrier(std::uint32_t slot) const {
    return barriers_ + slot * 8;
  }

  std::uint32_t messages_;
  std::uint32_t barriers_;
  std::uint32_t cta_;
};

}  // namespace switchyard

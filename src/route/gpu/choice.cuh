#pragma once

// The choice of the largest keys among those that lanes of a token hold, neighbouring experts each.

#include "route/gpu/route_kernel.cuh"

namespace switchyard::routing {

/// The top_k largest keys, ties to the lower expert; lane k gets the k-th.
/// @tparam kRounds  Written out: where registers are short, one.
template <int kValues, int kLanes, int kRounds = 2>
__device__ __forceinline__ int choose(int top_k, int lane, std::uint32_t (&key)[kValues]) {
  int chosen = 0;
#pragma unroll kRounds
  for (int k = 0; k < top_k; ++k) {
    std::uint32_t best = key[0];
#pragma unroll
    for (int v = 1; v < kValues; ++v) best = max(best, key[v]);
    const std::uint32_t top = Lanes<kLanes>::max(best);
    const int owner = Lanes<kLanes>::first(best == top);
    int place = 0;
#pragma unroll
    for (int v = kValues - 1; v >= 0; --v) place = key[v] == top ? v : place;
    const int id = owner * kValues + Lanes<kLanes>::from(place, owner);
    if (lane == k) chosen = id;
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      if (lane * kValues + v == id) key[v] = 0;
    }
  }
  return chosen;
}

/// The same for top_k <= 2: a lane looks through its values once.
template <int kValues, int kLanes>
__device__ __forceinline__ int choose_two(int top_k, int lane,
                                          const std::uint32_t (&key)[kValues]) {
  std::uint32_t first = key[0];
  std::uint32_t second = 0;
  int place = 0;
  int next = 0;
#pragma unroll
  for (int v = 1; v < kValues; ++v) {
    const bool higher = key[v] > first;
    const bool between = key[v] > second;
    second = higher ? first : between ? key[v] : second;
    next = higher ? place : between ? v : next;
    first = higher ? key[v] : first;
    place = higher ? v : place;
  }
  int chosen = 0;
  for (int k = 0; k < top_k; ++k) {
    const std::uint32_t top = Lanes<kLanes>::max(first);
    const int owner = Lanes<kLanes>::first(first == top);
    const int id = owner * kValues + Lanes<kLanes>::from(place, owner);
    if (lane == k) chosen = id;
    if (lane == owner) {
      first = second;
      place = next;
    }
  }
  return chosen;
}

}  // namespace switchyard::routing

#pragma once

// The choice of the largest keys among those that lanes of a token hold, neighbouring experts each.

#include "route/gpu/route_kernel.cuh"

namespace switchyard::routing {

template <typename Key>
struct Chosen {
  int expert;   ///< Of lane k the k-th.
  Key largest;  ///< Of all.
};

/// The top_k largest keys, ties to the lower expert.
/// @tparam kRounds  Written out: where registers are short, one.
template <int kValues, int kLanes, int kRounds = 2>
__device__ __forceinline__ Chosen<std::uint32_t> choose(int top_k, int lane,
                                                        std::uint32_t (&key)[kValues]) {
  Chosen<std::uint32_t> chosen{0, 0};
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
    if (lane == k) chosen.expert = id;
    chosen.largest = max(chosen.largest, top);
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      if (lane * kValues + v == id) key[v] = 0;
    }
  }
  return chosen;
}

/// The same for top_k <= 2: a lane looks through its values once. Keys are whole numbers, or floats
/// without a NaN, two a lane or more.
template <int kValues, int kLanes, typename Key>
__device__ __forceinline__ Chosen<Key> choose_two(int top_k, int lane, const Key (&key)[kValues]) {
  static_assert(kValues > 1);
  const bool swap = key[1] > key[0];
  Key first = swap ? key[1] : key[0];
  Key second = swap ? key[0] : key[1];
  int place = swap ? 1 : 0;
  int next = swap ? 0 : 1;
#pragma unroll
  for (int v = 2; v < kValues; ++v) {
    const bool higher = key[v] > first;
    const bool between = key[v] > second;
    second = higher ? first : between ? key[v] : second;
    next = higher ? place : between ? v : next;
    first = higher ? key[v] : first;
    place = higher ? v : place;
  }
  Chosen<Key> chosen{0, first};
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    if (k >= top_k) break;
    const Key top = Lanes<kLanes>::max(first);
    const int owner = Lanes<kLanes>::first(first == top);
    const int id = owner * kValues + Lanes<kLanes>::from(place, owner);
    if (lane == k) chosen.expert = id;
    if (k == 0) chosen.largest = top;
    if (lane == owner) {
      first = second;
      place = next;
    }
  }
  return chosen;
}

}  // namespace switchyard::routing

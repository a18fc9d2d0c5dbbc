#pragma once

// A token's row of logits before a warp, for rules that look at experts in the order of their
// scores: lane l has experts l, l + 32, ... and reads them from the cache in every pass, so that a
// row may be of any length and there is one kernel a rule.

#include "route/draws.hpp"
#include "route/gpu/route_kernel.cuh"

namespace switchyard::routing {

using Warp = Lanes<32>;

/// Lanes of the warp before this one.
__device__ __forceinline__ unsigned lanes_before() { return (1U << Warp::lane()) - 1; }

struct RankedRow {
  const float* x;
  int size;

  struct Place {
    std::uint32_t key;  ///< 0: none.
    int expert;
  };
  /// Above all.
  static __device__ __forceinline__ Place top() { return {kAll, -1}; }

  /// The lowest expert whose logit is NaN, or `size`. Every lane gets it, here and below.
  [[nodiscard]] __device__ __forceinline__ int lowest_nan() const {
    auto nan = static_cast<unsigned>(size);
    for (int e = Warp::lane(); e < size; e += 32) {
      if (isnan(x[e])) nan = min(nan, static_cast<unsigned>(e));
    }
    return static_cast<int>(__reduce_min_sync(kAll, nan));
  }

  /// The largest score(e) of those with takes(e, its key), ties to the lower expert.
  template <typename Score, typename Takes>
  [[nodiscard]] __device__ __forceinline__ Place best(const Score& score,
                                                      const Takes& takes) const {
    Place mine{0, 0};
    for (int e = Warp::lane(); e < size; e += 32) {
      const std::uint32_t key = to_key(score(e));
      if (key > mine.key && takes(e, key)) mine = {key, e};
    }
    const std::uint32_t key = __reduce_max_sync(kAll, mine.key);
    const unsigned lowest = key == mine.key ? static_cast<unsigned>(mine.expert) : kAll;
    return {key, static_cast<int>(__reduce_min_sync(kAll, lowest))};
  }

  /// The next in descending order of the logits, behind that at `before`.
  [[nodiscard]] __device__ __forceinline__ Place after(Place before) const {
    return best([this](int e) { return x[e]; },
                [before](int e, std::uint32_t key) {
                  return key < before.key || (key == before.key && e > before.expert);
                });
  }

  [[nodiscard]] __device__ __forceinline__ float largest() const {
    float most = kMinusInf;
    for (int e = Warp::lane(); e < size; e += 32) most = fmaxf(most, x[e]);
    return Warp::max(most);
  }
};

/// A token's softmax over all experts.
struct Probabilities {
  const float* x;
  float largest, sum;

  __device__ __forceinline__ explicit Probabilities(const RankedRow& row)
      : x(row.x), largest(row.largest()) {
    float mine = 0.0F;
    for (int e = Warp::lane(); e < row.size; e += 32) mine += exp_below(x[e], largest);
    sum = Warp::sum(mine);
  }
  __device__ __forceinline__ float of(int expert) const {
    return exp_below(x[expert], largest) / sum;
  }
};

/// Where a token's experts and weights go: `columns` places.
struct RowPlaces {
  std::int32_t* expert;
  float* weight;
  int columns;

  __device__ __forceinline__ void put(int place, int e, float w) const {
    expert[place] = e;
    weight[place] = w;
  }
  /// Nobody from `used` on.
  __device__ __forceinline__ void leave(int used) const {
    for (int k = used + Warp::lane(); k < columns; k += 32) put(k, -1, 0.0F);
  }
};

/// GShardRouter as kernels read it.
struct TopTwoRule {
  GShardRouter::Second second;
  float threshold;
  bool sampled;   ///< The second is drawn,
  bool training;  ///< or may be left out by chance.
  Draws gumbel, keep;

  struct Choice {
    int first, second;
    float weight[2];  ///< Softmax over both logits.
    bool keeps_second;
  };

  __device__ __forceinline__ Choice choose(const RankedRow& row, std::int64_t token) const {
    Choice choice{};
    choice.first = row.after(RankedRow::top()).expert;
    const auto score = [&](int e) {
      if (!sampled) return row.x[e];
      return __fadd_rn(row.x[e], gumbel_of(gumbel.unit(token, static_cast<std::uint32_t>(e))));
    };
    const auto others = [&](int e, std::uint32_t /*key*/) { return e != choice.first; };
    choice.second = row.best(score, others).expert;
    const float ratio = exp_below(row.x[choice.second], row.x[choice.first]);
    choice.weight[0] = 1.0F / (1.0F + ratio);
    choice.weight[1] = ratio / (1.0F + ratio);
    choice.keeps_second = keeps(choice.weight[1], token);
    return choice;
  }

 private:
  __device__ __forceinline__ bool keeps(float weight, std::int64_t token) const {
    if (second == GShardRouter::Second::kAll) return true;
    if (second == GShardRouter::Second::kThreshold) return weight > threshold;
    return !training || weight > __fmul_rn(threshold, keep.unit(token, 0));
  }
};

[[nodiscard]] inline TopTwoRule top_two_rule(const GShardRouter& router,
                                             const RouteRequest& request) {
  return {.second = router.second,
          .threshold = router.threshold,
          .sampled = router.sampled && request.training,
          .training = request.training,
          .gumbel = Draws(request, Draws::For::kSecond),
          .keep = Draws(request, Draws::For::kKeepSecond)};
}

}  // namespace switchyard::routing

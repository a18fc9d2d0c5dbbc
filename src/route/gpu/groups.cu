// Selection of 8 of 256 experts by sigmoid and bias from at most 4 of 8 groups (DeepSeek-V3). Bound
// by instructions. A warp takes a token; once the groups are known, their experts are dealt out
// anew, four a lane and sorted, so that a round of the choice is one maximum over the lanes and one
// step of a list. The weights of four tokens are one warp's work. The same keys are compared in the
// same order as in route.cu.
#include "core/gpu/cuda_device.hpp"
#include "route/gpu/groups.hpp"
#include "route/gpu/route_kernel.cuh"

namespace switchyard::routing {
namespace {

constexpr int kExperts = 256;
constexpr int kGroups = 8;
constexpr int kGroupExperts = kExperts / kGroups;
constexpr int kTopK = 8;
constexpr int kTokens = 16;  // of a block: a warp each
constexpr int kThreads = 32 * kTokens;
constexpr int kNoNan = kExperts;

/// What one lane has of a token: experts 4 lane + v in [0], 128 + 4 lane + v in [1].
struct Scores {
  float of[2][4];

  __device__ __forceinline__ void load(const float* row, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 x = *reinterpret_cast<const float4*>(row + 128 * half + 4 * lane);
      of[half][0] = x.x, of[half][1] = x.y, of[half][2] = x.z, of[half][3] = x.w;
    }
  }
};

/// The lowest expert whose logit is NaN, or kNoNan. The sum also is NaN where both infinities are.
__device__ __forceinline__ int find_nan(const Scores& x, int lane) {
  float sum = 0.0F;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum += (x.of[half][0] + x.of[half][1]) + (x.of[half][2] + x.of[half][3]);
  }
  if (!__any_sync(kAll, isnan(sum))) return kNoNan;
  int nan = kNoNan;
#pragma unroll
  for (int i = 7; i >= 0; --i) {
    if (isnan(x.of[i / 4][i % 4])) nan = 128 * (i / 4) + 4 * lane + i % 4;
  }
  return static_cast<int>(__reduce_min_sync(kAll, static_cast<unsigned>(nan)));
}

struct Best {
  float first, second;

  __device__ __forceinline__ explicit Best(const float (&x)[4]) {
    const float above = fmaxf(x[0], x[1]);
    const float below = fmaxf(x[2], x[3]);
    first = fmaxf(above, below);
    second = fmaxf(fminf(above, below), fmaxf(fminf(x[0], x[1]), fminf(x[2], x[3])));
  }
  __device__ __forceinline__ void merge(float other_first, float other_second) {
    second = fmaxf(fmaxf(second, other_second), fminf(first, other_first));
    first = fmaxf(first, other_first);
  }
};

/// The score of a group: even lanes get that of group lane / 8, odd ones of group 4 + lane / 8.
__device__ __forceinline__ float score_groups(const Scores& x, int lane, GroupScore how) {
  const Best low(x.of[0]);
  const Best high(x.of[1]);
  const bool odd = lane % 2 != 0;
  Best mine = odd ? high : low;
  const Best other = odd ? low : high;
  mine.merge(__shfl_xor_sync(kAll, other.first, 1), __shfl_xor_sync(kAll, other.second, 1));
#pragma unroll
  for (int offset = 2; offset < 8; offset *= 2) {
    mine.merge(__shfl_xor_sync(kAll, mine.first, offset),
               __shfl_xor_sync(kAll, mine.second, offset));
  }
  return how == GroupScore::kMax ? mine.first : group_sum(mine.first, mine.second);
}

/// The groups that may be chosen from, in ascending order one for each 8 lanes; -1: none.
__device__ __forceinline__ int deal_groups(float score, int lane, int top_groups) {
  // A lane compares one group with two others: all 64 pairs in one step.
  const int group = lane % kGroups;
  const int low = lane / kGroups;
  const int high = low + 4;
  const float mine = __shfl_sync(kAll, score, (group % 4) * 8 + group / 4);
  const float its_low = __shfl_sync(kAll, score, lane & 24);
  const float its_high = __shfl_sync(kAll, score, (lane & 24) | 1);
  const unsigned by_low = __ballot_sync(kAll, its_low > mine || (its_low == mine && low < group));
  const unsigned by_high =
      __ballot_sync(kAll, its_high > mine || (its_high == mine && high < group));
  const unsigned column = 0x01010101U << group;
  const bool taken = __popc(by_low & column) + __popc(by_high & column) < top_groups;
  const unsigned all = __ballot_sync(kAll, taken);  // the same 8 bits four times
  const int place = __popc(all & ((1U << group) - 1));
  const unsigned here = __ballot_sync(kAll, taken && place == low) >> (lane & 24) & 0xffU;
  return 31 - __clz(static_cast<int>(here));
}

/// Four experts of a lane in descending order of their keys, ties by expert.
struct List {
  std::uint32_t key[4];
  std::uint32_t experts;  // a byte each

  __device__ __forceinline__ List(const Scores& x, int lane, int group) {
    const int from = (group % 4) * 8 + lane % 8;
    std::uint32_t place[4] = {0, 1, 2, 3};
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      const float low = __shfl_sync(kAll, x.of[0][v], from & 31);
      const float high = __shfl_sync(kAll, x.of[1][v], from & 31);
      key[v] = group < 0 ? 0 : to_key(group < 4 ? low : high);
    }
    // Only neighbours change places: equal keys keep their order.
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int v = step % 2; v + 1 < 4; v += 2) {
        const bool swap = key[v] < key[v + 1];
        const std::uint32_t k = key[v];
        const std::uint32_t at = place[v];
        key[v] = swap ? key[v + 1] : k;
        place[v] = swap ? place[v + 1] : at;
        key[v + 1] = swap ? k : key[v + 1];
        place[v + 1] = swap ? at : place[v + 1];
      }
    }
    const std::uint32_t first = static_cast<std::uint32_t>(group * kGroupExperts + lane % 8 * 4);
    experts = (first & 0xffU) * 0x01010101U +
              (place[0] | place[1] << 8 | place[2] << 16 | place[3] << 24);
  }

  __device__ __forceinline__ void drop_first() {
#pragma unroll
    for (int v = 0; v < 3; ++v) key[v] = key[v + 1];
    key[3] = 0;
    experts >>= 8;
  }
};

__global__ void __launch_bounds__(kThreads)
    route_groups_kernel(const __grid_constant__ RouteParams p) {
  __shared__ std::uint8_t chosen[kTokens][kTopK];
  __shared__ int nan_of[kTokens];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int first_token = static_cast<int>(blockIdx.x) * kTokens;
  const TopKRule& config = p.config;
  ptx::start_after_previous_kernel();
  {
    // Warps without a token go along with the last one and write nothing.
    const int token = min(first_token + warp, p.num_tokens - 1);
    Scores x;
    x.load(p.logits + std::int64_t{token} * kExperts, lane);
    Scores bias{};
    if (p.selection_bias != nullptr) bias.load(p.selection_bias, lane);
    const int nan = find_nan(x, lane);
    if (lane == 0) nan_of[warp] = nan;
    if (p.top_score != nullptr) {
      float largest = kMinusInf;
#pragma unroll
      for (int i = 0; i < 8; ++i) largest = fmaxf(largest, x.of[i / 4][i % 4]);
      largest = Lanes<32>::max(largest);
      if (lane == 0 && first_token + warp < p.num_tokens) {
        p.top_score[token] = nan != kNoNan ? 0.0F : sigmoid(largest);
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x.of[i / 4][i % 4] = fast_sigmoid(x.of[i / 4][i % 4]) + bias.of[i / 4][i % 4];
    }
    const int group =
        deal_groups(score_groups(x, lane, config.group_score), lane, config.top_groups);
    List list(x, lane, group);
    const unsigned lower = (1U << lane) - 1;
#pragma unroll
    for (int k = 0; k < kTopK; ++k) {
      const std::uint32_t top = __reduce_max_sync(kAll, list.key[0]);
      const bool is = list.key[0] == top;
      if ((__ballot_sync(kAll, is) & lower) == 0 && is) {
        chosen[warp][k] = static_cast<std::uint8_t>(list.experts);
        list.drop_first();
      }
    }
  }
  __syncthreads();
  if (warp >= kTokens / 4) return;
  const int place = 4 * warp + lane / kTopK;
  const int token = first_token + place;
  const bool active = token < p.num_tokens;
  const std::int64_t row = min(token, p.num_tokens - 1);
  const int expert = chosen[place][lane % kTopK];
  const int nan = nan_of[place];
  const float logit = p.logits[row * kExperts + expert];
  const float weight = weigh_sigmoid<kTopK>(config, logit, true, false) * config.scale;
  if (!active) return;
  const bool broken = nan != kNoNan;
  p.expert[row * kTopK + lane % kTopK] = broken ? -1 : expert;
  p.weight[row * kTopK + lane % kTopK] = broken ? 0.0F : weight;
  if (broken && lane % kTopK == 0) report_nan(p.status, token, nan);
}

std::optional<std::string> reject(const RouteArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  if (auto reason = reject_room(args)) return reason;
  if (!takes_groups(args)) {
    return "only for 8 of 256 experts by sigmoid and bias, of at most 4 of 8 groups";
  }
  if (!is_aligned_16(args.logits.data)) return "logits are not aligned to 16 bytes";
  return std::nullopt;
}

void run(const RouteArgs& args) {
  const RouteParams params = params_of(args);
  if (params.num_tokens == 0) return;
  const auto blocks = static_cast<unsigned>((params.num_tokens + kTokens - 1) / kTokens);
  launch_overlapped(route_groups_kernel, blocks, kThreads, 0,
                    static_cast<cudaStream_t>(args.execution.stream), params);
}

}  // namespace
}  // namespace switchyard::routing

namespace switchyard {

const Implementation<RouteArgs> kRouteCudaGroups{"cuda.groups", routing::reject, routing::run};

}  // namespace switchyard

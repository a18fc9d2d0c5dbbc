// Top-k where each expert has room for so many tokens: what a token finds is what those before it
// have left. One block; each of its warps chooses for one of the next tokens by the room that there
// is now, then one warp takes the choices in order. They are right up to the first that fills an
// expert: those behind it are made again. Bound by latency: as many rounds as tokens over warps,
// and one more for each expert that fills.
#include <algorithm>
#include <limits>

#include "core/gpu/cuda_device.hpp"
#include "route/gpu/ranked_row.cuh"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

using namespace routing;

constexpr int kMostWarps = 16;
constexpr int kMaxTopK = 32;
constexpr int kMaxExperts = 1024;
constexpr float kFull = -1e30F;  // of an expert in the score of its group, below finite scores

struct RerouteParams {
  RouteParams route;
  std::int32_t room;  // of an expert
};

/// What a warp chooses by, in shared memory.
struct Candidates {
  std::uint32_t* key;        // [E]; 0: none, or taken
  std::uint32_t* group_key;  // [groups]; 0: chosen
  const std::int32_t* room;  // [E]

  struct Place {
    std::uint32_t key;
    int at;
  };
  /// The largest key of [0, size) that takes(i), ties to the lower place; every lane gets it.
  template <typename Takes>
  static __device__ __forceinline__ Place largest(const std::uint32_t* keys, int size,
                                                  const Takes& takes) {
    Place mine{0, 0};
    for (int i = Warp::lane(); i < size; i += 32) {
      const std::uint32_t key = keys[i];
      if (key > mine.key && takes(i)) mine = {key, i};
    }
    const std::uint32_t most = __reduce_max_sync(kAll, mine.key);
    const unsigned lowest = most == mine.key ? static_cast<unsigned>(mine.at) : kAll;
    return {most, static_cast<int>(__reduce_min_sync(kAll, lowest))};
  }
  static __device__ __forceinline__ void take(std::uint32_t* keys, int at) {
    __syncwarp();
    if (Warp::lane() == 0) keys[at] = 0;
    __syncwarp();
  }
};

/// One token's scores, and its choice by the room that experts have.
struct TokenChoice {
  const RouteParams& p;
  RankedRow row;
  Candidates among;
  float largest = 0.0F, sum = 0.0F;

  [[nodiscard]] __device__ __forceinline__ float score(int e) const {
    float x = row.x[e];
    if (p.by_logit) return x;
    if (p.config.score == Score::kSoftmax) x = exp_below(x, largest) / sum;
    if (p.config.score == Score::kSigmoid) x = sigmoid(x);
    return p.selection_bias == nullptr ? x : x + p.selection_bias[e];
  }

  __device__ __forceinline__ void weigh_all() {
    largest = row.largest();
    if (p.config.score == Score::kSigmoid) return;
    float mine = 0.0F;
    for (int e = Warp::lane(); e < row.size; e += 32) mine += exp_below(row.x[e], largest);
    sum = Warp::sum(mine);
  }

  [[nodiscard]] __device__ __forceinline__ float score_of_group(int group, int width) const {
    float first = kMinusInf;
    float second = kMinusInf;
    for (int e = group * width; e < (group + 1) * width; ++e) {
      const float x = among.room[e] > 0 ? score(e) : kFull;
      second = fmaxf(second, fminf(first, x));
      first = fmaxf(first, x);
    }
    const bool alone = p.config.group_score == GroupScore::kMax || width == 1;
    return alone ? first : group_sum(first, second);
  }

  __device__ __forceinline__ void choose_groups() const {
    const int groups = p.config.groups;
    for (int g = Warp::lane(); g < groups; g += 32) {
      among.group_key[g] = to_key(score_of_group(g, row.size / groups));
    }
    for (int i = 0; i < p.config.top_groups; ++i) {
      __syncwarp();
      const auto best = Candidates::largest(among.group_key, groups, [](int) { return true; });
      Candidates::take(among.group_key, best.at);
    }
  }

  /// Lane k gets the k-th expert. @returns how many of them have room: the first ones.
  __device__ __forceinline__ int choose(int& mine) const {
    const bool grouped = p.config.top_groups < p.config.groups;
    const int width = row.size / p.config.groups;
    if (grouped) choose_groups();
    for (int e = Warp::lane(); e < row.size; e += 32) {
      const bool is = !grouped || among.group_key[e / width] == 0;
      among.key[e] = is ? to_key(score(e)) : 0;
    }
    int with_room = 0;
    for (int k = 0; k < p.config.top_k; ++k) {
      __syncwarp();
      auto best =
          Candidates::largest(among.key, row.size, [this](int e) { return among.room[e] > 0; });
      if (best.key != 0) {
        ++with_room;
      } else {
        best = Candidates::largest(among.key, row.size, [](int) { return true; });
      }
      if (Warp::lane() == k) mine = best.at;
      Candidates::take(among.key, best.at);
    }
    return with_room;
  }
};

/// What the warps have chosen, until that is taken.
struct Chosen {
  std::int32_t expert[kMostWarps][kMaxTopK];
  std::int32_t with_room[kMostWarps];
  std::int32_t taken;  // tokens whose choice is right

  /// By one warp: takes the room of `count` tokens in order, up to one that leaves an expert none.
  __device__ __forceinline__ void take(std::int32_t* room, int count) {
    int done = 0;
    bool fills = false;
    while (done < count && !fills) {
      const bool takes = Warp::lane() < with_room[done];
      bool is_last = false;
      if (takes) is_last = --room[expert[done][Warp::lane()]] == 0;
      __syncwarp();
      fills = Warp::any(is_last);
      ++done;
    }
    if (Warp::lane() == 0) taken = done;
  }
};

__device__ __forceinline__ void route_token(const RouteParams& p, int token,
                                            const Candidates& among, Chosen& chosen, int warp) {
  const int lane = Warp::lane();
  const int num_experts = p.config.num_experts;
  TokenChoice choice{
      .p = p, .row = {p.logits + std::int64_t{token} * num_experts, num_experts}, .among = among};
  const RowPlaces to{p.expert + std::int64_t{token} * p.config.top_k,
                     p.weight + std::int64_t{token} * p.config.top_k, p.config.top_k};
  const int nan = choice.row.lowest_nan();
  if (nan != num_experts) {
    to.leave(0);
    if (lane != 0) return;
    chosen.with_room[warp] = 0;
    report_nan(p.status, token, nan);
    return;
  }
  choice.weigh_all();
  int mine = 0;
  const int with_room = choice.choose(mine);
  const bool is = lane < p.config.top_k;
  const float logit = is ? choice.row.x[mine] : 0.0F;
  // Behind experts with room may come others with larger logits.
  const float weight =
      weigh<32>(p.config, logit, is, choice.largest, choice.sum, false) * p.config.scale;
  if (is) {
    to.put(lane, mine, weight);
    chosen.expert[warp][lane] = mine;
  }
  if (lane != 0) return;
  chosen.with_room[warp] = with_room;
  if (p.top_score == nullptr) return;
  p.top_score[token] =
      p.config.score == Score::kSigmoid ? sigmoid(choice.largest) : 1.0F / choice.sum;
}

__global__ void __launch_bounds__(kMostWarps * 32)
    reroute_kernel(const __grid_constant__ RerouteParams params) {
  extern __shared__ std::uint32_t memory[];
  __shared__ Chosen chosen;
  const RouteParams& p = params.route;
  const int num_experts = p.config.num_experts;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  auto* const room = reinterpret_cast<std::int32_t*>(memory);
  std::uint32_t* const key = memory + num_experts + warp * (num_experts + p.config.groups);
  const Candidates among{.key = key, .group_key = key + num_experts, .room = room};
  for (int e = static_cast<int>(threadIdx.x); e < num_experts; e += static_cast<int>(blockDim.x)) {
    room[e] = params.room;
  }
  __syncthreads();
  for (int first = 0; first < p.num_tokens; first += chosen.taken) {
    const int count = min(warps, p.num_tokens - first);
    if (warp < count) route_token(p, first + warp, among, chosen, warp);
    __syncthreads();
    if (warp == 0) chosen.take(room, count);
    __syncthreads();
  }
}

std::optional<std::string> reject(const RouteArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  if (args.room == 0) return "is for experts with room for so many tokens";
  if (args.config.num_experts > kMaxExperts) return "num_experts exceeds 1024";
  if (args.config.top_k() > kMaxTopK) return "top_k exceeds 32";
  return std::nullopt;
}

void run(const RouteArgs& args) {
  const RerouteParams params{.route = params_of(args),
                             .room = static_cast<std::int32_t>(std::min<std::int64_t>(
                                 args.room, std::numeric_limits<std::int32_t>::max()))};
  if (params.route.num_tokens == 0) return;
  const TopKRule& rule = params.route.config;
  const int most = allow_most_shared_memory(reinterpret_cast<const void*>(reroute_kernel));
  const int of_block = 4 * rule.num_experts;
  const int of_warp = 4 * (rule.num_experts + rule.groups);
  const int warps = std::clamp((most - of_block) / of_warp, 1, kMostWarps);
  reroute_kernel<<<1, static_cast<unsigned>(warps * 32),
                   static_cast<std::size_t>(of_block + warps * of_warp),
                   static_cast<cudaStream_t>(args.execution.stream)>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace

const Implementation<RouteArgs> kRouteCudaReroute{"cuda.reroute", reject, run};

}  // namespace switchyard

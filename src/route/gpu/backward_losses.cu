// As backward.cu, with the gradient of auxiliary losses in the same pass: lanes of a token hold its
// row of logits in registers, read it once and write dlogits once. What belongs to the chosen
// experts changes hands in shared memory. Bound by memory, and near it by instructions: so of many
// tokens a warp has several, which share those of sums over lanes, and fetches the next ones while
// it computes.
#include <algorithm>

#include "core/gpu/cuda_device.hpp"
#include "route/gpu/losses_backward.hpp"
#include "route/gpu/token_row.cuh"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

using namespace routing;

constexpr int threads_for(int values) { return values <= 8 ? 512 : 256; }
constexpr int blocks_for(int values) { return values <= 16 ? 2 : 1; }  // of a multiprocessor
constexpr int kMaxExperts = 1024;
constexpr int kMaxTopK = 32;
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 30;

struct Params {
  const float* logits;         // [T, E]
  const std::int32_t* expert;  // [T, K]
  const float* dweight;        // [T, K]
  const float* price;          // [S, E]
  float* dlogits;              // [T, E]
  DeviceStatus* status;        // or null
  std::int32_t num_tokens;
  std::int32_t per_group;  // tokens
  float z, entropy;
  TopKRule config;
  bool accumulate;
};

/// What a choice says of its expert's logit by shares of the chosen, as backward.cu.
template <int kLanes>
__device__ __forceinline__ float through_chosen(const Params& p, bool used, float logit,
                                                float gradient) {
  using Lane = Lanes<kLanes>;
  const bool sigmoids = p.config.score == Score::kSigmoid;
  if (sigmoids && !p.config.renormalize) {
    const float s = sigmoid(logit);
    return gradient * s * (1.0F - s);
  }
  const float largest = Lane::max(used ? logit : kMinusInf);
  const bool exponentials = !sigmoids || sigmoid(largest) < kSmallestNormal;
  float share = 0.0F;
  if (used) share = exponentials ? exp_below(logit, largest) : sigmoid(logit);
  // Both sums are under way together.
  const float mean = Lane::sum(gradient * share);
  const float all = Lane::sum(share);
  const float slope = sigmoids ? 1.0F - sigmoid(logit) : 1.0F;
  return share / all * slope * (gradient - mean / all);
}

/// Scores as shares of their sum, and the logits' softmax where it is another.
template <typename Row>
struct Shares {
  using Lane = typename Row::Lane;
  static constexpr int kValues = Row::kPlaces;

  float of[kValues];
  float largest, log_sum, of_softmax;
  bool sigmoids;  ///< of the token: where all of them underflow their shares are the softmax.

  __device__ __forceinline__ Shares(const Row& row, Score score) : largest(row.largest()) {
    float sum = 0.0F;
    if (__any_sync(kAll, isinf(largest))) {
      sum = row.sum_of(of, [&](float x) { return fast_exp_below(x, largest); });
    } else {
      // Where there is no expert, 2^-infinity is 0.
#pragma unroll
      for (int v = 0; v < kValues; ++v) {
        sum += of[v] = ptx::exp2_approx(1.44269504F * (row.x[v] - largest));
      }
      sum = Lane::sum(sum);
    }
    log_sum = __logf(sum);
    of_softmax = __fdividef(1.0F, sum);
    float reciprocal = of_softmax;
    sigmoids = score == Score::kSigmoid && sigmoid(largest) >= kSmallestNormal;
    if (__any_sync(kAll, sigmoids)) {
      float s[kValues];
      sum = row.sum_of(s, [](float x) { return sigmoid(x); });
      if (sigmoids) {
        reciprocal = 1.0F / sum;
#pragma unroll
        for (int v = 0; v < kValues; ++v) of[v] = s[v];
      }
    }
#pragma unroll
    for (int v = 0; v < kValues; ++v) of[v] *= reciprocal;
  }
  [[nodiscard]] __device__ __forceinline__ float surprise(const Row& row, int v) const {
    return sigmoids ? -logf(of[v]) : log_sum - (row.x[v] - largest);
  }
  [[nodiscard]] __device__ __forceinline__ float logsumexp() const { return largest + log_sum; }
};

/// @param of_experts  The token's memory, zeros there and back.
template <typename Row>
__device__ __forceinline__ void go_back(const Params& p, int token, bool active, const Row& row,
                                        float* of_experts) {
  using Lane = typename Row::Lane;
  constexpr int kValues = Row::kPlaces;
  const int num_experts = p.config.num_experts;
  const bool mine = Lane::lane() < p.config.top_k;
  const std::int64_t at = product(token, p.config.top_k) + Lane::lane();
  const int expert = mine ? p.expert[at] : -1;
  const float dweight = mine ? p.dweight[at] : 0.0F;
  const Shares<Row> share(row, p.config.score);
  const bool used = expert >= 0 && expert < num_experts;
  if (active && !used && expert != -1 && p.status != nullptr) atomicAdd(&p.status->bad_ids, 1U);
  const std::int64_t begin = product(token, num_experts);
  const float logit = used ? p.logits[begin + expert] : 0.0F;

  // What the choices say goes to their experts' lanes: of a softmax over all as one more price.
  const float gradient = used ? p.config.scale * dweight : 0.0F;
  const bool over_all = p.config.score == Score::kSoftmax && !p.config.renormalize;
  const float from_choice =
      over_all ? gradient : through_chosen<Row::kLaneCount>(p, used, logit, gradient);
  if (used) of_experts[expert] = from_choice;
  __syncwarp();
  Row choice;
  choice.load(of_experts, num_experts, 0.0F);
  __syncwarp();
  if (used) of_experts[expert] = 0.0F;

  const int group = p.per_group == p.num_tokens ? 0 : token / p.per_group;
  Row out;
  out.load(p.price + product(group, num_experts), num_experts, 0.0F);
  float mean = 0.0F;
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    if (over_all) out.x[v] += choice.x[v];
    if (p.entropy != 0.0F && share.of[v] > 0.0F) out.x[v] += p.entropy * share.surprise(row, v);
    mean += share.of[v] * out.x[v];
  }
  mean = Lane::sum(mean);
  const float of_z = 2.0F * p.z * share.logsumexp();
  if (p.config.score == Score::kSigmoid) {
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      const float x = row.x[v];
      const float softmax = fast_exp_below(x, share.largest) * share.of_softmax;
      out.x[v] = share.of[v] * (out.x[v] - mean) * (1.0F - sigmoid(x)) + of_z * softmax;
    }
  } else {
    const float less = of_z - mean;
#pragma unroll
    for (int v = 0; v < kValues; ++v) out.x[v] = share.of[v] * (out.x[v] + less);
  }
  if (!over_all) {
#pragma unroll
    for (int v = 0; v < kValues; ++v) out.x[v] += choice.x[v];
  }
  float* const dlogits = p.dlogits + begin;
  if (p.accumulate) {
    Row before;
    before.load(dlogits, num_experts);
#pragma unroll
    for (int v = 0; v < kValues; ++v) out.x[v] += before.x[v];
  }
  if (active) out.store(dlogits);
}

template <int kValues, int kLanes>
__global__ void __launch_bounds__(threads_for(kValues), blocks_for(kValues))
    route_backward_losses_kernel(const __grid_constant__ Params p) {
  using Row = TokenRow<kValues, kLanes>;
  constexpr int kTokens = threads_for(kValues) / kLanes;  // of a block at once
  constexpr bool kAhead = kValues <= 8;                   // registers have room for the next token
  __shared__ __align__(16) float memory[kTokens][kValues * kLanes];
  const int place = static_cast<int>(threadIdx.x) / kLanes;
  float* const of_experts = memory[place];
#pragma unroll
  for (int v = 0; v < kValues; ++v) of_experts[v * kLanes + Row::Lane::lane()] = 0.0F;
  __syncwarp();
  const int step = static_cast<int>(gridDim.x) * kTokens;
  const int last = p.num_tokens - 1;
  int own = static_cast<int>(blockIdx.x) * kTokens + place;
  // Of the block's lanes, which go on together.
  int left = (p.num_tokens - static_cast<int>(blockIdx.x) * kTokens + step - 1) / step;
  ptx::start_after_previous_kernel();
  // Lanes without a token go along with the last one and write nothing.
  const auto load = [&](Row& row, int token) {
    row.load(p.logits + product(token, p.config.num_experts), p.config.num_experts);
  };
  Row next;
  load(next, min(own, last));
  for (; left > 0; --left, own += step) {
    const Row now = next;
    const int after = min(own, last - step) + step;
    if (kAhead && left > 1) load(next, after);
    go_back(p, min(own, last), own <= last, now, of_experts);
    if (!kAhead && left > 1) load(next, after);
  }
}

Params losses_params(const RouteBackwardArgs& args, const TopKRule& rule, bool accumulate) {
  return {.logits = args.logits.data,
          .expert = args.expert.data,
          .dweight = args.dweight.data,
          .price = args.losses.score.data,
          .dlogits = args.dlogits.data,
          .status = args.execution.status,
          .num_tokens = static_cast<std::int32_t>(args.logits.shape[0]),
          .per_group = static_cast<std::int32_t>(args.logits.shape[0] / args.losses.score.shape[0]),
          .z = args.losses.z,
          .entropy = args.losses.entropy,
          .config = rule,
          .accumulate = accumulate};
}

void launch(const Params& params, void* stream) {
  if (params.num_tokens == 0) return;
  for_row_width(params.num_tokens, params.config.num_experts, params.config.top_k,
                [&]<int kValues, int kLanes>() {
                  constexpr int kThreads = threads_for(kValues);
                  constexpr std::int64_t kTokens = kThreads / kLanes;
                  const std::int64_t blocks = std::min<std::int64_t>(
                      (std::int64_t{params.num_tokens} + kTokens - 1) / kTokens,
                      blocks_for(kValues) * num_multiprocessors());
                  launch_overlapped(route_backward_losses_kernel<kValues, kLanes>,
                                    static_cast<unsigned>(blocks), kThreads, 0,
                                    static_cast<cudaStream_t>(stream), params);
                });
}

std::optional<std::string> reject(const RouteBackwardArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  if (args.losses.score.data == nullptr) return "for losses";
  if (auto reason = reject_other_than_top_k(args.config)) return reason;
  if (args.config.as_top_k().score == Score::kSparseMixer) return "no score sparse-mixer";
  if (args.config.top_k() > kMaxTopK) return "top_k exceeds 32";
  return routing::reject_losses(args);
}

void run(const RouteBackwardArgs& args) {
  launch(losses_params(args, rule_of(args.config), args.accumulate), args.execution.stream);
}

}  // namespace

std::optional<std::string> routing::reject_losses(const RouteBackwardArgs& args) {
  if (args.logits.shape[1] > kMaxExperts) return "num_experts exceeds 1024";
  if (args.logits.shape[0] > kMaxTokens) return "tokens exceed 2^30";
  const bool aligned = is_aligned_16(args.logits.data) && is_aligned_16(args.dlogits.data) &&
                       is_aligned_16(args.losses.score.data);
  if (!aligned) return "a matrix is not aligned to 16 bytes";
  return std::nullopt;
}

void routing::add_losses_on_gpu(const RouteBackwardArgs& args) {
  // As of a choice of nobody.
  const TopKRule nobody{.num_experts = static_cast<std::int32_t>(args.logits.shape[1]),
                        .top_k = 0,
                        .score = Score::kSoftmax,
                        .renormalize = false,
                        .scale = 1.0F,
                        .groups = 1,
                        .top_groups = 1,
                        .group_score = GroupScore::kMax};
  launch(losses_params(args, nobody, true), args.execution.stream);
}

const Implementation<RouteBackwardArgs> kRouteBackwardCudaLosses{"cuda.losses", reject, run};

}  // namespace switchyard

// Values and prices of auxiliary losses from sums on a GPU: one block, a warp a group of tokens.
// Bound by latency; everything is in double, and added in one order.
#include "core/gpu/cuda_device.hpp"
#include "route/gpu/route_kernel.cuh"
#include "route/implementations.hpp"
#include "route/loss_formulas.hpp"

namespace switchyard {
namespace {

using routing::kAll;

constexpr int kWarps = 32;
constexpr int kMaxExperts = 1024;
constexpr int kMaxDevices = 32;

struct LossesParams {
  losses::Shape shape;
  LossConfig config;
  double* values;  // [kLossValues] or null
  float* prices;   // [S, E]
};

template <typename T>
__device__ __forceinline__ T sum_over_lanes(T x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(kAll, x, offset);
  return x;
}

/// CV^2 of the experts' importance, and what its slope needs: the same in every warp.
struct Importance {
  const double* of_expert;
  double mean;
  double variance;

  __device__ Importance(const double* values, int size, int lane) : of_expert(values) {
    double sum = 0;
    for (int e = lane; e < size; e += 32) sum += values[e];
    mean = sum_over_lanes(sum) / size;
    double squares = 0;
    for (int e = lane; e < size; e += 32) squares += (values[e] - mean) * (values[e] - mean);
    variance = sum_over_lanes(squares) / size;
  }
  [[nodiscard]] __device__ double value() const {
    return variance / (mean * mean + losses::kCvEpsilon);
  }
};

/// One group's prices; its values are added to `sums`.
__device__ void price_group(const LossesParams& p, std::int64_t group, const Importance& importance,
                            int lane, LossValues& sums) {
  const losses::Shape& shape = p.shape;
  const int num_experts = shape.num_experts;
  const int per_device = num_experts / shape.devices;
  const std::int64_t* const counted = losses::counted(shape, group);
  const std::int64_t* const counts = shape.counts + group * num_experts;
  const double* const scores = shape.scores + group * num_experts;
  long long all = 0;
  long long assigned = 0;
  for (int e = lane; e < num_experts; e += 32) all += counted[e], assigned += counts[e];
  const double factor = losses::share_factor(shape, sum_over_lanes(all), sum_over_lanes(assigned));
  double device_share = 0;  // of the device with the lane's number
  for (int d = 0; d < shape.devices; ++d) {
    double share = 0;
    double score = 0;
    for (int e = d * per_device + lane; e < (d + 1) * per_device; e += 32) {
      const double f = factor * static_cast<double>(counted[e]);
      share += f;
      score += scores[e];
      sums.balance += f * scores[e];
    }
    share = sum_over_lanes(share);
    score = sum_over_lanes(score);
    if (lane == d) device_share = share;
    if (lane == 0) {
      sums.device += share * score;
      sums.communication += losses::sent_share(shape, group, d) * score;
    }
  }
  for (int begin = 0; begin < num_experts; begin += 32) {
    const int e = begin + lane;
    const int device = min(e / per_device, shape.devices - 1);
    const double of_device = __shfl_sync(kAll, device_share, device);
    if (e >= num_experts) continue;
    const double slope = losses::cv_slope(importance.of_expert[e] - importance.mean,
                                          importance.mean, importance.variance, num_experts);
    const double price = losses::score_price(shape, factor * static_cast<double>(counted[e]),
                                             of_device, losses::sent_share(shape, group, device)) +
                         shape.importance * slope;
    p.prices[group * num_experts + e] = static_cast<float>(price);
  }
}

__global__ void __launch_bounds__(kWarps * 32)
    router_losses_kernel(const __grid_constant__ LossesParams p) {
  __shared__ double of_expert[kMaxExperts];
  __shared__ double of_warps[kWarps][3];
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;
  const int num_experts = p.shape.num_experts;
  for (int e = thread; e < num_experts; e += kWarps * 32) {
    double sum = 0;
    for (std::int64_t group = 0; group < p.shape.groups; ++group) {
      sum += p.shape.scores[group * num_experts + e];
    }
    of_expert[e] = sum;
  }
  __syncthreads();
  const Importance importance(of_expert, num_experts, lane);
  LossValues sums{};
  for (std::int64_t group = warp; group < p.shape.groups; group += kWarps) {
    price_group(p, group, importance, lane, sums);
  }
  if (p.values == nullptr) return;
  sums.balance = sum_over_lanes(sums.balance);
  if (lane == 0) {
    of_warps[warp][0] = sums.balance;
    of_warps[warp][1] = sums.device;
    of_warps[warp][2] = sums.communication;
  }
  __syncthreads();
  if (thread != 0) return;
  LossValues total{};
  total.importance = importance.value();
  for (const auto& part : of_warps) {
    total.balance += part[0];
    total.device += part[1];
    total.communication += part[2];
  }
  *reinterpret_cast<LossValues*>(p.values) = losses::finish(p.shape, p.config, total);
}

std::optional<std::string> reject(const RouterLossesArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  if (args.sums.counts.shape[1] > kMaxExperts) return "num_experts exceeds 1024";
  if (args.config.devices > kMaxDevices) return "devices exceed 32";
  return std::nullopt;
}

void run(const RouterLossesArgs& args) {
  const LossesParams params{.shape = losses::shape_of(args),
                            .config = args.config,
                            .values = args.values.data,
                            .prices = args.score_prices.data};
  router_losses_kernel<<<1, kWarps * 32, 0, static_cast<cudaStream_t>(args.execution.stream)>>>(
      params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace

const Implementation<RouterLossesArgs> kRouterLossesCuda{"cuda.block", reject, run};

}  // namespace switchyard

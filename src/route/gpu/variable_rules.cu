// Rules of one token's logits that give any number of experts a token, on a GPU, of up to 256
// experts: a token's lanes hold its row in registers and bring its list together in shared memory,
// so that rows of places are written as they lie. Bound by these rows, twice the bytes of the
// logits, and by instructions. More experts are token_rules.cu's.
#include "core/gpu/cuda_device.hpp"
#include "route/gpu/token_row.cuh"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

using namespace routing;

constexpr int kThreads = 256;
constexpr int kMaxExperts = 256;

struct VariableRuleParams {
  const float* logits;          // [T, E]
  const float* selection_bias;  // [E] or null
  std::int32_t* expert;         // [T, E]
  float* weight;                // [T, E]
  DeviceStatus* status;         // or null
  std::int32_t num_tokens, num_experts;
  float threshold;  // of top-p
  bool in_fours;    // rows of places are whole, aligned fours
};

/// A token's list in shared memory.
template <int kSize>
struct List {
  std::int32_t expert[kSize];
  float weight[kSize];
};

template <int kLanes>
using RowOf = TokenRow<8, kLanes, true>;

/// The places whose bit is set, in ascending order of their experts. @returns how many.
template <typename Row>
__device__ __forceinline__ int take(unsigned places, const float (&weight)[Row::kPlaces],
                                    List<Row::kPlaces * Row::kLaneCount>& list) {
  constexpr int kLanes = Row::kLaneCount;
  const int lane = Row::Lane::lane();
  const int mine = __popc(places);
  int up_to = mine;
#pragma unroll
  for (int offset = 1; offset < kLanes; offset *= 2) {
    const int other = __shfl_up_sync(kAll, up_to, static_cast<unsigned>(offset), kLanes);
    if (lane >= offset) up_to += other;
  }
  int at = up_to - mine;
#pragma unroll
  for (int v = 0; v < Row::kPlaces; ++v) {
    if ((places >> v & 1U) == 0) continue;
    list.expert[at] = Row::expert(v);
    list.weight[at++] = weight[v];
  }
  return Row::Lane::from(up_to, kLanes - 1);
}

/// Exponentials below the largest logit, and one over their sum.
template <typename Row>
struct Softmax {
  float largest;
  float power[Row::kPlaces];
  float reciprocal;

  __device__ __forceinline__ explicit Softmax(const Row& row) : largest(row.largest()) {
    float sum = 0.0F;
    if (__any_sync(kAll, isinf(largest))) {
      sum = row.sum_of(power, [&](float x) { return exp_below(x, largest); });
    } else {
      // Where there is no expert exp(-infinity) is 0.
#pragma unroll
      for (int v = 0; v < Row::kPlaces; ++v) sum += power[v] = expf(row.x[v] - largest);
      sum = Row::Lane::sum(sum);
    }
    reciprocal = 1.0F / sum;
  }
};

struct Relu {
  template <typename Row, typename List>
  static __device__ __forceinline__ int choose(const VariableRuleParams& /*p*/, const Row& row,
                                               List& list) {
    unsigned places = 0;
#pragma unroll
    for (int v = 0; v < Row::kPlaces; ++v) places |= row.x[v] > 0.0F ? 1U << v : 0U;
    return take<Row>(places, row.x, list);
  }
};

struct ExpertThreshold {
  template <typename Row, typename List>
  static __device__ __forceinline__ int choose(const VariableRuleParams& p, const Row& row,
                                               List& list) {
    Softmax<Row> softmax(row);
    constexpr float kBelowAll = 2.0F;  // no probability is as large
    const float same = -1.0F / static_cast<float>(p.num_experts);
    unsigned places = 0;
#pragma unroll
    for (int v = 0; v < Row::kPlaces; ++v) {
      const float weight = softmax.power[v] *= softmax.reciprocal;
      float bias = same;
      if (p.selection_bias != nullptr) {
        bias = row.has(v) ? p.selection_bias[Row::expert(v)] : -kBelowAll;
      }
      places |= weight + bias > 0.0F ? 1U << v : 0U;
    }
    return take<Row>(places, softmax.power, list);
  }
};

struct TopP {
  /// By logits, which do not tie where probabilities underflow.
  template <typename Row, typename List>
  static __device__ __forceinline__ int choose(const VariableRuleParams& p, const Row& row,
                                               List& list) {
    using Lane = typename Row::Lane;
    const Softmax<Row> softmax(row);
    std::uint32_t key[Row::kPlaces];
#pragma unroll
    for (int v = 0; v < Row::kPlaces; ++v)
      key[v] = to_key(row.x[v]);  // where there is no expert, behind all
    float sum = 0.0F;
    int used = 0;
    bool goes_on = true;  // the token's lanes; those of others may
    while (__any_sync(kAll, goes_on)) {
      std::uint32_t best = key[0];
#pragma unroll
      for (int v = 1; v < Row::kPlaces; ++v) best = max(best, key[v]);
      const std::uint32_t top = Lane::max(best);
      const int owner = Lane::first(best == top);
      if (goes_on) {
        const float share = exp_below(from_key(top), softmax.largest) * softmax.reciprocal;
        if (Lane::lane() == owner) {
          int place = 0;
#pragma unroll
          for (int v = Row::kPlaces - 1; v >= 0; --v) place = key[v] == top ? v : place;
#pragma unroll
          for (int v = 0; v < Row::kPlaces; ++v) key[v] = v == place ? 0 : key[v];
          list.expert[used] = Row::expert(place);
          list.weight[used] = share;
        }
        ++used;
        sum += share;
        goes_on = used < p.num_experts && (p.threshold >= 1.0F || sum <= p.threshold);
      }
    }
    return used;
  }
};

/// A token's row of places; -1 and 0 behind the list.
template <typename Row, typename List>
__device__ __forceinline__ void write(const VariableRuleParams& p, std::int64_t token,
                                      const List& list, int used) {
  constexpr int kLanes = Row::kLaneCount;
  const int lane = Row::Lane::lane();
  std::int32_t* const expert = p.expert + token * p.num_experts;
  float* const weight = p.weight + token * p.num_experts;
  if (p.in_fours) {
    for (int k = 4 * lane; k < p.num_experts; k += 4 * kLanes) {
      int4 e = *reinterpret_cast<const int4*>(list.expert + k);
      float4 w = *reinterpret_cast<const float4*>(list.weight + k);
      if (k >= used) e.x = -1, w.x = 0.0F;
      if (k + 1 >= used) e.y = -1, w.y = 0.0F;
      if (k + 2 >= used) e.z = -1, w.z = 0.0F;
      if (k + 3 >= used) e.w = -1, w.w = 0.0F;
      *reinterpret_cast<int4*>(expert + k) = e;
      *reinterpret_cast<float4*>(weight + k) = w;
    }
    return;
  }
  for (int k = lane; k < p.num_experts; k += kLanes) {
    expert[k] = k < used ? list.expert[k] : -1;
    weight[k] = k < used ? list.weight[k] : 0.0F;
  }
}

template <typename Rule, int kLanes>
__global__ void __launch_bounds__(kThreads)
    variable_rule_kernel(const __grid_constant__ VariableRuleParams p) {
  using Row = RowOf<kLanes>;
  constexpr int kTokens = kThreads / kLanes;
  __shared__ __align__(16) List<Row::kPlaces * kLanes> lists[kTokens];
  const int place = static_cast<int>(threadIdx.x) / kLanes;
  const int own = static_cast<int>(blockIdx.x) * kTokens + place;
  // Lanes without a token go along with the last one and write nothing.
  const int token = min(own, p.num_tokens - 1);
  ptx::start_after_previous_kernel();
  Row row;
  row.load(p.logits + std::int64_t{token} * p.num_experts, p.num_experts);
  const int nan = row.lowest_nan();
  int used = Rule::choose(p, row, lists[place]);
  if (nan < p.num_experts) {
    used = 0;
    if (own == token && Row::Lane::lane() == 0) report_nan(p.status, own, nan);
  }
  __syncwarp();
  if (own == token) write<Row>(p, token, lists[place], used);
}

using VariableRuleKernel = void (*)(VariableRuleParams);

/// Null of another rule.
template <int kLanes>
VariableRuleKernel kernel_of(const Router& router) {
  if (std::holds_alternative<TopPRouter>(router)) return variable_rule_kernel<TopP, kLanes>;
  if (std::holds_alternative<ReluRouter>(router)) return variable_rule_kernel<Relu, kLanes>;
  if (std::holds_alternative<ExpertThresholdRouter>(router)) {
    return variable_rule_kernel<ExpertThreshold, kLanes>;
  }
  return nullptr;
}

std::optional<std::string> reject(const RouteArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  if (kernel_of<32>(args.config.kind) == nullptr) return "is for top-p, relu and expert-threshold";
  if (args.config.num_experts > kMaxExperts) return "num_experts exceeds 256";
  if (!is_aligned_16(args.logits.data)) return "logits are not aligned to 16 bytes";
  return std::nullopt;
}

void run(const RouteArgs& args) {
  const auto [num_tokens, num_experts] = args.logits.shape;
  if (num_tokens == 0) return;
  const auto* top_p = std::get_if<TopPRouter>(&args.config.kind);
  const VariableRuleParams params{.logits = args.logits.data,
                                  .selection_bias = args.selection_bias.data,
                                  .expert = args.routing.expert.data,
                                  .weight = args.routing.weight.data,
                                  .status = args.execution.status,
                                  .num_tokens = static_cast<std::int32_t>(num_tokens),
                                  .num_experts = static_cast<std::int32_t>(num_experts),
                                  .threshold = top_p == nullptr ? 0.0F : top_p->threshold,
                                  .in_fours = num_experts % 4 == 0 &&
                                              is_aligned_16(args.routing.expert.data) &&
                                              is_aligned_16(args.routing.weight.data)};
  const bool half = num_experts <= 128;
  const int tokens = kThreads / (half ? 16 : 32);
  const auto blocks = static_cast<unsigned>((num_tokens + tokens - 1) / tokens);
  launch_overlapped(half ? kernel_of<16>(args.config.kind) : kernel_of<32>(args.config.kind),
                    blocks, kThreads, 0, static_cast<cudaStream_t>(args.execution.stream), params);
}

}  // namespace

const Implementation<RouteArgs> kRouteCudaVariableRules{"cuda.variable_rules", reject, run};

}  // namespace switchyard

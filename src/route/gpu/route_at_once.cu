// The noise of logits, a routing and its sums (routing_sums.cuh) from one pass over the logits: a
// block a multiprocessor goes over its tokens, whose choices are made as in route.cu while their
// logits are in registers. Of top-k by logits and of GShard's two best. Bound by instructions.
#include "core/gpu/cuda_device.hpp"
#include "route/gpu/choice.cuh"
#include "route/gpu/noise.cuh"
#include "route/gpu/routing_sums.cuh"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

using namespace routing;

constexpr int kMaxExperts = 256;
constexpr int kMaxTopK = 8;

/// GShardRouter where its second is not drawn: whether it is kept.
struct SecondRule {
  bool is_gshard;
  GShardRouter::Second second;
  float threshold;
  bool training;
  Draws keep;

  __device__ __forceinline__ bool keeps(float weight, std::int64_t token) const {
    if (second == GShardRouter::Second::kAll) return true;
    if (second == GShardRouter::Second::kThreshold) return weight > threshold;
    return !training || weight > __fmul_rn(threshold, keep.unit(token, 0));
  }
};

struct NoiseParams {
  float* logits;              // [T, E] in and out
  const float* noise_logits;  // [T, E], or null
  float size;
  PreparedDraws draws;
};

struct AtOnceParams {
  RouteParams route;
  NoiseParams noise;
  SecondRule gshard;
  SumsParams sums;  // counts are null where none are asked for
};

/// The row with its noise, in memory too where `active`.
template <typename Row>
__device__ __forceinline__ void add_noise(const NoiseParams& p, std::int64_t token, bool active,
                                          const NormalTables& tables, Row& row) {
  const std::int64_t begin = token * row.num_experts;
  Row size;
  if (p.noise_logits != nullptr) size.load(p.noise_logits + begin, row.num_experts, 0.0F);
#pragma unroll
  for (int v = 0; v < Row::kPlaces; v += 4) {
    const auto block = static_cast<std::uint32_t>(Row::expert(v)) / 4;
    const float4 normal = normals_of(p.draws.words(token, block), tables);
    const float of[4] = {normal.x, normal.y, normal.z, normal.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float scale = p.noise_logits == nullptr ? p.size : p.size + softplus(size.x[v + j]);
      if (row.has(v + j)) row.x[v + j] = __fmaf_rn(scale, of[j], row.x[v + j]);
    }
  }
  if (active) row.store(p.logits + begin);
  __syncwarp();  // lanes read the logits of their choices
}

/// By logits: where there is no expert -infinity comes behind all that are.
template <typename Row>
__device__ __forceinline__ Chosen<float> choose_of(const Row& row, int top_k) {
  constexpr int kLanes = Row::kLaneCount;
  const int lane = Row::Lane::lane();
  Chosen<float> chosen{};
  if (top_k <= 2) {
    chosen = choose_two<Row::kPlaces, kLanes>(top_k, lane, row.x);
  } else {
    std::uint32_t key[Row::kPlaces];
#pragma unroll
    for (int v = 0; v < Row::kPlaces; ++v) key[v] = to_key(row.x[v]);
    const auto by_key = choose<Row::kPlaces, kLanes, 1>(top_k, lane, key);
    chosen = {by_key.expert, from_key(by_key.largest)};
  }
  // With NaNs about anything may come out.
  chosen.expert = max(0, min(chosen.expert, row.num_experts - 1));
  return chosen;
}

/// The lane's expert, which becomes -1 where it is left out, and its weight.
template <int kLanes>
__device__ __forceinline__ float weigh_two(const SecondRule& rule, float logit, std::int64_t token,
                                           int& expert) {
  using Lane = Lanes<kLanes>;
  const float ratio = exp_below(Lane::from(logit, 1), Lane::from(logit, 0));
  const float second = ratio / (1.0F + ratio);
  if (Lane::lane() == 0) return 1.0F / (1.0F + ratio);
  if (rule.keeps(second, token)) return second;
  expert = -1;
  return 0.0F;
}

/// @tparam kNoise  There is noise.
template <int kLanes, bool kNoise>
__global__ void __launch_bounds__(BlockSums<TokenRow<8, kLanes, true>>::kThreads, 1)
    route_at_once_kernel(const __grid_constant__ AtOnceParams p) {
  using Row = TokenRow<8, kLanes, true>;
  using Block = BlockSums<Row>;
  __shared__ __align__(16) Block block;
  __shared__ NormalTables tables;
  constexpr int kTokens = Block::kThreads / kLanes;  // at once
  const TopKRule& config = p.route.config;
  const int lane = Row::Lane::lane();
  const bool mine = lane < config.top_k;
  const BlockTokens tokens(p.sums);
  const int last = tokens.end - 1;
  int own = tokens.begin + static_cast<int>(threadIdx.x) / kLanes;
  const float* const of_group = in_one(p.route.logits + tokens.first * config.num_experts);
  std::int32_t* const to_expert = in_one(p.route.expert + tokens.first * config.top_k + lane);
  float* const to_weight = in_one(p.route.weight + tokens.first * config.top_k + lane);
  const bool has_sums = p.sums.counts != nullptr;
  const bool needs_softmax =
      has_sums || (config.score == Score::kSoftmax && !config.renormalize && !p.gshard.is_gshard);
  if constexpr (kNoise) load_tables(tables);
  block.clear();
  ptx::start_after_previous_kernel();
  LaneSums<Row> sums;
  for (int begin = tokens.begin; begin < tokens.end; begin += kTokens, own += kTokens) {
    // Lanes without a token go along with the last one and write nothing.
    const bool active = own <= last;
    const int in_group = min(own, last);
    const float* const logits = of_group + product(in_group, config.num_experts);
    Row row;
    row.load(logits, config.num_experts);
    if constexpr (kNoise) add_noise(p.noise, tokens.first + in_group, active, tables, row);
    const int nan = row.lowest_nan();
    const bool broken = nan < config.num_experts;
    Chosen<float> chosen = choose_of(row, config.top_k);
    int expert = chosen.expert;
    const float logit = mine ? logits[expert] : 0.0F;
    if (broken) {  // its sums are of nothing
      chosen.largest = 0.0F;
#pragma unroll
      for (int v = 0; v < Row::kPlaces; ++v) row.x[v] = row.has(v) ? 0.0F : kMinusInf;
    }
    float sum = 1.0F;
    if (needs_softmax) {
      const float counts = active && !broken ? 1.0F : 0.0F;
      sum = sums.add(row, chosen.largest, p.sums.sigmoids, counts);
    }
    float weight = 0.0F;
    if (p.gshard.is_gshard) {
      weight = weigh_two<kLanes>(p.gshard, logit, tokens.first + in_group, expert);
    } else {
      weight = config.scale * weigh<kLanes>(config, logit, mine, chosen.largest, sum, true);
    }
    if (broken) expert = -1, weight = 0.0F;
    if (has_sums) {
      const int counted = active && mine ? expert : -1;
      sums.add_choice(p.sums, counted, block.counts, block.firsts, block.devices);
    }
    if (active && mine) {
      const std::int64_t at = product(in_group, config.top_k);
      to_expert[at] = expert;
      to_weight[at] = weight;
    }
    if (active && broken && lane == 0) {
      report_nan(p.route.status, static_cast<int>(tokens.first) + in_group, nan);
    }
  }
  if (has_sums) block.finish(p.sums, sums);
}

const GShardRouter* as_gshard(const RouteArgs& args) {
  return std::get_if<GShardRouter>(&args.config.kind);
}

std::optional<std::string> reject(const RouteAtOnceArgs& args) {
  const RouteArgs& route = args.route;
  if (route.execution.backend != Backend::kCuda) return "needs the backend cuda";
  if (auto reason = reject_room(route)) return reason;
  if (const GShardRouter* gshard = as_gshard(route)) {
    if (gshard->sampled && route.request.training) return "no second that is drawn";
  } else {
    if (auto reason = reject_other_than_top_k(route.config)) return reason;
    const TopKRouter& router = route.config.as_top_k();
    if (router.score == Score::kSparseMixer) return "no score sparse-mixer";
    if (!compares_logits(route) || router.top_groups < router.groups) {
      return "only for choices by logits, without groups or a selection bias";
    }
  }
  if (route.request.top_score.data != nullptr) return "no top_score";
  if (args.noise_logits.data != nullptr && !is_aligned_16(args.noise_logits.data)) {
    return "the noise logits are not aligned to 16 bytes";
  }
  if (route.config.num_experts > kMaxExperts) return "num_experts exceeds 256";
  if (route.config.top_k() > kMaxTopK) return "top_k exceeds 8";
  if (!is_aligned_16(route.logits.data)) return "the logits are not aligned to 16 bytes";
  if (args.sums.counts.data == nullptr) return std::nullopt;
  return reject_sums(args.sums, route.config.top_k(), route.execution);
}

RouteParams params_of_either(const RouteArgs& args) {
  if (as_gshard(args) == nullptr) return routing::params_of(args);
  RouteArgs two = args;
  two.config.kind = TopKRouter{.top_k = 2};
  return routing::params_of(two);
}

void run(const RouteAtOnceArgs& args) {
  const RouteArgs& route = args.route;
  const auto [num_tokens, num_experts] = route.logits.shape;
  const GShardRouter* gshard = as_gshard(route);
  const GShardRouter rule = gshard == nullptr ? GShardRouter{} : *gshard;
  const RouterNoise& noise = route.config.noise;
  AtOnceParams params{
      .route = params_of_either(route),
      .noise = {.logits = args.noisy_logits.data,
                .noise_logits =
                    noise.kind == RouterNoise::Kind::kLearned ? args.noise_logits.data : nullptr,
                .size = noise.size,
                .draws = PreparedDraws(Draws(route.request, Draws::For::kLogits))},
      .gshard = {.is_gshard = gshard != nullptr,
                 .second = rule.second,
                 .threshold = rule.threshold,
                 .training = route.request.training,
                 .keep = Draws(route.request, Draws::For::kKeepSecond)},
      .sums = {}};
  const bool noisy = args.noisy_logits.data != nullptr;
  const auto launch = [&]<int kLanes>() {
    constexpr int kThreads = BlockSums<TokenRow<8, kLanes, true>>::kThreads;
    params.sums = sums_params(args.sums, num_tokens, num_experts, route.config.top_k(),
                              route.config.score(), route.execution, kThreads / kLanes);
    launch_overlapped(
        noisy ? route_at_once_kernel<kLanes, true> : route_at_once_kernel<kLanes, false>,
        sums_blocks(params.sums, args.sums), kThreads, 0,
        static_cast<cudaStream_t>(route.execution.stream), params);
  };
  if (num_experts <= 64) return launch.operator()<8>();
  if (num_experts <= 128) return launch.operator()<16>();
  launch.operator()<32>();
}

std::optional<std::string> reject_gshard(const RouteArgs& args) {
  if (as_gshard(args) == nullptr) return "is for gshard without noise or sums";
  return reject({.route = args});
}

void run_gshard(const RouteArgs& args) { run({.route = args}); }

}  // namespace

const Implementation<RouteArgs> kRouteCudaTwoBest{"cuda.two_best", reject_gshard, run_gshard};
const Implementation<RouteAtOnceArgs> kRouteAtOnceCuda{"cuda.one_pass", reject, run};

}  // namespace switchyard

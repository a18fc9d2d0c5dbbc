// A whole layer with made-up weights.
#include <algorithm>
#include <set>
#include <thread>

#include "bench/cases/cases.hpp"
#include "bench/cases/quantised_pool.hpp"
#include "bench/cases/synthetic.hpp"
#include "bench/layer/layer_run.hpp"
#include "bench/measure/dense_beside.hpp"
#include "bench/measure/wire_rate.hpp"
#include "bench/peers/onednn.hpp"
#include "bench/peers/sonicmoe.hpp"
#include "bench/peers/stored.hpp"
#include "bench/peers/torch.hpp"
#include "core/check.hpp"
#include "switchyard/device.hpp"
#include "switchyard/names.hpp"

namespace switchyard::bench {
namespace {

/// So few tokens that launches and what lies between kernels show: then layers in a chain too.
constexpr std::int64_t kFewTokens = 64;
constexpr int kChained = 24;
/// So many that a layer there and back finds none of its weights in a cache.
constexpr std::int64_t kManyTokens = 8192;

int chained(const LayerCase& c) {
  const bool alone = c.options.backend == Backend::kCuda && c.num_ranks == 1 && c.world == nullptr;
  // By the layer's own routing, which is uniform; a single run is a profiler's, who would see
  // little else.
  return alone && c.num_tokens > 0 && c.num_tokens <= kFewTokens && c.skew == "uniform" &&
                 c.count.iterations > 1
             ? kChained
             : 0;
}

/// The experts by oneDNN, timed between the layer's runs.
struct PeerTimes {
  OnednnLoop loop;
  std::vector<double> us{};

  explicit PeerTimes(const OnednnLoopArgs& args) : loop(checked(args)) {}

  void run() {
    const auto start = std::chrono::steady_clock::now();
    loop.run();
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - start;
    us.push_back(time.count());
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // until its threads rest
  }

 private:
  static OnednnLoopArgs checked(const OnednnLoopArgs& args) {
    const auto reason = OnednnLoop::unavailable(args.config, args.tokens.dtype);
    if (reason) fail(ErrorCode::kUnsupported, "--peer onednn: {}", *reason);
    return args;
  }
};

/// Bytes that the rank which sends or receives most has to move, of `bytes` [R, R] from s to d.
double most_loaded(const std::vector<std::int64_t>& bytes, int num_ranks) {
  double most = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    double sent = 0;
    double received = 0;
    for (int other = 0; other < num_ranks; ++other) {
      if (other == rank) continue;
      sent += static_cast<double>(bytes[static_cast<std::size_t>(rank * num_ranks + other)]);
      received += static_cast<double>(bytes[static_cast<std::size_t>(other * num_ranks + rank)]);
    }
    most = std::max({most, sent, received});
  }
  return most;
}

/// Of all the GPUs that the ranks are on: a rank's share of the work is one GPU's.
Limits limits_of_ranks(const LayerCase& c, const Limits& one) {
  if (c.options.backend != Backend::kCuda || c.num_ranks == 1) return one;
  const auto gpus =
      static_cast<double>(std::min<std::int64_t>(c.num_ranks, std::ssize(find_gpus().list)));
  Limits all = one;
  for (double* rate :
       {&all.bandwidth, &all.read_bandwidth, &all.flops_f32, &all.flops_bf16, &all.flops_f16}) {
    *rate *= gpus;
  }
  return all;
}

/// Bytes of the most loaded rank in all crossings of a pass: tokens there, sums home, and on the
/// way back gradients of sums there, of tokens home.
double crossing_bytes(const LayerCase& c, const LayerRunResult& run) {
  std::vector<std::int64_t> dout;
  std::vector<std::int64_t> dtokens;
  for (const std::int64_t rows : run.traffic.rows) {
    dout.push_back(rows * c.config.experts.hidden * size_of(run.compute));
    dtokens.push_back(rows * c.config.experts.hidden * 4);
  }
  double bytes = 0;
  if (c.pass != Pass::kBackward) {
    bytes += most_loaded(run.traffic.payload_bytes, c.num_ranks) +
             most_loaded(run.traffic.return_payload_bytes, c.num_ranks);
  }
  if (c.pass != Pass::kForwardTrain) {
    bytes += most_loaded(dout, c.num_ranks) + most_loaded(dtokens, c.num_ranks);
  }
  return bytes;
}

void add_bar(const char* bar, double value, double target, CaseResult& result) {
  result.more["bar"] = bar;
  result.more["value"] = value;
  result.more["target"] = target;
  result.more["holds"] = value <= target;
}

/// Bar B7: what of the exchange shows in the time of a layer there and back, beside the wire's
/// time for its crossings.
void add_exposed_exchange(const LayerCase& c, double bytes, double layer_us, CaseResult& result) {
  double others_us = 0;
  double exchange_us = 0;
  for (const StageFigures& stage : result.stages) {
    if (stage.stage == "exchange") {
      exchange_us = stage.us.median;
    } else if (stage.stage != "layer") {
      others_us += stage.us.median;
    }
  }
  const double wire_us = bytes / kPushBytesPerUs;
  result.more["exchange"] = {{"stages_alone_us", others_us},
                             {"exchange_us", exchange_us},
                             {"exposed_us", layer_us - others_us},
                             {"wire_bytes", bytes},
                             {"wire_us", wire_us}};
  if (c.bar != "B7" || c.pass != Pass::kBoth) return;
  add_bar("B7", (layer_us - others_us) / wire_us, 1.05, result);
}

/// Bar B2: the forward that training takes beside that of inference, whose stage is none of it.
void add_beside_inference(const LayerCase& c, double layer_us, CaseResult& result) {
  const auto inference = std::ranges::find(result.stages, kInferenceStage, &StageFigures::stage);
  if (inference == result.stages.end()) return;
  const double us = inference->us.median;
  result.stages.erase(inference);
  result.more["inference_us"] = us;
  if (c.bar == "B2") add_bar("B2", layer_us / us, 1.08, result);
}

/// Bar B4: a layer there and back over the sum of its stages' limits.
void add_over_limits(const LayerCase& c, double layer_us, CaseResult& result) {
  double limits_us = 0;
  for (const StageFigures& stage : result.stages) {
    if (stage.stage != "layer") limits_us += stage.limit_us;
  }
  result.more["limits_of_stages_us"] = limits_us;
  if (c.bar == "B4" && limits_us > 0) add_bar("B4", layer_us / limits_us, 1.35, result);
}

/// What tools/read_bars.py judges by bar B5: memory beside parameters, gradients and what is saved.
void add_memory(const LayerCase& c, const LayerRunResult& run, int copies, CaseResult& result) {
  const LayerConfig& config = c.config;
  const double parameters =
      copies * (bytes_per_expert(c) * static_cast<double>(config.experts.num_experts) +
                4.0 * static_cast<double>(config.router.num_experts * config.experts.hidden));
  const auto known = parameters + static_cast<double>(run.gradient_bytes + run.saved_bytes);
  result.more["memory"] = {{"parameters", parameters},
                           {"gradients", run.gradient_bytes},
                           {"saved", run.saved_bytes},
                           {"all", run.device_bytes},
                           {"beside", static_cast<double>(run.device_bytes) / known - 1}};
}

/// A layer's useful products over its time; `dense`: the rate of products in turns with the layer.
void add_useful_rate(const LayerCase& c, double layer_us, double dense, CaseResult& result) {
  const double matrices = c.config.experts.gated ? 3 : 2;
  const double flops = 2 * matrices * static_cast<double>(c.num_tokens * c.config.router.top_k()) *
                       static_cast<double>(c.config.experts.hidden * c.config.experts.inner);
  const double rate = flops / layer_us * 1e6;
  result.more["useful_tflops"] = rate * 1e-12;
  result.more["share_of_dense"] = rate / dense;
  result.more["dense_flops_in_turns"] = dense;
}

}  // namespace

double bytes_per_expert(const LayerCase& c) {
  const double matrices = c.config.experts.gated ? 3 : 2;
  const DType dtype = c.options.compute.value_or(c.dtype);
  const double size = [&] {
    switch (c.options.weights) {
      case WeightFormat::kQ8: return 1.125;
      case WeightFormat::kE4M3: return 1.0;
      case WeightFormat::kMxfp4: return 17.0 / 32;
      case WeightFormat::kInt4: return 0.5 + 2.0 / pool_form(c.config.experts).group;
      case WeightFormat::kNvfp4: return 9.0 / 16;
      default: return static_cast<double>(size_of(dtype));
    }
  }();
  return matrices * size * static_cast<double>(c.config.experts.hidden * c.config.experts.inner);
}

int cold_copies(const LayerCase& c, double experts_hit, const Machine& machine) {
  const double hit_bytes = std::max(1.0, bytes_per_expert(c) * experts_hit);
  const double all_bytes = bytes_per_expert(c) * static_cast<double>(c.config.experts.num_experts);
  const double wanted =
      2 * static_cast<double>(machine.largest_cache(c.options.backend)) / hit_bytes;
  const double fit =
      std::max(1.0, static_cast<double>(machine.memory(c.options.backend)) / 4 / all_bytes);
  const double least = chained(c) > 0 ? 3 : 1;
  return static_cast<int>(std::min({std::max(wanted + 1, least), fit, 64.0}));
}

CaseResult start_result(const LayerCase& c, const Limits& limits) {
  CaseResult result;
  result.what = {.name = c.name,
                 .num_experts = c.config.router.num_experts,
                 .top_k = c.config.router.top_k(),
                 .hidden = c.config.experts.hidden,
                 .inner = c.config.experts.inner,
                 .num_tokens = c.num_tokens,
                 .num_ranks = c.num_ranks,
                 .num_threads = c.num_threads,
                 .compute = to_string(c.options.compute.value_or(c.dtype)),
                 .layout = c.layout,
                 .skew = c.router.empty() ? c.skew : c.router,
                 .engine = c.options.device_engine != DeviceEngine::kAuto
                               ? to_string(c.options.device_engine)
                           : c.world != nullptr ? c.world->engine()
                                                : "threads",
                 .wire = to_string(c.options.combine_wire),
                 .activation = to_string(c.config.experts.activation),
                 .capacity_factor = c.options.capacity_factor.value_or(0),
                 .shared_experts = c.shared_experts,
                 .gated = c.config.experts.gated,
                 .batch_invariant = c.options.batch_invariant};
  if (c.options.capacity_factor) result.what.drop_policy = to_string(c.options.drop_policy);
  result.limits = limits;
  result.backend = to_string(c.options.backend);
  result.seed = static_cast<std::int64_t>(c.seed);
  return result;
}

CaseResult run_layer_case(const LayerCase& c, const Machine& machine, const Limits& limits) {
  CaseResult result = start_result(c, limits);
  LayerModel model = synthetic_layer(c.config, c.router_bias, c.selection_bias, c.dtype, c.seed);
  if (has_codes(c.options.weights)) {
    model.experts = std::make_shared<QuantisedPool>(c.config.experts, c.options.weights, c.seed);
    if (model.shared) {
      model.shared = std::make_shared<QuantisedPool>(c.config.shared, c.options.weights, c.seed);
    }
  }
  const auto tokens = synthetic_tokens(c.num_tokens, c.config.experts.hidden, c.dtype, c.seed);
  const RouterConfig& router = c.config.router;
  const SyntheticRouting routing =
      synthetic_routing(c.num_tokens, router.num_experts, router.top_k(), c.skew, c.seed);
  const std::int64_t top_k = router.top_k();
  const std::set<std::int32_t> hit(routing.expert.begin(), routing.expert.end());
  const auto experts_hit = static_cast<double>(hit.size());
  const bool trains = c.pass != Pass::kForward;
  // What many tokens leave behind themselves is more than a cache holds, and it is the memory of
  // one layer that is asked for.
  const bool alone = trains && c.options.backend == Backend::kCuda && c.num_tokens >= kManyTokens;
  const int copies = alone ? 1 : cold_copies(c, experts_hit, machine);
  result.what.cold = alone || copies * std::max(1.0, bytes_per_expert(c) * experts_hit) >=
                                  static_cast<double>(machine.largest_cache(c.options.backend));
  std::unique_ptr<PeerTimes> peer;
  if (c.peer_onednn) {
    peer = std::make_unique<PeerTimes>(
        OnednnLoopArgs{.config = c.config.experts,
                       .source = model.experts.get(),
                       .tokens = {tokens.data(), c.dtype, c.num_tokens, c.config.experts.hidden},
                       .expert = {routing.expert.data(), {c.num_tokens, top_k}},
                       .weight = {routing.weight.data(), {c.num_tokens, top_k}},
                       .num_threads = c.num_threads});
  }
  std::unique_ptr<DenseBeside> dense;
  if (c.beside_dense) dense = make_dense_beside(c.options.backend, c.dtype);
  std::function<void()> between;
  if (peer) between = [&] { peer->run(); };
  if (dense) between = [&] { dense->run(); };
  // The layer's own router gives even loads; only it has gradients of its own.
  const bool routes = !c.router.empty() || (trains && c.skew == "uniform");
  const std::vector<std::int32_t> token_ids = synthetic_token_ids(c.num_tokens, c.seed);
  const LayerRunResult run = run_layer({
      .model = &model,
      .options = c.options,
      .num_ranks = c.num_ranks,
      .num_threads = c.num_threads,
      .timeout = c.timeout,
      .world = c.world,
      .tokens = {tokens.data(), c.dtype, c.num_tokens, c.config.experts.hidden},
      .expert = routes ? Matrix<const std::int32_t>{}
                       : Matrix<const std::int32_t>{routing.expert.data(), {c.num_tokens, top_k}},
      .weight = routes ? Matrix<const float>{}
                       : Matrix<const float>{routing.weight.data(), {c.num_tokens, top_k}},
      .request = {.token_ids = {token_ids.data(), {c.num_tokens}},
                  .seed = c.seed,
                  .training = trains},
      .route_too = !trains && !routes,
      .out = c.dtype,
      .pass = c.pass,
      .recompute = c.recompute,
      .beside_inference = c.pass == Pass::kForwardTrain && c.num_ranks == 1 && c.world == nullptr,
      .copies = copies,
      .count = c.count,
      .chained = chained(c),
      .between = between,
  });
  result.stages = judge(run.stages, limits_of_ranks(c, limits), run.compute);
  if (peer) result.peers["onednn"] = statistics(peer->us).median;
  result.load = load_of(run.record.counts, run.record.counts_kept);
  double experts_us = 0;
  double layer_us = 0;
  for (const StageFigures& stage : result.stages) {
    if (stage.stage == "layer") layer_us = stage.us.median;
    if (stage.stage.starts_with("gemm") || stage.stage.starts_with("shared") ||
        stage.stage == "experts_backward") {
      experts_us += stage.us.median;
    }
  }
  result.routing_share = layer_us > 0 ? std::max(0.0, 1 - experts_us / layer_us) : 0;
  result.more = {{"rows", {{"used", run.rows_used}, {"executed", run.rows_executed}}}};
  if (trains) {
    result.more["pass"] = to_string(c.pass);
    result.more["recompute"] = to_string(c.recompute);
    result.more["saved_bytes"] = run.saved_bytes;
    add_beside_inference(c, layer_us, result);
    add_over_limits(c, layer_us, result);
    if (alone && c.pass == Pass::kBoth && run.device_bytes > 0) add_memory(c, run, copies, result);
  }
  const bool on_gpus = c.options.backend == Backend::kCuda;  // whose wire is known
  if (on_gpus && c.num_ranks > 1 && !run.traffic.rows.empty()) {
    const double bytes = crossing_bytes(c, run);
    for (StageFigures& stage : result.stages) {
      if (stage.stage == "exchange") limit_by_wire(stage, bytes);
    }
    if (trains) add_exposed_exchange(c, bytes, layer_us, result);
  }
  if (run.chain) {
    result.more["chain"] = {{"layers", run.chain->calls},
                            {"graph_us", run.chain->graph_us},
                            {"eager_us", run.chain->eager_us},
                            {"host_us", run.chain->host_us}};
  }
  if (dense && layer_us > 0) add_useful_rate(c, layer_us, dense->flops(), result);
  // By the layers' own routers: in the forward only what loads the experts evenly.
  // Small layers are compared with their limits.
  if (c.peer_sonicmoe != nullptr && c.bar != "B4" && (trains || c.skew == "uniform")) {
    c.peer_sonicmoe->measure(c, result);
  }
  if (c.peer_stored != nullptr) c.peer_stored->measure(c, result);
  if (c.peer_torch != nullptr) {
    const ConstRawMatrix x{tokens.data(), c.dtype, c.num_tokens, c.config.experts.hidden};
    c.peer_torch->measure(
        {.work = "layer", .c = c, .tokens = x, .routing = routing, .gate = model.gate.floats()},
        result);
    if (c.bar == "G6") judge_against_torch(c.bar, 1.5, result);
  }
  return result;
}

}  // namespace switchyard::bench

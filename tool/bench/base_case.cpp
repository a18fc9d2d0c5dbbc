// The layers that the command line describes, as cases to measure.
#include "tool/bench/base_case.hpp"

#include <charconv>

#include "bench/peers/stored.hpp"
#include "tool/options/sizes.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/options/words.hpp"

namespace switchyard::tool {
namespace {

using bench::CaseKind;
using bench::LayerCase;
using bench::SuiteCase;

/// The number and the kind that --experts says.
struct ExpertsWords {
  std::optional<std::int64_t> number;
  bool identity = false;
};

ExpertsWords read_experts(const Options& options) {
  ExpertsWords out;
  for (const std::string& word : options.experts) {
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
    if (error == std::errc() && end == word.data() + word.size()) {
      out.number = value;
    } else {
      out.identity = word == "identity";
    }
  }
  return out;
}

/// What has no backward yet, in the words of the command line.
void check_training(const Options& options, const LayerCase& c) {
  if (!options.suite.empty() && options.suite != "layer" && options.suite != "training") {
    throw UsageError("--pass: {} given, but the suite {} is about the forward", to_string(c.pass),
                     options.suite);
  }
  if (c.num_ranks > 1 && c.options.device_engine == DeviceEngine::kNcclPairs) {
    throw UsageError("--pass: {} given, but over nccl-pairs there is no backward", options.pass);
  }
  for (const std::string& peer : options.peers) {
    if (peer == "sonicmoe" && options.suite == "training" && c.pass == bench::Pass::kBoth) continue;
    throw UsageError("--pass: {} given, but the peer {} does only the forward{}", to_string(c.pass),
                     peer, peer == "sonicmoe" ? ", and with --suite training the pass both" : "");
  }
  if (c.options.weights != WeightFormat::kExact) {
    throw UsageError("--pass: {} given, which wants --weights exact", to_string(c.pass));
  }
  if (read_experts(options).identity) {
    throw UsageError("--pass: {} given, but --experts identity has nothing to learn",
                     to_string(c.pass));
  }
}

void apply_activation(const Options& options, ExpertConfig& experts) {
  if (options.plain) experts.gated = false;
  if (!options.activation.empty()) {
    experts.activation = enumerator_of<Activation>(options.activation);
  }
  if (experts.activation == Activation::kClampedSwiglu && !experts.gated) {
    throw UsageError("--plain: clamped_swiglu has a gate, want another --activation");
  }
}

}  // namespace

bool identity_wanted(const Options& options) { return read_experts(options).identity; }

LayerCase base_case(const Options& options, const World& world) {
  LayerCase c;
  c.options = layer_options(options);
  c.num_ranks = world.num_ranks;
  c.num_threads = world.num_threads;
  c.world = world.launched.get();
  c.timeout = std::chrono::milliseconds(options.timeout_ms);
  c.checkpoint = options.checkpoint;
  c.layout = options.layout;
  c.skew = options.skew;
  c.seed = static_cast<std::uint64_t>(options.seed);
  for (const std::string& peer : options.peers) {
    const bool is_stored = bench::StoredPeer::has(peer);
    if (peer != "onednn" && peer != "torch" && peer != "sonicmoe" && !is_stored) {
      throw UsageError(
          "--peer: '{}' is none of layers, want onednn, torch, sonicmoe, triton-mxfp4 or deepgemm",
          peer);
    }
    c.peer_onednn = c.peer_onednn || peer == "onednn";
  }
  for (const bench::Pass pass :
       {bench::Pass::kForwardTrain, bench::Pass::kBackward, bench::Pass::kBoth}) {
    if (options.pass == to_string(pass)) c.pass = pass;
  }
  if (options.suite == "training" && c.pass == bench::Pass::kForward) c.pass = bench::Pass::kBoth;
  if (c.pass != bench::Pass::kForward) check_training(options, c);
  if (!options.recompute.empty()) {
    if (c.pass == bench::Pass::kForward) {
      throw UsageError("--recompute: {} given, but --pass forward keeps nothing",
                       options.recompute);
    }
    c.recompute = enumerator_of<Recompute>(options.recompute);
  }
  c.published_data = options.data == "published";
  if (c.published_data && options.suite != "fused-moe") {
    throw UsageError("--data: published is that of --suite fused-moe, want scaled");
  }
  // Of the made-up numbers.
  c.dtype = c.options.compute.value_or(DType::kBF16);
  if (c.dtype == DType::kF8E4M3) c.dtype = DType::kBF16;
  // Unless told how often, not longer than two seconds a case.
  c.count = {.warmup = static_cast<int>(options.warmup.value_or(10)),
             .iterations = static_cast<int>(options.iterations.value_or(100)),
             .budget = std::chrono::seconds(options.iterations ? 0 : 2)};
  return c;
}

std::vector<SuiteCase> model_cases(const Options& options, const LayerCase& base) {
  const ExpertsWords experts = read_experts(options);
  const CheckpointRecipe recipe = recipe_of(options, experts.number, "mixtral");
  LayerCase c = base;
  c.name = options.model.empty() ? "sizes" : options.model;
  c.config = recipe.layer;
  c.shared_experts = recipe.shared_experts;
  if (!options.model.empty()) {
    const NamedModel& model = find_model(options.model);
    c.router_bias = model.router_bias;
    c.selection_bias = model.selection_bias;
  }
  apply_activation(options, c.config.experts);
  if (c.config.shared.num_experts > 0) apply_activation(options, c.config.shared);
  if (!options.router.empty()) {
    if (experts.identity) {
      throw UsageError(
          "--router: {} given, but --experts identity takes a routing as it is made up",
          options.router);
    }
    c.config.router = router_of(options.router, c.config.router);
    if (c.config.router.is_chain() && !options.peers.empty()) {
      throw UsageError("--peer: {} given, but no peer runs the iterations of --router {}",
                       options.peers.front(), options.router);
    }
    if (c.config.router.zero_computation.total() > 0 && !options.peers.empty()) {
      throw UsageError(
          "--peer: {} given, but no peer runs the zero-computation experts of --router {}",
          options.peers.front(), options.router);
    }
    c.router = options.router;
    c.selection_bias = c.selection_bias && c.config.router.is_top_k();
  }
  check(c.config);
  std::vector<std::int64_t> numbers = options.num_tokens;
  if (numbers.empty()) numbers = {1, 16, 256};
  std::vector<SuiteCase> cases;
  for (const std::int64_t num_tokens : numbers) {
    c.num_tokens = num_tokens;
    const bool few_on_gpu = c.options.backend == Backend::kCuda && num_tokens <= 16;
    c.bar = few_on_gpu && c.name == "qwen3-30b-a3b" ? "G6" : "";
    cases.push_back({experts.identity ? CaseKind::kIdentity : CaseKind::kLayer, c});
  }
  return cases;
}

}  // namespace switchyard::tool

// The table of routers, and how they are spelled.
#include "switchyard/routing/router_kinds.hpp"

#include <charconv>
#include <cmath>
#include <optional>

#include "core/check.hpp"
#include "core/printable.hpp"
#include "route/given_options.hpp"
#include "switchyard/names.hpp"
#include "switchyard/routing/soft_moe.hpp"

namespace switchyard {
namespace {

constexpr double kMostExperts = 1 << 20;
constexpr double kMany = 9007199254740992.0;
constexpr const char* kAnyLoss = "load balance, z, entropy";
constexpr const char* kNoLoss = "none";

constexpr RouterOption kTopK{"top-k", "K",          "experts of each token; without it the model's",
                             1,       kMostExperts, true};

constexpr RouterOption kNetwork{"network", "linear|cosine|mlp|hadamard",
                                "what logits are made by; linear"};
constexpr RouterOption kWidth{
    "width",      "M", "of a network that is not linear, on a GPU a multiple of 8; max(64, H/2)", 1,
    kMostExperts, true};

constexpr RouterOption kTopKOptions[] = {
    kTopK,
    {"score", "softmax|topk-softmax|sigmoid|sparse-mixer",
     "how weights are made, sparse-mixer on a CPU; the model's"},
    {"renormalize", "yes|no", "whether chosen scores are scaled to sum to 1; the model's"},
    {"scale", "X", "multiplies every weight, last; the model's", -1e6, 1e6},
    kNetwork,
    kWidth,
};
constexpr RouterOption kChainOptions[] = {
    {"iterations", "C", "over the same experts, each with a gate of its own; 2", 1, 1024, true},
    {"top-k", "K", "experts of each token and iteration; the model's by C, rounded up", 1,
     kMostExperts, true},
    {"score", "softmax|topk-softmax|sigmoid|sparse-mixer",
     "how weights are made, sparse-mixer on a CPU; the model's"},
    {"renormalize", "yes|no",
     "whether chosen scores are scaled to sum to 1; the model's, where K is 1 no"},
    {"scale", "X", "multiplies every weight, last; the model's", -1e6, 1e6},
    {"inner-residual", "yes|no", "whether an iteration adds to what it was given; yes"},
    {"outer-residual", "yes|no", "whether the layer adds to what it was given; no"},
};
constexpr RouterOption kSwitchOptions[] = {
    {"jitter", "EPS", "in training the router sees tokens times 1 +- EPS; 0.01", 0, 0.999999},
    kNetwork,
    kWidth,
};
constexpr RouterOption kGShardOptions[] = {
    {"second", "all|threshold|random", "when the second expert is left out; random"},
    {"threshold", "P", "of its weight; 0.5", 1e-9, 1},
    {"sampled", "yes|no", "whether training draws the second by Gumbel noise; no"},
    kNetwork,
    kWidth,
};
constexpr RouterOption kNoisyTopKOptions[] = {
    kTopK,
    {"floor", "SIZE", "least deviation of the noise on logits in training; 0.01", 0, 1e6},
    kNetwork,
    kWidth,
};
constexpr RouterOption kVMoeOptions[] = {
    kTopK,
    {"noise", "SIZE", "of the normal noise on logits in training; 1/E", 0, 1e6},
    kNetwork,
    kWidth,
};
constexpr RouterOption kAdaMoeOptions[] = {
    {"top-k", "K", "picks of each token, null experts included; the model's", 1, kMostExperts,
     true},
    {"null-experts", "N", "how many there are beside the E; E", 1, kMostExperts, true},
    kNetwork,
    kWidth,
};
constexpr RouterOption kMoePlusPlusOptions[] = {
    {"top-k", "K", "picks of each token, of all experts; the model's", 1, kMostExperts, true},
    {"zero", "N", "experts beside the E that give nothing; 1", 0, kMostExperts, true},
    {"copy", "N", "that give the token; 1", 0, kMostExperts, true},
    {"constant", "N", "that give a learned mixture of it and a vector; 2", 0, kMostExperts, true},
    {"tau", "X", "their share in balance loss and capacity, 0: as all, never full; 0.75", 0, 1},
    {"residual", "yes|no", "whether logits of the layer before are added, by a matrix; no"},
    {"renormalize", "yes|no", "whether chosen probabilities are scaled to sum to 1; yes"},
    kNetwork,
    kWidth,
};
constexpr RouterOption kExpertChoiceOptions[] = {
    {"top-k", "K", "experts of a token on average, with a factor of 1; the model's", 1,
     kMostExperts, true},
    {"capacity-factor", "F", "C = F * group * K / E tokens an expert; 1", 1e-6, 1e6},
    {"group", "M", "neighbouring tokens chosen among, 0: all of the call; 0", 0, kMany, true},
    kNetwork,
    kWidth,
};
constexpr RouterOption kHashOptions[] = {
    kTopK,
    {"salt", "S", "another table; 0", 0, 16777215, true},
};
constexpr RouterOption kTopPOptions[] = {
    {"threshold", "P", "the sum of probabilities that is enough; 0.4", 1e-9, 1},
    kNetwork,
    kWidth,
};
constexpr RouterOption kLogitsOptions[] = {kNetwork, kWidth};
constexpr RouterOption kPlaceOptions[] = {kTopK};
constexpr RouterOption kZipfOptions[] = {
    kTopK,
    {"s", "S", "expert e has a share of 1 / (e + 1)^S; 1", 0, 1e3},
};
constexpr RouterOption kHotOptions[] = {
    kTopK,
    {"share", "F", "what expert 0 has of all assignments; 0.5", 0, 1},
};
constexpr RouterOption kDirichletOptions[] = {
    kTopK,
    {"concentration", "A", "of the shares' distribution: small is uneven; 1", 1e-3, 1e6},
};

constexpr const char* kBenchmark = "for benchmarks";

const RouterKind kKinds[] = {
    {"top-k", "the K best scores", kTopKOptions, true, false, true,
     "1, or less where not renormalised", kAnyLoss, "Shazeer et al. 2017 (arXiv:1701.06538)"},
    {"switch", "the most probable expert, its probability the weight", kSwitchOptions, true, false,
     true, "the probability", kAnyLoss, "Fedus et al. 2021 (arXiv:2101.03961)"},
    {"gshard", "the best, and a second that may be left out", kGShardOptions, true, false, true,
     "1, less where the second is left out", kAnyLoss, "Lepikhin et al. 2020 (arXiv:2006.16668)"},
    {"noisy-top-k", "top-k of logits with noise whose size is learned", kNoisyTopKOptions, true,
     false, true, "1", "load balance, z, importance, load",
     "Shazeer et al. 2017 (arXiv:1701.06538)"},
    {"v-moe", "top-k of noisy logits, weights not renormalised", kVMoeOptions, true, false, true,
     "less than 1", "load balance, z, importance, load", "Riquelme et al. 2021 (arXiv:2106.05974)"},
    {"expert-choice", "each expert takes its best C tokens of a group", kExpertChoiceOptions, false,
     true, true, "0 to 1", "z", "Zhou et al. 2022 (arXiv:2202.09368)"},
    {"adamoe", "the K best of experts and null experts, which cost nothing", kAdaMoeOptions, true,
     false, true, "1, or none", "load balance, null experts as one",
     "Zeng et al. 2024 (arXiv:2406.13233)"},
    {"moe++", "the K best of experts and of zero, copy and constant ones, which cost nothing",
     kMoePlusPlusOptions, true, false, true, "1, or less where not renormalised", kAnyLoss,
     "Jin et al. 2024 (arXiv:2410.07348)"},
    {"expert-threshold", "each expert takes what is above its threshold, a quantile of the past",
     kLogitsOptions, true, true, true, "0 to 1", "z",
     "expert threshold routing (arXiv:2603.11535)"},
    {"hash", "by the token's id", kHashOptions, true, false, false, "1", kNoLoss,
     "Roller et al. 2021 (arXiv:2106.04426)"},
    {"top-p", "the most probable experts until their sum exceeds P", kTopPOptions, true, true, true,
     "P to 1", kAnyLoss, "Huang et al. 2024 (arXiv:2403.07652)"},
    {"relu", "every expert with a positive logit, its weight", kLogitsOptions, true, true, true,
     "any", "L1 with its controller", "Wang et al. 2024 (arXiv:2412.14711)"},
    {"chain", "top-k in C iterations over the same experts, one after the other", kChainOptions,
     true, false, true, "1 in each iteration, less where not renormalised", kNoLoss,
     "Wang et al. 2025 (arXiv:2506.18945)"},
    {"uniform", "K experts drawn, all alike", kPlaceOptions, true, false, false, "1", kNoLoss,
     kBenchmark},
    {"round-robin", "K experts in turn: loads are the same", kPlaceOptions, true, false, false, "1",
     kNoLoss, kBenchmark},
    {"zipf", "loads by Zipf's law, exactly", kZipfOptions, true, false, false, "1", kNoLoss,
     kBenchmark},
    {"hot", "one expert has a given share, exactly", kHotOptions, true, false, false, "1", kNoLoss,
     kBenchmark},
    {"dirichlet", "drawn loads, exactly", kDirichletOptions, true, false, false, "1", kNoLoss,
     kBenchmark},
};

constexpr RouterOption kSoftMoeOptions[] = {
    {"slots", "P", "of each expert and group; 1", 1, kMany, true},
    {"group", "M", "neighbouring tokens that are mixed, 0: all of a sequence; 0", 0, kMany, true},
    {"normalize", "yes|no", "whether lengths of tokens and slots are divided out; yes"},
    {"causal", "yes|no", "whether tokens read the slots of the group before theirs; no"},
    {"scale", "X", "of the logits, learned; 1", -1e6, 1e6},
};

const RouterKind kMixings[] = {
    {"soft-moe",
     "slots are means of all tokens of a group, a token one of all slots; C, C++, Python, and "
     "language models on a CPU",
     kSoftMoeOptions, false, false, true, "1, over slots", kNoLoss,
     "Puigcerver et al. 2023 (arXiv:2308.00951)"},
};

constexpr RouterOption kPerftOptions[] = {
    {"kind", "routed|embedded|dense|shared", "whose routing the adapters have; routed"},
    {"adapters", "M", "how many; 4, embedded the layer's experts, shared 1", 1, kMostExperts, true},
    {"rank", "R", "width of an adapter; 16", 1, 65536, true},
    {"alpha", "X", "an adapter counts alpha / rank times; 32", -1e6, 1e6},
    {"activation", "identity|silu|gelu|gelu_tanh|relu|relu2", "between A and B; identity"},
    {"top-k", "K", "adapters of each token, routed; 1", 1, kMostExperts, true},
    {"renormalize", "yes|no", "whether chosen scores are scaled to sum to 1, routed; no"},
};

const RouterKind kAdapters[] = {
    {"perft", "LoRA experts that learn beside a frozen layer; C, C++, Python, train --adapters",
     kPerftOptions, true, false, true, "1, or less where not renormalised", kAnyLoss,
     "Liu et al. 2024 (arXiv:2411.08212)"},
};

/// K where it is not said: the base's, of those that have one.
std::int32_t usual_top_k(const RouterConfig& base) {
  if (const auto* router = std::get_if<ExpertChoiceRouter>(&base.kind)) return router->top_k;
  return base.is_variable() ? 1 : base.top_k();
}

TopKRouter top_k_router(const Given& given, const RouterConfig& base) {
  TopKRouter router{.top_k = usual_top_k(base)};
  if (base.is_top_k()) router = base.as_top_k();
  router.top_k = given.whole("top-k", router.top_k);
  if (const auto score = given.word("score")) router.score = *parse<Score>(*score);
  router.renormalize = given.yes("renormalize", router.renormalize);
  router.scale = static_cast<float>(given.number("scale", router.scale));
  return router;
}

/// Of C iterations K / C experts each, so that a chain has the experts' work of one pass of K.
void set_chain(const Given& given, const RouterConfig& base, RouterConfig& config) {
  config.chain = {.iterations = given.whole("iterations", 2),
                  .inner_residual = given.yes("inner-residual", true),
                  .outer_residual = given.yes("outer-residual", false)};
  TopKRouter router = top_k_router(given, base);
  if (!given.word("top-k")) {
    router.top_k = (router.top_k + config.chain.iterations - 1) / config.chain.iterations;
  }
  // One renormalised expert weighs 1 whatever its logit: the gates would learn nothing.
  if (router.top_k == 1 && !given.word("renormalize")) router.renormalize = false;
  config.kind = router;
}

/// As many experts that compute as before, and beside them those of MoE++.
void set_moe_plus_plus(const Given& given, const RouterConfig& base, RouterConfig& config) {
  ZeroComputationExperts& free = config.zero_computation;
  free = {.constant = given.whole("constant", 2),
          .copy = given.whole("copy", 1),
          .zero = given.whole("zero", 1),
          .tau = static_cast<float>(given.number("tau", 0.75))};
  require(free.total() > 0, "zero=0, copy=0 and constant=0: want at least one of them, or top-k");
  config.num_experts = base.num_computing() + free.total();
  config.gating_residual = given.yes("residual", false);
  config.kind = TopKRouter{.top_k = given.whole("top-k", usual_top_k(base)),
                           .renormalize = given.yes("renormalize", true)};
}

GShardRouter gshard_router(const Given& given) {
  GShardRouter router;
  const std::string_view second = given.word("second").value_or("random");
  if (second == "all") router.second = GShardRouter::Second::kAll;
  if (second == "threshold") router.second = GShardRouter::Second::kThreshold;
  router.threshold = static_cast<float>(given.number("threshold", router.threshold));
  router.sampled = given.yes("sampled", router.sampled);
  return router;
}

RouterNetwork network_of(const Given& given, const RouterNetwork& base) {
  using Kind = RouterNetwork::Kind;
  RouterNetwork network = base;
  if (const auto name = given.word("network")) {
    for (const Kind kind : {Kind::kLinear, Kind::kCosine, Kind::kMlp, Kind::kHadamard}) {
      if (*name == to_string(kind) && kind != network.kind) network = {.kind = kind};
    }
  }
  network.width = given.whole("width", network.width);
  return network;
}

RouterConfig config_of(std::string_view name, const Given& given, const RouterConfig& base) {
  RouterConfig config{.num_experts = base.num_experts, .zero_computation = base.zero_computation};
  const std::int32_t top_k = given.whole("top-k", usual_top_k(base));
  const auto forced = [&](ForcedRouter::Load load, double amount = 1) {
    config.kind = ForcedRouter{.load = load, .top_k = top_k, .amount = amount};
  };
  if (name == "top-k") config.kind = top_k_router(given, base);
  if (name == "chain") set_chain(given, base, config);
  if (name == "switch") {
    config.kind = TopKRouter{.top_k = 1, .renormalize = false};
    config.noise = {RouterNoise::Kind::kInputJitter,
                    static_cast<float>(given.number("jitter", 0.01))};
  }
  if (name == "gshard") config.kind = gshard_router(given);
  if (name == "noisy-top-k") {
    config.kind = TopKRouter{.top_k = top_k};
    config.noise = {RouterNoise::Kind::kLearned, static_cast<float>(given.number("floor", 0.01))};
  }
  if (name == "v-moe") {
    config.kind = TopKRouter{.top_k = top_k, .renormalize = false};
    config.noise = {RouterNoise::Kind::kLogits,
                    static_cast<float>(given.number("noise", 1.0 / base.num_experts))};
  }
  if (name == "adamoe") {
    config.kind =
        AdaMoeRouter{.top_k = top_k, .null_experts = given.whole("null-experts", base.num_experts)};
  }
  if (name == "moe++") set_moe_plus_plus(given, base, config);
  if (name == "expert-choice") {
    config.kind = ExpertChoiceRouter{.top_k = top_k,
                                     .capacity_factor = given.number("capacity-factor", 1),
                                     .group = static_cast<std::int64_t>(given.number("group", 0))};
  }
  if (name == "expert-threshold") config.kind = ExpertThresholdRouter{};
  if (name == "hash") {
    config.kind =
        HashRouter{.top_k = top_k, .salt = static_cast<std::uint64_t>(given.number("salt", 0))};
  }
  if (name == "top-p") {
    config.kind = TopPRouter{.threshold = static_cast<float>(given.number("threshold", 0.4))};
  }
  if (name == "relu") config.kind = ReluRouter{};
  if (name == "uniform") forced(ForcedRouter::Load::kUniform);
  if (name == "round-robin") forced(ForcedRouter::Load::kRoundRobin);
  if (name == "zipf") forced(ForcedRouter::Load::kZipf, given.number("s", 1));
  if (name == "hot") forced(ForcedRouter::Load::kHot, given.number("share", 0.5));
  if (name == "dirichlet") {
    forced(ForcedRouter::Load::kDirichlet, given.number("concentration", 1));
  }
  if (config.has_logits() && !config.is_chain()) config.network = network_of(given, base.network);
  return config;
}

}  // namespace

std::span<const RouterKind> router_kinds() { return kKinds; }
std::span<const RouterKind> mixing_kinds() { return kMixings; }
std::span<const RouterKind> adapter_kinds() { return kAdapters; }

const RouterKind& find_router_kind(std::string_view name) {
  for (const RouterKind& kind : kKinds) {
    if (kind.name == name) return kind;
  }
  for (const RouterKind& kind : kMixings) {
    require(
        kind.name != name,
        "router {} gives no token to an expert, so it is none of a layer: soft_moe() of C++ and "
        "Python does it, language models have it (train, study), and bench --suite soft-moe",
        kind.name);
  }
  for (const RouterKind& kind : kAdapters) {
    require(kind.name != name,
            "router {} is of adapters beside a layer, not of a layer: PerftAdapters of C++ and "
            "sw.Perft of Python have it, and verify --router {}",
            kind.name, kind.name);
  }
  fail(ErrorCode::kInvalidArgument, "router '{}' is not one of: {}", printable(name),
       names_of(kKinds));
}

std::optional<SoftMoeConfig> parse_soft_moe(std::string_view spelling) {
  const std::size_t colon = spelling.find(':');
  const RouterKind& kind = kMixings[0];
  if (spelling.substr(0, colon) != kind.name) return std::nullopt;
  const Given given(
      kind, colon == std::string_view::npos ? std::string_view() : spelling.substr(colon + 1));
  SoftMoeConfig config;
  config.slots = static_cast<std::int64_t>(given.number("slots", 1));
  config.group = static_cast<std::int64_t>(given.number("group", 0));
  config.normalize = given.yes("normalize", true);
  config.causal = given.yes("causal", false);
  config.scale = static_cast<float>(given.number("scale", 1));
  return config;
}

RouterConfig parse_router(std::string_view spelling, const RouterConfig& base) {
  const std::size_t colon = spelling.find(':');
  const RouterKind& kind = find_router_kind(spelling.substr(0, colon));
  const Given given(
      kind, colon == std::string_view::npos ? std::string_view() : spelling.substr(colon + 1));
  RouterConfig config = config_of(kind.name, given, base);
  try {
    check(config);
  } catch (const Error& error) {
    throw at_place(fmt::format("router {}", kind.name), error);
  }
  return config;
}

}  // namespace switchyard

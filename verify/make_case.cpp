// Random cases: every option of a layer, and the inputs that break code: no token, one token,
// experts with none, all tokens to one, K = E, E = 1, odd sizes, ranks without experts or tokens.
#include <algorithm>

#include "switchyard/routing/router_kinds.hpp"
#include "testkit/random.hpp"
#include "verify/case.hpp"

namespace switchyard::verify {
namespace {

constexpr DType kF32 = DType::kF32;
constexpr DType kBF16 = DType::kBF16;
constexpr DType kF16 = DType::kF16;

/// A size in [1, high], mostly small, sometimes exactly `high`.
std::int64_t size_up_to(Random& random, std::int64_t high) {
  if (random.one_in(8)) return high;
  return random.one_in(3) ? random.between(1, high)
                          : random.between(1, std::max<std::int64_t>(1, high / 3));
}

RouterConfig make_router(Random& random) {
  RouterConfig config;
  TopKRouter& router = config.as_top_k();
  const std::int64_t num_experts = random.one_in(12) ? 1 : size_up_to(random, 24);
  const bool all = random.one_in(10);
  config.num_experts = static_cast<std::int32_t>(num_experts);
  router.score = random.any_of({Score::kSoftmax, Score::kTopkSoftmax, Score::kSigmoid});
  router.renormalize = !random.one_in(3);
  router.scale = random.any_of({1.0F, 1.0F, 2.5F});
  if (random.one_in(2)) {
    const std::int64_t groups = random.any_of<std::int64_t>({2, 3, 4, 8});
    const std::int64_t of_each = std::max<std::int64_t>(1, num_experts / groups);
    config.num_experts = static_cast<std::int32_t>(groups * of_each);
    router.groups = static_cast<std::int32_t>(groups);
    router.top_groups = static_cast<std::int32_t>(random.between(1, groups));
    router.group_score = random.any_of({GroupScore::kMax, GroupScore::kTop2Sum});
  }
  const std::int32_t choice = config.num_experts / router.groups * router.top_groups;
  router.top_k =
      all ? choice
          : static_cast<std::int32_t>(random.between(1, std::min<std::int32_t>(choice, 6)));
  return config;
}

ExpertConfig make_experts(Random& random, std::int32_t num_experts) {
  ExpertConfig experts;
  experts.num_experts = num_experts;
  experts.hidden = size_up_to(random, 48);
  experts.inner = size_up_to(random, 40);
  experts.activation =
      random.any_of({Activation::kSilu, Activation::kSilu, Activation::kGelu, Activation::kGeluTanh,
                     Activation::kRelu, Activation::kRelu2, Activation::kClampedSwiglu});
  experts.gated = experts.activation == Activation::kClampedSwiglu || !random.one_in(3);
  experts.bias = random.one_in(3);
  return experts;
}

/// The numbers' types. Weights are stored as they are computed with, or in something wider.
void choose_types(Random& random, Case& test) {
  test.compute = random.any_of({kF32, kBF16, kF16});
  test.stored = random.one_in(3) ? kF32 : test.compute;
  test.tokens = random.one_in(2) ? test.compute : random.any_of({kF32, kBF16, kF16});
  test.output = random.one_in(2) ? test.tokens : random.any_of({kF32, kBF16, kF16});
}

void choose_run(Random& random, Case& test, const std::vector<int>& ranks,
                const std::vector<int>& threads) {
  const auto pick = [&](const std::vector<int>& list) {
    return list[static_cast<std::size_t>(random.between(0, std::ssize(list) - 1))];
  };
  test.ranks = pick(ranks);
  test.threads = pick(threads);
  test.again_threads = pick(threads);
  test.split =
      random.any_of({Split::kEven, Split::kEven, Split::kUneven, Split::kFirst, Split::kLast});
  test.layout.kind = random.any_of(
      {LayoutKind::kCompact, LayoutKind::kCompact, LayoutKind::kAligned, LayoutKind::kPadded});
  if (test.layout.kind == LayoutKind::kAligned) {
    test.layout.alignment = random.any_of({1, 2, 3, 4, 8, 16});
  }
  if (random.one_in(2)) {
    test.capacity_factor = static_cast<double>(random.between(1, 40)) / 16;
    test.drop_policy = random.any_of(
        {DropPolicy::kToken, DropPolicy::kChoice, DropPolicy::kProbs, DropPolicy::kBpr});
  }
  test.wire = random.any_of({kF32, kF32, kF32, kBF16, kF16, DType::kF8E4M3});
  test.batch_invariant = random.one_in(2);
  test.rank_invariant = random.one_in(3);
}

bool bits_are_those_of_one_rank(const Case& test) {
  if (test.ranks == 1) return true;
  return test.layer.reduction_groups % test.ranks == 0 &&
         (test.wire == kF32 || test.rank_invariant);
}

void choose_again(Random& random, Case& test) {
  test.again = random.any_of({Again::kNothing, Again::kNothing, Again::kCall, Again::kThreads,
                              Again::kRanks, Again::kAlone});
  const bool promised =
      test.batch_invariant && test.capacity_factor == 0 && bits_are_those_of_one_rank(test);
  if (!promised && (test.again == Again::kRanks || test.again == Again::kAlone)) {
    test.again = Again::kNothing;
  }
  if (test.num_tokens == 0 && test.again == Again::kAlone) test.again = Again::kNothing;
}

/// One size beyond the blocks that kernels work in.
void stretch(Random& random, Case& test) {
  switch (random.between(0, 3)) {
    case 0: test.num_tokens = random.between(100, 700); break;
    case 1: test.layer.experts.hidden = random.between(100, 900); break;
    case 2: test.layer.experts.inner = random.between(100, 900); break;
    default: {
      const std::int32_t groups = test.layer.router.as_top_k().groups;
      const std::int64_t size = random.between(60, 200) / groups;
      test.layer.router.num_experts = static_cast<std::int32_t>(size) * groups;
      test.layer.experts.num_experts = test.layer.router.num_experts;
    }
  }
  test.layer.shared.hidden = test.layer.shared.num_experts > 0 ? test.layer.experts.hidden : 0;
}

/// The score that takes neither groups nor a selection bias.
void use_sparse_mixer(Case& test) {
  TopKRouter& router = test.layer.router.as_top_k();
  router.score = Score::kSparseMixer;
  router.groups = router.top_groups = 1;
  test.selection_bias = false;
}

/// Where the case drops something, by a router that knows the next best expert.
void use_reroute(Case& test) {
  const DropPolicy before = test.drop_policy;
  if (test.capacity_factor == 0 || test.given != Given::kNothing) return;
  test.drop_policy = DropPolicy::kReroute;
  if (!may_reroute(test)) test.drop_policy = before;
}

/// Of the cases, and of `verify --router all`.
constexpr const char* kRouters[] = {"switch:jitter=0.2",
                                    "gshard",
                                    "gshard:second=all,sampled=yes",
                                    "gshard:second=threshold,threshold=0.4",
                                    "noisy-top-k",
                                    "v-moe:noise=1",
                                    "adamoe",
                                    "adamoe:null-experts=3",
                                    "moe++",
                                    "moe++:zero=0,copy=2,constant=1,tau=0.5",
                                    "moe++:constant=3,tau=0,renormalize=no,residual=yes",
                                    "expert-choice",
                                    "expert-choice:capacity-factor=1.7",
                                    "expert-threshold",
                                    "hash",
                                    "top-p:threshold=0.6",
                                    "relu",
                                    "chain",
                                    "chain:iterations=3,inner-residual=no,outer-residual=yes",
                                    "uniform",
                                    "round-robin",
                                    "zipf:s=1.2",
                                    "hot:share=0.4",
                                    "dirichlet"};

/// Small enough that a thousand cases take about a second.
void fit_tokens(Case& test, std::int64_t most) {
  const auto work = [&] {
    return test.num_tokens *
           (test.layer.router.top_k() * test.layer.experts.inner + test.layer.shared.inner) *
           test.layer.experts.hidden;
  };
  while (work() > most && test.num_tokens > 1) test.num_tokens = (test.num_tokens + 1) / 2;
}

/// At most 8 ranks, and the sizes that kernels take.
void fit_to_gpu(Case& test) {
  const auto up = [](std::int64_t size) { return (size + 7) / 8 * 8; };
  test.ranks = std::min(test.ranks, 8);
  for (ExpertConfig* experts : {&test.layer.experts, &test.layer.shared}) {
    experts->hidden = up(experts->hidden);
    experts->inner = up(experts->inner);
  }
  test.rank_invariant = test.rank_invariant && test.wire != DType::kF8E4M3;  // on the CPU only
  // The plans of ranks that share a GPU must find room there.
  while (test.ranks > 1 && test.ranks * test.num_tokens * test.layer.router.top_k() > 50000) {
    test.num_tokens /= 2;
  }
  // What comes home for a token: at most 8 rows.
  const std::int32_t groups = test.layer.reduction_groups;
  if (test.ranks > 1 && groups % test.ranks == 0 && groups > 8) test.rank_invariant = false;
  const bool promised = bits_are_those_of_one_rank(test);
  if (test.ranks > 1 && !promised && (test.again == Again::kRanks || test.again == Again::kAlone)) {
    test.again = Again::kNothing;
  }
}

}  // namespace

Case make_case(std::uint64_t seed, std::uint64_t index, const std::vector<int>& ranks,
               const std::vector<int>& threads, Backend backend) {
  Random random(seed, index);
  Case test;
  test.seed = random.bits() >> 12;  // Exact in JSON's double.
  test.data = random.any_of({Data::kPlain, Data::kPlain, Data::kPlain, Data::kPlain, Data::kTies,
                             Data::kTies, Data::kLarge, Data::kSmall, Data::kZero});
  test.layer.router = make_router(random);
  test.layer.experts = make_experts(random, test.layer.router.num_experts);
  test.layer.reduction_groups = random.any_of({8, 8, 8, 1, 2, 4, 16});
  if (random.one_in(4)) {
    test.layer.shared = test.layer.experts;
    test.layer.shared.num_experts = 1;
    test.layer.shared.inner = size_up_to(random, 40);
    test.layer.shared_gated = random.one_in(2);
  }
  test.router_bias = random.one_in(4);
  test.selection_bias = random.one_in(3);
  choose_types(random, test);
  choose_run(random, test, ranks, threads);
  test.num_tokens = random.one_in(16) ? 0 : random.one_in(10) ? 1 : size_up_to(random, 48);
  if (random.one_in(4))
    test.given = random.any_of({Given::kRandom, Given::kRandom, Given::kOne, Given::kNone});
  if (random.one_in(200) && test.num_tokens > 0) test.given = Given::kBadId;
  if (random.one_in(200) && test.num_tokens > 0) {
    test.data = Data::kNan;
    test.given = Given::kNothing;
  }
  choose_again(random, test);
  if (backend == Backend::kCpu && random.one_in(12)) test.weights = WeightFormat::kQ8;
  test.dispatch_wire =
      random.one_in(4) ? random.any_of({kF32, kBF16, kF16, DType::kF8E4M3}) : test.compute;
  // f16 has no room for large values: not a number any more, whatever follows.
  if (test.data == Data::kLarge && test.dispatch_wire == kF16) test.dispatch_wire = test.compute;
  const bool stretched = random.one_in(100);
  if (stretched) stretch(random, test);
  if (backend == Backend::kCpu && random.one_in(8)) use_sparse_mixer(test);
  test.base = test.layer.router.as_top_k();
  if (random.one_in(4)) {
    use_router(test, kRouters[random.between(0, std::ssize(kRouters) - 1)], backend);
    test.training = random.one_in(2);
  }
  fit_tokens(test, stretched ? 1000000 : 60000);
  if (backend == Backend::kCuda) fit_to_gpu(test);
  constexpr std::uint64_t kOfDrops = 0xd205;
  Random of_drops(seed ^ kOfDrops, index);
  if (of_drops.one_in(3)) use_reroute(test);
  // Drawn apart, so that the other cases are what they were.
  constexpr std::uint64_t kOfWeights = 0x5ca1e;
  Random of_weights(seed ^ kOfWeights, index);
  if (backend == Backend::kCpu && !stretched && test.weights == WeightFormat::kExact &&
      of_weights.one_in(10)) {
    const auto format = of_weights.any_of(
        {WeightFormat::kE4M3, WeightFormat::kMxfp4, WeightFormat::kInt4, WeightFormat::kNvfp4});
    use_weights(test, format, backend);
  }
  use_network(test, seed, index, backend);
  use_places(test, seed, index);
  return test;
}

namespace {

/// Iterations of experts whose scales are drawn widely leave the range of f16.
void keep_in_range(Case& test) {
  if (!test.layer.router.is_chain() || !has_nibbles(test.weights)) return;
  for (DType* type : {&test.compute, &test.dispatch_wire}) {
    if (*type == kF16) *type = kBF16;
  }
}

}  // namespace

void use_weights(Case& test, WeightFormat weights, Backend backend) {
  test.weights = weights;
  if (backend == Backend::kCuda && weights != WeightFormat::kExact) {
    if (test.dispatch_wire == test.compute) test.dispatch_wire = DType::kBF16;
    test.compute = DType::kBF16;
  }
  const std::int64_t group = scale_group_of(test);
  if (group == 1) return;
  const auto up = [group](std::int64_t size) { return (size + group - 1) / group * group; };
  for (ExpertConfig* experts : {&test.layer.experts, &test.layer.shared}) {
    experts->hidden = up(experts->hidden);
    experts->inner = up(experts->inner);
  }
  keep_in_range(test);
  fit_tokens(test, 200000);
}

void use_fp8_rows(Case& test, std::uint64_t seed, std::uint64_t index) {
  constexpr std::uint64_t kOfRows = 0xe4303;  // drawn apart, as the weights
  Random random(seed ^ kOfRows, index);
  test.fp8_rows = true;
  // Beyond a block of scales at times.
  const bool small = std::max(test.layer.experts.hidden, test.layer.experts.inner) <= 48;
  const std::int64_t factor = small && random.one_in(3) ? 8 : 1;
  const auto up = [](std::int64_t size) { return (size + 15) / 16 * 16; };
  for (ExpertConfig* experts : {&test.layer.experts, &test.layer.shared}) {
    experts->hidden = up(experts->hidden * factor);
    experts->inner = up(experts->inner * factor);
  }
  test.layer.experts.gated = true;
  if (test.layer.shared.num_experts > 0) test.layer.shared.gated = true;
  fit_tokens(test, 400000);
}

std::string router_number(std::uint64_t index) { return kRouters[index % std::size(kRouters)]; }

void use_router(Case& test, const std::string& router, Backend backend) {
  constexpr std::int32_t kMostColumns = 32;  // of layers on CUDA
  const bool needs_two = router.starts_with("gshard") && base_experts(test) == 1;
  test.router = needs_two ? "top-p" : router;
  set_router(test);
  const RouterConfig& config = test.layer.router;
  const bool too_wide = config.is_variable() && config.top_k() > kMostColumns;
  if (backend == Backend::kCuda && too_wide) {
    test.router = "hash";
    set_router(test);
  }
  if (config.is_variable()) test.capacity_factor = 0;
  if (!may_reroute(test)) test.drop_policy = DropPolicy::kToken;
  test.selection_bias = test.selection_bias && may_have_selection_bias(test);
  if (!config.has_logits() && test.data == Data::kNan) test.data = Data::kPlain;
  // Iterations make large numbers too large, and take no routing that is given.
  if (config.is_chain() && test.data == Data::kLarge) test.data = Data::kPlain;
  if (config.is_chain()) test.given = Given::kNothing;
  ExpertConfig& experts = test.layer.experts;
  if (config.is_chain() && experts.activation == Activation::kRelu2) {
    experts.activation = test.layer.shared.activation = Activation::kRelu;
  }
  if (config.is_chain() && test.wire == kF16) test.wire = kBF16;
  if (config.is_chain() && test.dispatch_wire == kF16) test.dispatch_wire = test.compute;
  keep_in_range(test);
  const bool together = test.again == Again::kRanks || test.again == Again::kAlone;
  if (together && !routes_token_by_token(test)) test.again = Again::kNothing;
  // A routing that is given has K columns.
  if (config.is_variable()) test.given = Given::kNothing;
  fit_places(test);
  if (backend == Backend::kCuda) fit_to_gpu(test);
}

void use_network(Case& test, std::uint64_t seed, std::uint64_t index, Backend backend) {
  constexpr std::uint64_t kOfNetworks = 0x9e704;  // drawn apart, as the weights
  Random random(seed ^ kOfNetworks, index);
  const RouterConfig& router = test.layer.router;
  const bool has_any = router.has_logits() && !router.is_chain() && router.network.is_linear();
  if (!random.one_in(5) || !has_any) return;
  std::string words = test.router.empty() ? "top-k" : test.router;
  words += words.find(':') == std::string::npos ? ":" : ",";
  words += std::string("network=") + random.any_of({"cosine", "mlp", "hadamard"});
  const bool has_width = random.one_in(2);
  const std::int64_t width = random.between(1, 40);
  // Kernels take multiples of 8.
  if (backend == Backend::kCuda) words += ",width=" + std::to_string((width + 7) / 8 * 8);
  if (backend == Backend::kCpu && has_width) words += ",width=" + std::to_string(width);
  test.router = words;
  set_router(test);
  // Squares of squares.
  if (test.data == Data::kLarge) test.data = Data::kPlain;
}

void set_router(Case& test) {
  RouterConfig& router = test.layer.router;
  router = {.num_experts = base_experts(test), .kind = test.base};
  if (test.router.starts_with("moe++")) test.identity_experts = 0;
  router.zero_computation.copy = test.identity_experts;
  if (!test.router.empty() && !is_perft(test.router)) router = parse_router(test.router, router);
}

}  // namespace switchyard::verify

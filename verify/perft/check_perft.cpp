#include "verify/perft/check_perft.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/check.hpp"
#include "switchyard/device.hpp"
#include "testkit/random.hpp"
#include "verify/check_backward.hpp"
#include "verify/check_layer.hpp"
#include "verify/perft/run_perft.hpp"

namespace switchyard::verify {
namespace {

bool says(const std::string& spelling, const std::string& option) {
  return spelling.find(":" + option + "=") != std::string::npos ||
         spelling.find("," + option + "=") != std::string::npos;
}

void require_exact_scale(const PerftConfig& config) {
  int exponent = 0;
  require(std::frexp(config.scale(), &exponent) == 0.5F && exponent > 0,
          "router perft: alpha={} with rank={}, want 1, 2, 4, ... times the rank here",
          config.alpha, config.rank);
}

/// The routing that the frozen layer makes, with what it drops taken out.
void take_routing(const Problem& frozen, Problem& adapters) {
  Problem alone = frozen;
  alone.test.ranks = 1;
  const RunResult result = run_layer(alone, {.rank_begin = {0, frozen.test.num_tokens}});
  if (result.error) throw Error(*result.error);
  const RoutingRecord& record = result.ranks[0].record;
  adapters.given_expert = record.expert;
  adapters.given_weight = record.weight;
  for (std::size_t i = 0; i < record.kept.size(); ++i) {
    if (record.kept[i] == 0) adapters.given_expert[i] = -1;
  }
}

/// The adapters as the problem of a layer on one rank.
Problem problem_of(const Problem& frozen, const PerftConfig& config, Backend backend) {
  Case test = frozen.test;
  const bool routed = config.kind == PerftKind::kRouted;
  const bool embedded = config.kind == PerftKind::kEmbedded;
  test.layer = {.router = config.router, .experts = config.experts()};
  if (is_merged(config, backend)) {
    test.layer.experts.num_experts = 1;
    test.layer.experts.inner *= config.num_adapters;
  }
  const std::int32_t experts = test.layer.experts.num_experts;
  if (!routed) {
    test.layer.router = {.num_experts = experts,
                         .kind = TopKRouter{.top_k = embedded ? config.router.top_k() : experts}};
  }
  test.base = test.layer.router.as_top_k();
  test.router.clear();
  test.training = test.router_bias = test.selection_bias = false;
  test.stored = DType::kF32;
  test.weights = WeightFormat::kExact;
  test.given = routed ? Given::kNothing : Given::kRandom;
  test.layout = {};
  test.capacity_factor = 0;
  test.drop_policy = DropPolicy::kToken;
  test.ranks = 1;
  test.wire = DType::kF32;
  test.dispatch_wire = test.compute;
  test.rank_invariant = false;
  if (test.again != Again::kThreads) test.again = Again::kNothing;
  Problem adapters = make_problem(test);
  auto source =
      std::make_shared<PlainSource>(dynamic_cast<const PlainSource&>(*adapters.model.experts));
  // In the compute type, so that the scale, a power of two and at least 1, is exact in it.
  for (float& value : source->down) value = round_to(test.compute, value) * config.scale();
  adapters.model.experts = source;
  if (embedded) take_routing(frozen, adapters);
  if (!routed && !embedded) {
    for (std::int64_t i = 0; i < std::ssize(adapters.given_expert); ++i) {
      adapters.given_expert[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(i % experts);
    }
    std::fill(adapters.given_weight.begin(), adapters.given_weight.end(), 1.0F);
  }
  return adapters;
}

/// What is asked for of a layer, less what adapters have not, in types in which a scale is exact.
BackwardProblem backward_of(const Problem& adapters, const PerftConfig& config) {
  BackwardProblem backward = make_backward_problem(adapters);
  backward.dlogits.clear();
  const auto array = [&](Gradient which) -> GradientArray& {
    return backward.gradients[static_cast<std::size_t>(which)];
  };
  array(Gradient::kRouterBias).bytes.clear();
  if (config.kind != PerftKind::kEmbedded) array(Gradient::kWeight).bytes.clear();
  if (config.scale() == 1.0F) return backward;
  backward.dout_type = adapters.test.compute;
  for (float& value : backward.dout) value = round_to(backward.dout_type, value);
  GradientArray& db = array(Gradient::kW2);
  if (db.bytes.empty()) return backward;
  const std::vector<float> before = decode(db.dtype, db.bytes);
  db.dtype = DType::kF32;
  db.bytes = encode(db.dtype, before);
  return backward;
}

/// out = base + what is added, in f32 and rounded once, also where `base` is `out`.
std::string check_base(const Problem& adapters, const PerftConfig& config, Backend backend) {
  const Case& test = adapters.test;
  const std::int64_t tokens = test.num_tokens, hidden = config.hidden;
  Random random(test.seed, 300);
  std::vector<float> base(static_cast<std::size_t>(tokens * hidden));
  for (float& value : base) value = round_to(test.output, random.signed_unit());
  std::vector<std::byte> added = encode(DType::kF32, base);
  std::vector<std::byte> out = encode(test.output, base);
  if (backend == Backend::kCuda) use_gpu_of_rank(0);
  CallMemory memory(backend);
  PerftCall call(adapters, config, 0, tokens, memory);
  PerftAdapters layer(model_of(adapters, config), {.backend = backend, .compute = test.compute});
  call.args.out = {memory.place(added), DType::kF32, tokens, hidden};
  layer.forward(call.args);
  call.args.out = {memory.place(out), test.output, tokens, hidden};
  call.args.base = call.args.out;
  layer.forward(call.args);
  layer.check();
  memory.finish();
  std::vector<float> sums = decode(DType::kF32, added);
  for (std::size_t i = 0; i < base.size(); ++i) sums[i] += base[i];
  if (encode(test.output, sums) != out) return "the sum with a layer's output has other bits";
  return {};
}

/// A forward alone, as check_layer() asks for it.
RunResult forward_alone(const PerftRunner& run, const Problem& adapters, const PerftConfig& config,
                        const RunArgs& args) {
  BackwardProblem nothing{.dout = std::vector<float>(adapters.tokens.size()),
                          .gradients = all_gradients(adapters.test)};
  for (GradientArray& array : nothing.gradients) array.bytes.clear();
  BackwardResult both =
      run(adapters, config, nothing,
          {.threads = args.threads, .backend = args.backend, .timeout = args.timeout});
  RunResult result{.error = both.error};
  const auto& counts = both.record.counts_kept;
  const std::int64_t rows = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  result.ranks.push_back({.out = std::move(both.out),
                          .record = std::move(both.record),
                          .rows_used = rows,
                          .rows_executed = rows});
  return result;
}

}  // namespace

void check_perft_spelling(const std::string& spelling) {
  const PerftConfig config = parse_perft(spelling, {.hidden = 1});
  if (!says(spelling, "alpha")) return;
  require(says(spelling, "rank"), "router perft: alpha={} without a rank, want both here",
          config.alpha);
  require_exact_scale(config);
}

void use_perft(Case& test, const std::string& spelling, std::uint64_t seed, std::uint64_t index) {
  constexpr std::uint64_t kOfAdapters = 0x9e4f7;  // drawn apart, as the networks
  Random random(seed ^ kOfAdapters, index);
  std::string words = spelling;
  const auto add = [&](const std::string& option, const std::string& value) {
    if (says(spelling, option)) return;
    words += (words.find(':') == std::string::npos ? ":" : ",") + option + "=" + value;
  };
  add("kind", random.any_of({"routed", "routed", "embedded", "dense", "shared"}));
  const std::int64_t adapters = random.between(1, 9);
  const bool routed = words.find("kind=routed") != std::string::npos;
  if (routed || words.find("kind=dense") != std::string::npos) {
    add("adapters", std::to_string(adapters));
  }
  if (routed && !says(spelling, "adapters")) {
    add("top-k", std::to_string(random.between(1, std::min<std::int64_t>(adapters, 4))));
  }
  if (routed) add("renormalize", random.any_of({"yes", "no"}));
  const auto rank = random.any_of<std::int64_t>({1, 4, 4, 5, 8, 16, 17, 33, 64});
  add("rank", std::to_string(rank));
  const auto times = random.any_of<std::int64_t>({1, 2, 4});
  add("alpha", std::to_string(times * parse_perft(words, {.hidden = 1}).rank));
  add("activation", random.any_of({"identity", "identity", "silu", "gelu", "gelu_tanh", "relu"}));
  test.router = words;
  test.training = false;
  if (test.data == Data::kNan) test.data = Data::kPlain;
  if (test.given == Given::kBadId) test.given = Given::kRandom;
  test.layer.router = {.num_experts = base_experts(test), .kind = test.base};
  fit_places(test);
  if (test.drop_policy == DropPolicy::kReroute) test.drop_policy = DropPolicy::kToken;
  const PerftConfig config = perft_of(test);
  const std::int64_t columns =
      config.kind == PerftKind::kRouted || config.kind == PerftKind::kEmbedded
          ? config.router.top_k()
          : config.num_adapters;
  while (test.num_tokens * columns * config.rank * config.hidden > 40000 && test.num_tokens > 1) {
    test.num_tokens = (test.num_tokens + 1) / 2;
  }
}

std::string check_perft(const Problem& problem, const VerifyOptions& options,
                        const PerftRunner& given) {
  const PerftConfig config = perft_of(problem.test);
  require_exact_scale(config);
  const PerftRunner run =
      given ? given
            : [ranks = problem.test.ranks](
                  const Problem& adapters, const PerftConfig& of, const BackwardProblem& backward,
                  const BackwardRun& how) { return run_perft(adapters, of, backward, how, ranks); };
  const Problem adapters = problem_of(problem, config, options.backend);
  std::string wrong;
  if (options.pass != Pass::kBackward) {
    wrong = check_layer(
        adapters, {.backend = options.backend,
                   .timeout = options.timeout,
                   .run = [&](const Problem& of,
                              const RunArgs& args) { return forward_alone(run, of, config, args); },
                   .row_scale = config.scale()});
    if (wrong.empty()) wrong = check_base(adapters, config, options.backend);
  }
  if (wrong.empty() && options.pass != Pass::kForward) {
    wrong = check_backward(adapters, backward_of(adapters, config),
                           [&](const Problem& of, const BackwardProblem& backward,
                               const BackwardRun& how) { return run(of, config, backward, how); },
                           {.backend = options.backend, .timeout = options.timeout});
    if (!wrong.empty()) wrong = "backward: " + wrong;
  }
  return wrong.empty() ? wrong : "adapters: " + wrong;
}

}  // namespace switchyard::verify

// A problem forward and back, on one rank or several.
#include "verify/run_backward.hpp"

#include <nlohmann/json.hpp>
#include <span>

#include "comm/ranks/on_ranks.hpp"
#include "layer/packed_result.hpp"
#include "switchyard/device.hpp"
#include "switchyard/layer.hpp"
#include "testkit/call_memory.hpp"
#include "testkit/random.hpp"
#include "verify/run_layer.hpp"

namespace switchyard::verify {
namespace {

std::vector<float> random_values(Random& random, std::int64_t count, DType dtype, float size) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = round_to(dtype, size * random.signed_unit());
  return values;
}

float size_of_dout(const Case& test) {
  switch (test.data) {
    case Data::kLarge: return test.compute == DType::kF16 ? 2.0F : 30.0F;
    case Data::kSmall: return 0x1p-12F;
    default: return 1.0F;
  }
}

/// All gradients that a layer has, none asked for.
std::vector<GradientArray> gradients_of(const Case& test) {
  const std::int64_t tokens = test.num_tokens;
  const std::int64_t hidden = test.layer.experts.hidden;
  const RouterConfig& router = test.layer.router;
  const std::int64_t num_logits = router.gate_rows();
  const bool routed = routes_by_logits(test);
  std::vector<GradientArray> list;
  const auto add = [&](const char* name, std::int64_t rows, std::int64_t cols) {
    list.push_back({.name = name, .rows = rows, .cols = cols});
  };
  const auto add_experts = [&](const std::string& name, const ExpertConfig& config) {
    const std::int64_t experts = config.num_experts;
    const std::int64_t width = (config.gated ? 2 : 1) * config.inner;
    const std::int64_t biases = config.bias ? experts : 0;
    list.push_back({.name = name + "dw13", .rows = experts * width, .cols = config.hidden});
    list.push_back({.name = name + "dw2", .rows = experts * config.hidden, .cols = config.inner});
    list.push_back({.name = name + "db13", .rows = biases, .cols = width});
    list.push_back({.name = name + "db2", .rows = biases, .cols = config.hidden});
  };
  add("dtokens", tokens, hidden);
  add("dweight", router.is_chain() ? 0 : tokens, router.top_k());
  list[0].of_parameter = list[1].of_parameter = false;
  add("dgate", routed ? num_logits : 0, router.network.features(hidden));
  add("drouter_bias", routed ? 1 : 0, num_logits);
  add_experts("", test.layer.experts);
  add_experts("shared ", test.layer.shared);
  add("dshared_gate", test.layer.shared_gated ? 1 : 0, hidden);
  const bool noisy = router.noise.kind == RouterNoise::Kind::kLearned;
  add("dnoise_gate", routed && noisy ? num_logits : 0, hidden);
  const std::int64_t network = router.network.size(hidden);
  add("drouter_network", routed && network > 0 ? 1 : 0, network);
  add("dconstant_experts", std::int64_t{3} * router.zero_computation.constant, hidden);
  const bool residual = routed && router.gating_residual;
  add("dgating_residual", residual ? num_logits : 0, num_logits);
  add("dprevious_logits", residual ? tokens : 0, num_logits);
  list.back().of_parameter = false;
  return list;
}

/// All ones: NaN in every type, so that an element that is not written shows.
void ask_for(GradientArray& array) {
  array.bytes.assign(static_cast<std::size_t>(array.rows * array.cols * size_of(array.dtype)),
                     std::byte{0xff});
}

RawMatrix raw(GradientArray& array, CallMemory& memory) {
  if (array.bytes.empty()) return {};
  return {memory.place(array.bytes), array.dtype, array.rows, array.cols};
}

Matrix<float> matrix(GradientArray& array, CallMemory& memory) {
  if (array.bytes.empty()) return {};
  return {reinterpret_cast<float*>(memory.place(array.bytes)), {array.rows, array.cols}};
}

Vector<float> vector(GradientArray& array, CallMemory& memory) {
  if (array.bytes.empty()) return {};
  return {reinterpret_cast<float*>(memory.place(array.bytes)), {array.rows * array.cols}};
}

}  // namespace

bool has_backward(const Case& test) {
  const bool fails =
      test.num_tokens > 0 && (test.data == Data::kNan || test.given == Given::kBadId);
  const RouterConfig& router = test.layer.router;
  bool rule = true;
  // Not in the reference: what jitter does to the gradient of tokens, and a second expert that was
  // left out. tests/layer/layer_routers_test.cpp and numpy's golden values have them.
  if (const auto* gshard = std::get_if<GShardRouter>(&router.kind)) {
    rule = gshard->second == GShardRouter::Second::kAll;
  }
  if (test.training) rule = rule && router.noise.kind != RouterNoise::Kind::kInputJitter;
  return rule && test.weights == WeightFormat::kExact && !fails;
}

BackwardProblem make_backward_problem(const Problem& problem) {
  const Case& test = problem.test;
  constexpr std::uint64_t kStream = 200;  // beside those of make_problem()
  Random random(test.seed, kStream);
  const auto any_type = [&] {
    return random.one_in(2) ? test.compute
                            : random.any_of({DType::kF32, DType::kBF16, DType::kF16});
  };
  BackwardProblem backward;
  backward.recompute = random.any_of({Recompute::kNone, Recompute::kActivationInput});
  backward.accumulate = random.one_in(3);
  backward.dout_type = any_type();
  const std::int64_t tokens = test.num_tokens;
  backward.dout = random_values(random, tokens * test.layer.experts.hidden, backward.dout_type,
                                size_of_dout(test));
  if (routes_by_logits(test) && random.one_in(3) && !test.layer.router.is_chain()) {
    backward.dlogits =
        random_values(random, tokens * test.layer.router.num_logits(), DType::kF32, 0.5F);
  }
  backward.gradients = gradients_of(test);
  const DType of_tokens = any_type();
  const DType of_gate = any_type();
  const DType of_weights = random.one_in(2) ? DType::kF32 : test.compute;
  const std::int64_t left_out = random.one_in(3) ? random.between(1, 3) : 0;
  for (std::size_t i = 0; i < backward.gradients.size(); ++i) {
    GradientArray& array = backward.gradients[i];
    switch (static_cast<Gradient>(i)) {
      case Gradient::kTokens: array.dtype = of_tokens; break;
      case Gradient::kGate:
      case Gradient::kNoiseGate: array.dtype = of_gate; break;
      case Gradient::kW13:
      case Gradient::kW2:
      case Gradient::kSharedW13:
      case Gradient::kSharedW2: array.dtype = of_weights; break;
      default: break;
    }
    if (left_out > 0 && random.between(1, 4) <= left_out) continue;
    const bool added = backward.accumulate && array.of_parameter;
    if (!added) ask_for(array);
    if (added) {
      array.bytes =
          encode(array.dtype, random_values(random, array.rows * array.cols, array.dtype, 1.0F));
    }
  }
  return backward;
}

std::vector<GradientArray> all_gradients(const Case& test) {
  std::vector<GradientArray> gradients = gradients_of(test);
  for (GradientArray& array : gradients) ask_for(array);
  return gradients;
}

namespace {

using nlohmann::json;

/// How the ranks hold a gradient.
enum class Spread : std::uint8_t { kByToken, kByExpert, kAlike };

Spread spread_of(std::size_t gradient) {
  switch (static_cast<Gradient>(gradient)) {
    case Gradient::kTokens:
    case Gradient::kWeight:
    case Gradient::kPreviousLogits: return Spread::kByToken;
    case Gradient::kW13:
    case Gradient::kW2:
    case Gradient::kB13:
    case Gradient::kB2: return Spread::kByExpert;
    default: return Spread::kAlike;
  }
}

/// What one rank has of it, as it is before.
GradientArray part_of(const GradientArray& whole, std::size_t gradient, const Case& test,
                      std::int64_t first_token, std::int64_t num_tokens, int rank) {
  GradientArray part = whole;
  std::int64_t first = 0;
  switch (spread_of(gradient)) {
    case Spread::kAlike: return part;
    case Spread::kByToken:
      first = first_token;
      part.rows = num_tokens;
      break;
    case Spread::kByExpert: {
      const std::int64_t num_experts = test.layer.experts.num_experts;
      const std::int64_t of_each = whole.rows / num_experts;
      first = of_each * first_expert_of(num_experts, test.ranks, rank);
      part.rows = of_each * first_expert_of(num_experts, test.ranks, rank + 1) - first;
    }
  }
  if (whole.bytes.empty()) return part;
  const std::int64_t row_bytes = whole.cols * size_of(whole.dtype);
  const auto begin = whole.bytes.begin() + first * row_bytes;
  part.bytes.assign(begin, begin + part.rows * row_bytes);
  return part;
}

template <typename T>
void append(std::vector<T>& to, const std::vector<T>& values) {
  to.insert(to.end(), values.begin(), values.end());
}

json to_json(const BackwardResult& part) {
  json gradients = json::array();
  for (const GradientArray& array : part.gradients) gradients.push_back(pack_array(array.bytes));
  return {{"out", pack_array(part.out)},
          {"plain_out", pack_array(part.plain_out)},
          {"record", pack_record(part.record)},
          {"gradients", std::move(gradients)}};
}

/// Rank by rank, so that tokens and experts are in order.
void add_part(BackwardResult& whole, const json& said, bool first) {
  append(whole.out, array_of<std::byte>(said.at("out")));
  append(whole.plain_out, array_of<std::byte>(said.at("plain_out")));
  const RoutingRecord record = record_of(said.at("record"));
  append(whole.record.expert, record.expert);
  append(whole.record.weight, record.weight);
  append(whole.record.kept, record.kept);
  for (std::size_t i = 0; i < whole.gradients.size(); ++i) {
    GradientArray& array = whole.gradients[i];
    const auto bytes = array_of<std::byte>(said.at("gradients").at(i));
    if (first) array.bytes.clear();
    if (first || spread_of(i) != Spread::kAlike) {
      append(array.bytes, bytes);
    } else if (array.bytes != bytes) {
      whole.apart = array.name;
    }
  }
}

BackwardResult run_rank(const Problem& problem, const BackwardProblem& backward,
                        const BackwardRun& run, Communicator* communicator) {
  const Case& test = problem.test;
  const int rank = communicator == nullptr ? 0 : communicator->rank();
  const std::vector<std::int64_t> begins = rank_begin(test);
  const std::int64_t begin = begins[static_cast<std::size_t>(rank)];
  const std::int64_t tokens = begins[static_cast<std::size_t>(rank) + 1] - begin;
  const std::int64_t hidden = test.layer.experts.hidden;
  const std::int64_t num_logits = test.layer.router.num_logits();
  const std::int64_t top_k = test.layer.router.top_k();
  const auto rows = [&](const std::vector<float>& values, std::int64_t cols) {
    return std::span(values).subspan(static_cast<std::size_t>(begin * cols),
                                     static_cast<std::size_t>(tokens * cols));
  };
  BackwardResult result;
  for (std::size_t i = 0; i < backward.gradients.size(); ++i) {
    result.gradients.push_back(part_of(backward.gradients[i], i, test, begin, tokens, rank));
  }
  result.out.assign(static_cast<std::size_t>(tokens * hidden * size_of(test.output)),
                    std::byte{0xff});
  result.plain_out = result.out;
  const std::vector<std::byte> x = encode(test.tokens, rows(problem.tokens, hidden));
  std::vector<std::byte> dout = encode(backward.dout_type, rows(backward.dout, hidden));
  std::vector<std::byte> dlogits;
  if (!backward.dlogits.empty()) {
    dlogits = encode(DType::kF32, rows(backward.dlogits, num_logits));
  }
  const auto array = [&](Gradient which) -> GradientArray& {
    return result.gradients[static_cast<std::size_t>(which)];
  };
  if (run.backend == Backend::kCuda) use_gpu_of_rank(rank);
  // Before the layer: making memory may wait for the device, and so for ranks that wait for this.
  CallMemory memory(run.backend);
  BackwardArgs args{.dout = {memory.place(dout), backward.dout_type, tokens, hidden},
                    .dtokens = raw(array(Gradient::kTokens), memory),
                    .dweight = matrix(array(Gradient::kWeight), memory),
                    .dgate = raw(array(Gradient::kGate), memory),
                    .dnoise_gate = raw(array(Gradient::kNoiseGate), memory),
                    .drouter_bias = vector(array(Gradient::kRouterBias), memory),
                    .drouter_network = vector(array(Gradient::kNetwork), memory),
                    .dconstant_experts = vector(array(Gradient::kConstantExperts), memory),
                    .dgating_residual = vector(array(Gradient::kGatingResidual), memory),
                    .dprevious_logits = matrix(array(Gradient::kPreviousLogits), memory),
                    .experts = {.w13 = raw(array(Gradient::kW13), memory),
                                .w2 = raw(array(Gradient::kW2), memory),
                                .b13 = matrix(array(Gradient::kB13), memory),
                                .b2 = matrix(array(Gradient::kB2), memory)},
                    .shared = {.w13 = raw(array(Gradient::kSharedW13), memory),
                               .w2 = raw(array(Gradient::kSharedW2), memory),
                               .b13 = matrix(array(Gradient::kSharedB13), memory),
                               .b2 = matrix(array(Gradient::kSharedB2), memory)},
                    .dshared_gate = vector(array(Gradient::kSharedGate), memory),
                    .accumulate = backward.accumulate,
                    .stream = memory.stream()};
  if (!dlogits.empty()) {
    args.dlogits = {reinterpret_cast<const float*>(memory.place(dlogits)), {tokens, num_logits}};
  }
  MoeLayer layer(problem.model,
                 options_of(test, {.threads = run.threads,
                                   .rank_begin = begins,
                                   .backend = run.backend,
                                   .device_engine = run.device_engine}),
                 communicator);
  SavedForward saved(backward.recompute);
  ForwardArgs forward{.tokens = {x.data(), test.tokens, tokens, hidden},
                      .out = {result.out.data(), test.output, tokens, hidden},
                      .request = request_of(problem, begin, begin + tokens),
                      .saved = &saved};
  forward.request.record = &result.record;
  if (test.given != Given::kNothing) {
    forward.expert = {problem.given_expert.data() + begin * top_k, {tokens, top_k}};
    forward.weight = {problem.given_weight.data() + begin * top_k, {tokens, top_k}};
  }
  layer.forward(forward);
  ForwardArgs plain = forward;
  plain.out.data = result.plain_out.data();
  plain.request.record = nullptr;
  plain.saved = nullptr;
  layer.forward(plain);
  layer.check();  // on another stream
  args.saved = &saved;
  layer.backward(args);
  layer.check();
  memory.finish();
  return result;
}

}  // namespace

BackwardResult run_backward(const Problem& problem, const BackwardProblem& backward,
                            const BackwardRun& run) {
  BackwardResult result;
  try {
    if (problem.test.ranks == 1) return run_rank(problem, backward, run, nullptr);
    const RankPlace place{
        .num_ranks = problem.test.ranks, .world = run.group, .timeout = run.timeout};
    const std::vector<json> said = on_ranks(place, [&](Communicator& communicator) {
      return to_json(run_rank(problem, backward, run, &communicator));
    });
    result.gradients = backward.gradients;
    for (const json& part : said) add_part(result, part, &part == said.data());
  } catch (const Error& error) {
    result.error = error;
  }
  return result;
}

}  // namespace switchyard::verify

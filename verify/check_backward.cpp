// One case forward and back, against the reference.
#include "verify/check_backward.hpp"

#include <fmt/core.h>

#include <cstring>

#include "reference/reference.hpp"

namespace switchyard::verify {
namespace {

using reference::Bounded;

/// What the reference has for each of the gradients, in the order of `Gradient`.
std::vector<std::vector<Bounded>> expected_gradients(const Problem& problem,
                                                     const BackwardProblem& backward,
                                                     const RoutingRecord& record, Backend backend) {
  const Case& test = problem.test;
  const LayerModel& model = problem.model;
  const reference::RouterWeights router{model.gate.floats(), model.router_bias.floats(),
                                        model.selection_bias.floats(),
                                        model.router_network.floats()};
  const auto tokens = reference::as_computed(problem.tokens, test.compute);
  const auto dout = reference::as_computed(backward.dout, test.compute);
  auto logits =
      reference::network_logits(test.layer.router, tokens, test.layer.experts.hidden, router);
  if (routes_by_logits(test)) {
    reference::add_residual(logits, model.gating_residual.floats(), problem.previous_logits);
  }
  const RouteRequest request = request_of(problem, 0, test.num_tokens);
  std::vector<Bounded> of_noise;
  std::vector<Bounded> slopes;
  if (!model.noise_gate.empty()) {
    of_noise =
        reference::router_logits(tokens, test.layer.experts.hidden, test.layer.router.num_logits(),
                                 {.gate = model.noise_gate.floats()});
    slopes = reference::noise_slopes(test.layer.router, request, of_noise);
  }
  reference::add_noise(test.layer.router, request, logits, of_noise);
  const reference::LayerRun run{.precision = {.compute = test.compute,
                                              .may_round_inner_gradient = backend == Backend::kCuda,
                                              .may_split_products = backend == Backend::kCuda},
                                .dispatch_wire = dispatch_wire_of(test),
                                .round_rows = backend == Backend::kCuda};
  reference::LayerGradient all =
      reference::layer_gradient(model, run,
                                {.tokens = tokens,
                                 .assignments = {.expert = record.expert,
                                                 .weight = record.weight,
                                                 .kept = record.kept,
                                                 .top_k = test.layer.router.top_k()},
                                 .routed = routes_by_logits(test),
                                 .router = router,
                                 .logits = logits,
                                 .noise_gate = model.noise_gate.floats(),
                                 .noise_slopes = slopes,
                                 .gating_residual = model.gating_residual.floats(),
                                 .previous_logits = problem.previous_logits,
                                 .dout = dout,
                                 .dlogits = backward.dlogits});
  return {std::move(all.tokens),
          std::move(all.weight),
          std::move(all.gate),
          std::move(all.router_bias),
          std::move(all.experts.w13),
          std::move(all.experts.w2),
          std::move(all.experts.b13),
          std::move(all.experts.b2),
          std::move(all.shared.w13),
          std::move(all.shared.w2),
          std::move(all.shared.b13),
          std::move(all.shared.b2),
          std::move(all.shared_gate),
          std::move(all.noise_gate),
          std::move(all.network),
          std::move(all.constant_experts),
          std::move(all.gating_residual),
          std::move(all.previous_logits)};
}

/// What is in memory once a gradient is added to `before`.
Bounded added(Bounded gradient, float before) {
  const bool nothing = gradient.value == 0 && gradient.error == 0;
  return nothing ? Bounded{double{before}, 0} : add(gradient, {double{before}, 0});
}

std::string check_gradient(const GradientArray& array, std::span<const Bounded> expected,
                           const GradientArray* before) {
  const std::vector<float> values = decode(array.dtype, array.bytes);
  if (values.size() != expected.size()) {
    return fmt::format("{} has {} values, want {}", array.name, values.size(), expected.size());
  }
  std::vector<float> start;
  if (before != nullptr) start = decode(before->dtype, before->bytes);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const Bounded want = before == nullptr ? expected[i] : added(expected[i], start[i]);
    if (admits(want, array.dtype, double{values[i]})) continue;
    const auto place = static_cast<std::int64_t>(i);
    return fmt::format("{}[{}, {}] is {:.9g}, not {:.9g} +- {:.3g}", array.name, place / array.cols,
                       place % array.cols, values[i], want.value, want.error);
  }
  return {};
}

std::string check_gradients(const Problem& problem, const BackwardProblem& backward,
                            const BackwardResult& result, Backend backend) {
  const auto expected = expected_gradients(problem, backward, result.record, backend);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const GradientArray& array = result.gradients[i];
    if (array.bytes.empty()) continue;
    const bool sum = backward.accumulate && array.of_parameter;
    std::string wrong = check_gradient(array, expected[i], sum ? &backward.gradients[i] : nullptr);
    if (!wrong.empty()) return wrong;
  }
  return {};
}

/// What the wires of the forward round to plays no part on the way back. Capacities are a rank's.
/// On a GPU the number of ranks shows in the forward unless it is batch_invariant; an expert's rows
/// are cut into parts for its gradients by the rows that there can be, but not so few as here.
bool bits_are_those_of_one_rank(const Case& test, Backend backend) {
  // What a chain's iteration goes on with is rounded by the wire, which one rank has not.
  const bool goes_on = test.layer.router.is_chain() && test.wire != DType::kF32;
  if (goes_on && !test.rank_invariant) return false;
  return test.ranks > 1 && test.capacity_factor == 0 && routes_token_by_token(test) &&
         test.layer.reduction_groups % test.ranks == 0 &&
         (backend == Backend::kCpu || test.batch_invariant);
}

std::string check_alone(const Problem& problem, const BackwardProblem& backward,
                        const BackwardResult& result, const BackwardRunner& run, BackwardRun how) {
  Problem alone = problem;
  alone.test.ranks = 1;
  how.group = nullptr;
  const BackwardResult want = run(alone, backward, how);
  if (want.error) return fmt::format("one rank threw: {}", want.error->what());
  for (const Gradient which : {Gradient::kTokens, Gradient::kWeight, Gradient::kW13, Gradient::kW2,
                               Gradient::kB13, Gradient::kB2}) {
    const auto i = static_cast<std::size_t>(which);
    if (result.gradients[i].bytes == want.gradients[i].bytes) continue;
    return fmt::format("{} has other bits on {} ranks than on one", result.gradients[i].name,
                       problem.test.ranks);
  }
  return {};
}

}  // namespace

std::string check_backward(const Problem& problem, const BackwardRunner& run, BackwardRun how) {
  return check_backward(problem, make_backward_problem(problem), run, how);
}

std::string check_backward(const Problem& problem, const BackwardProblem& backward,
                           const BackwardRunner& run, BackwardRun how) {
  const Case& test = problem.test;
  how.threads = test.threads;
  const BackwardResult result = run(problem, backward, how);
  if (result.error) return fmt::format("threw: {}", result.error->what());
  BackwardProblem other = backward;
  other.recompute =
      backward.recompute == Recompute::kNone ? Recompute::kActivationInput : Recompute::kNone;
  how.threads = test.again_threads;
  const BackwardResult second = run(problem, other, how);
  if (second.error) return fmt::format("the second run threw: {}", second.error->what());
  if (how.group != nullptr && how.group->rank() != 0) return {};

  // Where a GPU keeps pre-activations it takes the path for any number of tokens.
  const bool same_path = how.backend == Backend::kCpu || backward.recompute != Recompute::kNone;
  if (same_path && result.out != result.plain_out) {
    return "a forward that keeps nothing has other bits";
  }
  if (!result.apart.empty()) return result.apart + " has not the same bits on all ranks";
  std::string wrong = test.layer.router.is_chain()
                          ? check_chain_gradients(problem, backward, result, run, how)
                          : check_gradients(problem, backward, result, how.backend);
  if (!wrong.empty()) return wrong;
  // What a chain's iteration takes is an output of such a path.
  if (test.layer.router.is_chain() && how.backend == Backend::kCuda && !test.batch_invariant) {
    return {};
  }
  for (std::size_t i = 0; i < result.gradients.size(); ++i) {
    if (result.gradients[i].bytes == second.gradients[i].bytes) continue;
    return fmt::format("{} has other bits with {} threads and recompute {}",
                       result.gradients[i].name, test.again_threads, to_string(other.recompute));
  }
  return bits_are_those_of_one_rank(test, how.backend)
             ? check_alone(problem, backward, result, run, how)
             : std::string{};
}

}  // namespace switchyard::verify

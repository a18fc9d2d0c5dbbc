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
                                                     const RoutingRecord& record) {
  const Case& test = problem.test;
  const LayerModel& model = problem.model;
  const reference::RouterWeights router{model.gate.floats(), model.router_bias.floats(),
                                        model.selection_bias.floats()};
  const auto tokens = reference::as_computed(problem.tokens, test.compute);
  const auto dout = reference::as_computed(backward.dout, test.compute);
  const auto logits = reference::router_logits(tokens, test.layer.experts.hidden,
                                               test.layer.router.num_experts, router);
  reference::LayerGradient all = reference::layer_gradient(
      model, {.precision = {.compute = test.compute}, .dispatch_wire = dispatch_wire_of(test)},
      {.tokens = tokens,
       .assignments = {.expert = record.expert,
                       .weight = record.weight,
                       .kept = record.kept,
                       .top_k = test.layer.router.top_k()},
       .routed = test.given == Given::kNothing,
       .router = router,
       .logits = logits,
       .dout = dout,
       .dlogits = backward.dlogits});
  return {std::move(all.tokens),      std::move(all.weight),      std::move(all.gate),
          std::move(all.router_bias), std::move(all.experts.w13), std::move(all.experts.w2),
          std::move(all.experts.b13), std::move(all.experts.b2),  std::move(all.shared.w13),
          std::move(all.shared.w2),   std::move(all.shared.b13),  std::move(all.shared.b2),
          std::move(all.shared_gate)};
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
                            const BackwardResult& result) {
  const auto expected = expected_gradients(problem, backward, result.record);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const GradientArray& array = result.gradients[i];
    if (array.bytes.empty()) continue;
    const bool sum = backward.accumulate && array.of_parameter;
    std::string wrong = check_gradient(array, expected[i], sum ? &backward.gradients[i] : nullptr);
    if (!wrong.empty()) return wrong;
  }
  return {};
}

}  // namespace

std::string check_backward(const Problem& problem, const BackwardRunner& run, Backend backend) {
  const BackwardProblem backward = make_backward_problem(problem);
  const BackwardResult result = run(problem, backward, {problem.test.threads, backend});
  if (result.error) return fmt::format("threw: {}", result.error->what());
  // Where a GPU keeps pre-activations it takes the path for any number of tokens.
  const bool same_path = backend == Backend::kCpu || backward.recompute != Recompute::kNone;
  if (same_path && result.out != result.plain_out) {
    return "a forward that keeps nothing has other bits";
  }
  std::string wrong = check_gradients(problem, backward, result);
  if (!wrong.empty()) return wrong;

  BackwardProblem other = backward;
  other.recompute =
      backward.recompute == Recompute::kNone ? Recompute::kActivationInput : Recompute::kNone;
  const BackwardResult second = run(problem, other, {problem.test.again_threads, backend});
  if (second.error) return fmt::format("the second run threw: {}", second.error->what());
  for (std::size_t i = 0; i < result.gradients.size(); ++i) {
    if (result.gradients[i].bytes == second.gradients[i].bytes) continue;
    return fmt::format("{} has other bits with {} threads and recompute {}",
                       result.gradients[i].name, problem.test.again_threads,
                       to_string(other.recompute));
  }
  return {};
}

}  // namespace switchyard::verify

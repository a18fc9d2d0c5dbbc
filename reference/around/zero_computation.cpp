#include "reference/around/zero_computation.hpp"

#include <cmath>
#include <stdexcept>

namespace switchyard::reference {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

Bounded negative(Bounded x) { return {-x.value, x.error}; }

Bounded sigmoid(Bounded x) {
  const double value = 1.0 / (1.0 + std::exp(-x.value));
  const double relative = 8 * kUnit + kUnit * std::abs(x.value);
  return {value, x.error / 4 + relative * value + kFlush};
}

bool is_computing(const LayerModel& model, std::int32_t expert) {
  return expert < model.config.experts.num_experts;  // -1 is unused
}

bool is_kept(const Assignments& assignments, std::size_t i) {
  return assignments.kept.empty() || assignments.kept[i] != 0;
}

}  // namespace

bool is_constant(const LayerModel& model, std::int32_t expert) {
  const std::int32_t first = model.config.experts.num_experts;
  return expert >= first && expert < first + model.config.router.zero_computation.constant;
}

std::vector<double> constant_row(const LayerModel& model, std::int32_t expert, int part) {
  const std::size_t hidden = at(model.config.experts.hidden);
  const std::size_t row = at(std::int64_t{expert - model.config.experts.num_experts} * 3 + part);
  const Parameter& constants = model.constant_experts;
  if (constants.dtype() != DType::kF32 || constants.where() != Backend::kCpu) {
    throw std::invalid_argument("constant_experts is not f32 in host memory");
  }
  const auto* const values = static_cast<const float*>(constants.data()) + row * hidden;
  return {values, values + hidden};
}

ZeroComputationShares zero_computation_shares(const LayerModel& model, std::int32_t expert,
                                              std::span<const double> x) {
  const ZeroComputationExperts& others = model.config.router.zero_computation;
  const std::int32_t first_copy = model.config.experts.num_experts + others.constant;
  if (is_constant(model, expert)) {
    const Bounded first = dot(constant_row(model, expert, 0), 0, x, {}, {});
    const Bounded second = dot(constant_row(model, expert, 1), 0, x, {}, {});
    const Bounded more = add(first, negative(second));
    return {.of_token = sigmoid(more), .of_vector = sigmoid(negative(more))};
  }
  if (expert < first_copy + others.copy) return {.of_token = {1, 0}};
  return {};
}

void add_zero_computation(const LayerModel& model, std::span<const double> tokens,
                          const Assignments& assignments, std::vector<Bounded>& out) {
  const std::size_t hidden = at(model.config.experts.hidden);
  const std::size_t top_k = at(assignments.top_k);
  for (std::size_t t = 0; t * hidden < tokens.size(); ++t) {
    const auto x = tokens.subspan(t * hidden, hidden);
    Bounded factor;
    std::vector<Bounded> vectors(hidden);
    for (std::size_t i = t * top_k; i < (t + 1) * top_k; ++i) {
      const std::int32_t expert = assignments.expert[i];
      if (is_computing(model, expert) || !is_kept(assignments, i)) continue;
      const Bounded weight{double{assignments.weight[i]}, 0};
      const ZeroComputationShares shares = zero_computation_shares(model, expert, x);
      factor = add(factor, multiply(weight, shares.of_token));
      if (!is_constant(model, expert)) continue;
      const std::vector<double> v = constant_row(model, expert, 2);
      const Bounded count = multiply(weight, shares.of_vector);
      for (std::size_t h = 0; h < hidden; ++h) {
        vectors[h] = add(vectors[h], multiply(count, {v[h], 0}));
      }
    }
    for (std::size_t h = 0; h < hidden; ++h) {
      Bounded& sum = out[t * hidden + h];
      sum = add(sum, multiply(factor, {x[h], 0}));
      sum = add(sum, vectors[h]);
    }
  }
}

std::vector<Bounded> zero_computation_gradient(
    const LayerModel& model, std::span<const double> tokens, const Assignments& assignments,
    std::span<const double> dout, std::vector<Bounded>& dweight, std::vector<BoundedSum>& dtokens) {
  const std::size_t hidden = at(model.config.experts.hidden);
  const std::size_t top_k = at(assignments.top_k);
  const std::int32_t constant = model.config.router.zero_computation.constant;
  std::vector<BoundedSum> dconstant(at(std::int64_t{3} * constant) * hidden);
  const auto product = [&](std::span<const double> a, std::span<const double> b) {
    BoundedSum sum;
    for (std::size_t h = 0; h < hidden; ++h) sum.add({a[h], 0}, {b[h], 0});
    return sum.total();
  };
  for (std::size_t t = 0; t * hidden < tokens.size(); ++t) {
    const auto x = tokens.subspan(t * hidden, hidden);
    const auto dy = dout.subspan(t * hidden, hidden);
    for (std::size_t i = t * top_k; i < (t + 1) * top_k; ++i) {
      const std::int32_t expert = assignments.expert[i];
      if (is_computing(model, expert) || !is_kept(assignments, i)) continue;
      const Bounded weight{double{assignments.weight[i]}, 0};
      const ZeroComputationShares shares = zero_computation_shares(model, expert, x);
      const Bounded of_token = product(x, dy);
      dweight[i] = multiply(shares.of_token, of_token);
      const Bounded count = multiply(weight, shares.of_token);
      for (std::size_t h = 0; h < hidden; ++h) dtokens[t * hidden + h].add(count, {dy[h], 0});
      if (!is_constant(model, expert)) continue;
      const Bounded of_vector = product(constant_row(model, expert, 2), dy);
      dweight[i] = add(dweight[i], multiply(shares.of_vector, of_vector));
      // By the first logit of W; by the second the same with a minus.
      const Bounded slope = multiply(multiply(weight, multiply(shares.of_token, shares.of_vector)),
                                     add(of_token, negative(of_vector)));
      const Bounded vectors = multiply(weight, shares.of_vector);
      const std::vector<double> rows[2] = {constant_row(model, expert, 0),
                                           constant_row(model, expert, 1)};
      const std::size_t first =
          at(std::int64_t{3} * (expert - model.config.experts.num_experts)) * hidden;
      for (std::size_t h = 0; h < hidden; ++h) {
        dtokens[t * hidden + h].add(slope, {rows[0][h], 0});
        dtokens[t * hidden + h].add(negative(slope), {rows[1][h], 0});
        dconstant[first + h].add(slope, {x[h], 0});
        dconstant[first + hidden + h].add(negative(slope), {x[h], 0});
        dconstant[first + 2 * hidden + h].add(vectors, {dy[h], 0});
      }
    }
  }
  return totals(dconstant);
}

}  // namespace switchyard::reference

#include "reference/layer.hpp"

// A layer's output by its definition. Where the contract rounds (the experts' intermediate, rows on
// CUDA, partial sums on the wire) this rounds too; the sums in between are exact but for their
// bounds. Experts are read one at a time, so a whole model's layer fits.

#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>

namespace switchyard::reference {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// exp, erf, tanh and division in fp32: a few units in the last place of a factor in [0, 1], so of
// |g| in the product (1 + erf cancels for negative g: relative to the result it would not hold).
constexpr double kFunctionUnits = 8 * kUnit;
// Largest slopes: silu 1.0999, gelu 1.1289, gelu by tanh 1.1290.
constexpr double kLargestSlope = 1.13;

/// sum over j of matrix[i, j] * x[j] + bias[i], of fp32 operations in any order: n products, n sums
/// and a bias are at most n + 1 roundings deep (n + 3 where a weight is int8 times a scale),
/// gamma_{n+3} times the sum of magnitudes. Where x itself is uncertain its errors add, each with
/// its weight.
Bounded dot(std::span<const double> matrix, std::int64_t i, std::span<const double> x,
            std::span<const double> x_error, std::span<const float> bias) {
  const std::size_t n = x.size();
  const double* row = matrix.data() + at(i) * n;
  double sum = bias.empty() ? 0.0 : double{bias[at(i)]};
  double magnitude = std::abs(sum);
  double error = 0;
  for (std::size_t j = 0; j < n; ++j) {
    sum += row[j] * x[j];
    magnitude += std::abs(row[j] * x[j]);
    if (!x_error.empty()) error += std::abs(row[j]) * x_error[j];
  }
  const auto terms = static_cast<std::int64_t>(n) + 3;
  return {sum, error + gamma(terms) * (magnitude + error) + kFlush * static_cast<double>(terms)};
}

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

/// The activation of the gate alone.
Bounded activate(const ExpertConfig& config, Bounded gate) {
  const double g = gate.value;
  const double smooth = kLargestSlope * gate.error + kFunctionUnits * std::abs(g) + kFlush;
  switch (config.activation) {
    case Activation::kSilu: return {g * sigmoid(g), smooth};
    case Activation::kGelu: return {g * 0.5 * std::erfc(-g / std::numbers::sqrt2), smooth};
    case Activation::kGeluTanh: {
      const double inner = std::sqrt(2.0 / std::numbers::pi) * (g + 0.044715 * g * g * g);
      return {g * 0.5 * (1.0 + std::tanh(inner)), smooth};
    }
    case Activation::kRelu: return {std::max(g, 0.0), gate.error};
    case Activation::kRelu2: {
      const Bounded relu{std::max(g, 0.0), gate.error};
      return multiply(relu, relu);
    }
    case Activation::kClampedSwiglu: {
      const double clamped = std::min(g, double{config.limit});
      return {clamped * sigmoid(double{config.alpha} * clamped),
              smooth + kFunctionUnits * std::abs(clamped)};
    }
  }
  return {};
}

/// What one of the I inner values is, before it is rounded to the compute type.
Bounded inner_value(const ExpertConfig& config, Bounded gate, Bounded up) {
  const Bounded activated = activate(config, gate);
  if (!config.gated) return activated;
  if (config.activation != Activation::kClampedSwiglu) return multiply(activated, up);
  const double limit = config.limit;
  const Bounded clamped{std::clamp(up.value, -limit, limit), up.error};
  return multiply(activated, add(clamped, {1.0, 0}));
}

// Values that share one scale on an 8-bit wire.
constexpr std::size_t kScaleBlock = 128;

/// fp8 with the scale largest / 448: a value moves by half a unit of its binade, 2^-4 of it, or of
/// the smallest, 2^-10 of the scale. The scale itself is a few roundings away from its definition.
void quantise(std::span<Bounded> block) {
  double largest = 0;
  for (const Bounded& element : block) {
    largest = std::max(largest, std::abs(element.value) + element.error);
  }
  const double smallest_step = 0x1p-10 * largest / 448.0;
  for (Bounded& element : block) {
    const double magnitude = std::abs(element.value) + element.error;
    element.error += std::max(0x1p-4 * magnitude, smallest_step) * (1 + 8 * kUnit) +
                     8 * kUnit * magnitude + kFlush;
  }
}

/// int8 times a scale that 32 values along the sum share: the largest magnitude / 127, in fp32; a
/// value is the nearest whole number of scales, of an fp32 quotient.
void quantise_q8(std::vector<float>& values, std::int64_t cols) {
  constexpr std::int64_t kGroup = 32;
  for (std::int64_t row = 0; row < std::ssize(values); row += cols) {
    for (std::int64_t first = 0; first < cols; first += kGroup) {
      const auto group =
          std::span(values).subspan(at(row + first), at(std::min(kGroup, cols - first)));
      float largest = 0;
      for (const float value : group) largest = std::max(largest, std::abs(value));
      const float scale = largest / 127.0F;
      for (float& value : group) {
        value = scale == 0 ? 0.0F : std::nearbyint(value / scale) * scale;
      }
    }
  }
}

std::vector<double> read_part(const ExpertSource& source, std::int32_t expert, ExpertPart part,
                              std::int64_t rows, std::int64_t cols, const LayerRun& run) {
  std::vector<float> values(at(rows * cols));
  source.read(expert, part, 0, rows, DType::kF32, values.data());
  if (!run.quantize_q8) return as_computed(values, run.compute);
  quantise_q8(values, cols);
  return {values.begin(), values.end()};
}

std::vector<float> read_bias(const ExpertSource& source, std::int32_t expert, ExpertPart part,
                             std::int64_t size) {
  std::vector<float> values(at(size));
  source.read_bias(expert, part, values.data());
  return values;
}

/// The sums of a layer by the tree of groups.
class Summation {
 public:
  Summation(const LayerModel& model, const LayerRun& run, std::span<const double> tokens,
            const Assignments& assignments)
      : model_(model), run_(run), tokens_(tokens), assignments_(assignments) {
    const std::int32_t groups = model.config.reduction_groups;
    // Where R does not divide G, each rank is one group.
    num_groups_ = groups % run.ranks == 0 ? groups : run.ranks;
    groups_per_rank_ = num_groups_ / run.ranks;
  }

  std::vector<Bounded> all() const {
    const auto leaves = std::bit_ceil(static_cast<std::uint32_t>(num_groups_));
    return subtree(0, static_cast<std::int32_t>(leaves));
  }

 private:
  /// Sum over groups [first, first + count), absent ones +0.
  std::vector<Bounded> subtree(std::int32_t first, std::int32_t count) const {
    std::vector<Bounded> sum;
    if (first >= num_groups_) {
      sum.resize(tokens_.size());
    } else if (count == 1) {
      sum = group(first);
    } else {
      sum = subtree(first, count / 2);
      const std::vector<Bounded> right = subtree(first + count / 2, count / 2);
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = add(sum[i], right[i]);
    }
    // A rank's part crosses in the wire type, its own too; with rank_invariant every group's does.
    const bool on_wire =
        run_.rank_invariant ? count == 1 : run_.ranks > 1 && count == groups_per_rank_;
    if (on_wire) cross(sum);
    return sum;
  }

  void cross(std::vector<Bounded>& sum) const {
    if (run_.wire != DType::kF8E4M3) {
      for (Bounded& element : sum) element = convert(run_.wire, element);
      return;
    }
    const std::size_t hidden = at(model_.config.experts.hidden);
    for (std::size_t begin = 0; begin < sum.size(); begin += hidden) {
      for (std::size_t h = 0; h < hidden; h += kScaleBlock) {
        quantise(std::span(sum).subspan(begin + h, std::min(kScaleBlock, hidden - h)));
      }
    }
  }

  /// acc = fma(w, y, acc) from +0, in ascending expert id, then k.
  std::vector<Bounded> group(std::int32_t index) const {
    const ExpertConfig& config = model_.config.experts;
    const std::int64_t num_experts = config.num_experts;
    std::vector<Bounded> sum(tokens_.size());
    const auto begin = static_cast<std::int32_t>(index * num_experts / num_groups_);
    const auto end = static_cast<std::int32_t>((index + 1) * num_experts / num_groups_);
    for (std::int32_t e = begin; e < end; ++e) {
      if (!is_hit(e)) continue;
      const ExpertMatrices matrices = read_expert(config, *model_.experts, e, run_);
      for (std::size_t i = 0; i < assignments_.expert.size(); ++i) {
        if (assignments_.expert[i] == e && is_kept(i)) add_row(sum, matrices, i);
      }
    }
    return sum;
  }

  void add_row(std::vector<Bounded>& sum, const ExpertMatrices& matrices, std::size_t i) const {
    const std::size_t hidden = at(model_.config.experts.hidden);
    const std::size_t token = i / at(assignments_.top_k);
    const std::vector<Bounded> row = expert_row(
        model_.config.experts, matrices, tokens_.subspan(token * hidden, hidden), run_.compute);
    const double weight = assignments_.weight[i];
    for (std::size_t h = 0; h < hidden; ++h) {
      const Bounded y = run_.round_rows ? convert(run_.compute, row[h]) : row[h];
      Bounded& acc = sum[token * hidden + h];
      acc = rounded({acc.value + weight * y.value, acc.error + std::abs(weight) * y.error});
    }
  }

  bool is_kept(std::size_t i) const {
    return assignments_.kept.empty() || assignments_.kept[i] != 0;
  }

  bool is_hit(std::int32_t expert) const {
    for (std::size_t i = 0; i < assignments_.expert.size(); ++i) {
      if (assignments_.expert[i] == expert && is_kept(i)) return true;
    }
    return false;
  }

  const LayerModel& model_;
  const LayerRun& run_;
  std::span<const double> tokens_;
  const Assignments& assignments_;
  std::int32_t num_groups_ = 1;
  std::int32_t groups_per_rank_ = 1;
};

/// Add the shared experts, times sigmoid(x . shared_gate) where they have a gate.
void add_shared(const LayerModel& model, const LayerRun& run, std::span<const double> tokens,
                std::vector<Bounded>& out) {
  const ExpertConfig& config = model.config.shared;
  const std::size_t hidden = at(config.hidden);
  const ExpertMatrices matrices = read_expert(config, *model.shared, 0, run);
  const std::vector<double> gate(model.shared_gate.begin(), model.shared_gate.end());
  for (std::size_t t = 0; t * hidden < tokens.size(); ++t) {
    const auto x = tokens.subspan(t * hidden, hidden);
    const std::vector<Bounded> row = expert_row(config, matrices, x, run.compute);
    Bounded factor{1.0, 0};
    if (model.config.shared_gated) {
      const Bounded logit = dot(gate, 0, x, {}, {});
      const double value = sigmoid(logit.value);
      factor = {value, logit.error / 4 + kFunctionUnits * value +
                           kUnit * std::abs(logit.value) * value + kFlush};
    }
    for (std::size_t h = 0; h < hidden; ++h) {
      Bounded y = run.round_rows ? convert(run.compute, row[h]) : row[h];
      if (model.config.shared_gated) y = multiply(y, factor);
      out[t * hidden + h] = add(out[t * hidden + h], y);
    }
  }
}

}  // namespace

std::vector<double> as_computed(std::span<const float> values, DType compute) {
  std::vector<double> result;
  result.reserve(values.size());
  for (const float value : values) result.push_back(round_value(compute, double{value}));
  return result;
}

ExpertMatrices read_expert(const ExpertConfig& config, const ExpertSource& source,
                           std::int32_t expert, const LayerRun& run) {
  ExpertMatrices m;
  const std::int64_t hidden = config.hidden;
  const std::int64_t inner = config.inner;
  m.gate = read_part(source, expert, ExpertPart::kGate, inner, hidden, run);
  if (config.gated) m.up = read_part(source, expert, ExpertPart::kUp, inner, hidden, run);
  m.down = read_part(source, expert, ExpertPart::kDown, hidden, inner, run);
  if (config.bias) {
    m.gate_bias = read_bias(source, expert, ExpertPart::kGate, inner);
    if (config.gated) m.up_bias = read_bias(source, expert, ExpertPart::kUp, inner);
    m.down_bias = read_bias(source, expert, ExpertPart::kDown, hidden);
  }
  return m;
}

std::vector<Bounded> expert_row(const ExpertConfig& config, const ExpertMatrices& matrices,
                                std::span<const double> x, DType compute) {
  std::vector<double> inner;
  std::vector<double> inner_error;
  for (std::int64_t i = 0; i < config.inner; ++i) {
    const Bounded gate = dot(matrices.gate, i, x, {}, matrices.gate_bias);
    const Bounded up = config.gated ? dot(matrices.up, i, x, {}, matrices.up_bias) : Bounded{};
    const Bounded value = convert(compute, inner_value(config, gate, up));
    inner.push_back(value.value);
    inner_error.push_back(value.error);
  }
  std::vector<Bounded> y;
  for (std::int64_t h = 0; h < config.hidden; ++h) {
    y.push_back(dot(matrices.down, h, inner, inner_error, matrices.down_bias));
  }
  return y;
}

std::vector<Bounded> layer_output(const LayerModel& model, const LayerRun& run,
                                  std::span<const double> tokens, const Assignments& assignments) {
  std::vector<Bounded> out = Summation(model, run, tokens, assignments).all();
  if (model.shared != nullptr) add_shared(model, run, tokens, out);
  return out;
}

std::string check_output(std::span<const Bounded> expected, std::int64_t hidden, DType dtype,
                         std::span<const float> out) {
  if (expected.size() != out.size()) return "the output has the wrong size";
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (!admits(expected[i], dtype, double{out[i]})) {
      char text[160];
      std::snprintf(text, sizeof text, "out[%lld, %lld] is %.9g, not %.9g +- %.3g",
                    static_cast<long long>(i / at(hidden)), static_cast<long long>(i % at(hidden)),
                    double{out[i]}, expected[i].value, expected[i].error);
      return text;
    }
  }
  return {};
}

}  // namespace switchyard::reference

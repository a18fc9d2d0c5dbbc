#include "reference/layer.hpp"

// A layer's output by its definition, with the roundings where the contract has them: rows on CUDA,
// partial sums on the wire. Experts are read one at a time, so a whole model's layer fits.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <optional>
#include <stdexcept>

#include "reference/around/zero_computation.hpp"
#include "reference/fp8.hpp"

namespace switchyard::reference {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// Values that share one scale on an 8-bit wire.
constexpr std::size_t kScaleBlock = 128;

/// fp8 with the scale largest / 448: a value moves by half a unit of its binade, 2^-4 of it, or of
/// the smallest, 2^-10 of the scale. The scale itself is a few roundings away from its definition.
void quantise(std::span<Bounded> block) {
  double largest = 0;
  for (const Bounded& element : block) {
    if (element.may_overflow()) {  // and with it the scale of all
      std::fill(block.begin(), block.end(), Bounded{0, HUGE_VAL});
      return;
    }
    largest = std::max(largest, std::abs(element.value) + element.error);
  }
  const double smallest_step = 0x1p-10 * largest / 448.0;
  for (Bounded& element : block) {
    const double magnitude = std::abs(element.value) + element.error;
    element.error += std::max(0x1p-4 * magnitude, smallest_step) * (1 + 8 * kUnit) +
                     8 * kUnit * magnitude + kFlush;
  }
}

/// What crossing the wire leaves of tokens [T, H], exactly: on fp8 the scale of 128 values is
/// largest / 448 and a value travels as x * (448 / largest), each rounded to fp32.
std::vector<double> crossed(std::span<const double> tokens, std::size_t hidden, DType wire,
                            DType compute) {
  std::vector<double> out(tokens.begin(), tokens.end());
  const auto f32 = [](double value) { return round_value(DType::kF32, value); };
  for (std::size_t begin = 0; begin < out.size(); begin += hidden) {
    for (std::size_t h = 0; h < hidden; h += kScaleBlock) {
      const auto block = std::span(out).subspan(begin + h, std::min(kScaleBlock, hidden - h));
      double largest = 0x1p-100;
      for (const double value : block) largest = std::max(largest, std::abs(value));
      for (double& value : block) {
        if (wire == DType::kF8E4M3) {
          const double scaled = f32(value * f32(448.0 / largest));
          value = round_value(wire, std::clamp(scaled, -448.0, 448.0)) * f32(largest / 448.0);
        } else {
          value = round_value(wire, value);
        }
        value = round_value(compute, f32(value));
      }
    }
  }
  return out;
}

/// [T, H] tokens that their experts take times the weight, which then counts as 1.
std::vector<double> weighted(std::span<const double> tokens, std::size_t hidden, DType compute,
                             std::span<const float> weight) {
  std::vector<double> out(tokens.begin(), tokens.end());
  for (std::size_t i = 0; i < out.size(); ++i) {
    const double product = double{weight[i / hidden]} * out[i];
    out[i] = round_value(compute, round_value(DType::kF32, product));
  }
  return out;
}

/// Tokens as they set out for their experts.
std::vector<double> sent_tokens(const LayerModel& model, const LayerRun& run,
                                std::span<const double> tokens, std::span<const float> weight) {
  if (!model.config.weight_on_input) return {tokens.begin(), tokens.end()};
  return weighted(tokens, at(model.config.experts.hidden), run.precision.compute, weight);
}

/// All numbers between those that two may be.
Bounded either(Bounded a, Bounded b) {
  if (a.may_overflow() || b.may_overflow()) return {a.value, HUGE_VAL};
  const double low = std::min(a.low(), b.low());
  const double high = std::max(a.high(), b.high());
  return {0.5 * (low + high), 0.5 * (high - low)};
}

/// Tokens [T, H], each as it is multiplied in e4m3.
std::vector<Fp8Row> as_fp8(std::span<const double> tokens, std::size_t hidden) {
  std::vector<Fp8Row> rows;
  for (std::size_t begin = 0; begin < tokens.size(); begin += hidden) {
    std::vector<Bounded> row;
    for (const double value : tokens.subspan(begin, hidden)) row.push_back({value, 0});
    rows.push_back(quantised(row));
  }
  return rows;
}

/// The sums of a layer by the tree of groups.
class Summation {
 public:
  /// @param fp8_tokens  Where rows may be so.
  Summation(const LayerModel& model, const LayerRun& run, std::span<const double> tokens,
            std::vector<Fp8Row> fp8_tokens, const Assignments& assignments)
      : model_(model),
        run_(run),
        tokens_(tokens),
        fp8_tokens_(std::move(fp8_tokens)),
        assignments_(assignments) {
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
      const ExpertMatrices matrices = read_expert(config, *model_.experts, e, run_.precision);
      std::optional<Fp8Expert> fp8;
      if (run_.fp8_rows != Fp8Rows::kNone) fp8 = read_fp8_expert(config, *model_.experts, e);
      for (std::size_t i = 0; i < assignments_.expert.size(); ++i) {
        if (assignments_.expert[i] == e && is_kept(i)) add_row(sum, matrices, fp8, i);
      }
    }
    return sum;
  }

  void add_row(std::vector<Bounded>& sum, const ExpertMatrices& matrices,
               const std::optional<Fp8Expert>& fp8, std::size_t i) const {
    const std::size_t hidden = at(model_.config.experts.hidden);
    const std::size_t token = i / at(assignments_.top_k);
    const ExpertConfig& config = model_.config.experts;
    std::vector<Bounded> row;
    if (run_.fp8_rows != Fp8Rows::kAll) {
      row = expert_row(config, matrices, tokens_.subspan(token * hidden, hidden), run_.precision);
    }
    if (fp8) {
      const std::vector<Bounded> other = fp8_expert_row(config, *fp8, fp8_tokens_[token]);
      if (row.empty()) row = other;
      for (std::size_t h = 0; h < hidden; ++h) row[h] = either(row[h], other[h]);
    }
    const double weight = assignments_.weight[i];
    for (std::size_t h = 0; h < hidden; ++h) {
      const Bounded y = run_.round_rows ? rounded_row(row[h]) : row[h];
      Bounded& acc = sum[token * hidden + h];
      acc = rounded({acc.value + weight * y.value, acc.error + std::abs(weight) * y.error});
    }
  }

  Bounded rounded_row(Bounded y) const {
    const double scale = run_.row_scale;
    const Bounded row = convert(run_.precision.compute, {y.value / scale, y.error / scale});
    return {row.value * scale, row.error * scale};
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
  std::vector<Fp8Row> fp8_tokens_;
  const Assignments& assignments_;
  std::int32_t num_groups_ = 1;
  std::int32_t groups_per_rank_ = 1;
};

/// Add the shared experts, times sigmoid(x . shared_gate) where they have a gate.
void add_shared(const LayerModel& model, const LayerRun& run, std::span<const double> tokens,
                std::vector<Bounded>& out) {
  const ExpertConfig& config = model.config.shared;
  const std::size_t hidden = at(config.hidden);
  const ExpertMatrices matrices = read_expert(config, *model.shared, 0, run.precision);
  for (std::size_t t = 0; t * hidden < tokens.size(); ++t) {
    const auto x = tokens.subspan(t * hidden, hidden);
    const std::vector<Bounded> row = expert_row(config, matrices, x, run.precision);
    const Bounded factor = shared_factor(model, x);
    for (std::size_t h = 0; h < hidden; ++h) {
      Bounded y = run.round_rows ? convert(run.precision.compute, row[h]) : row[h];
      if (model.config.shared_gated) y = multiply(y, factor);
      out[t * hidden + h] = add(out[t * hidden + h], y);
    }
  }
}

}  // namespace

std::vector<double> shared_gate(const LayerModel& model) {
  const Parameter& gate = model.shared_gate;
  if (gate.dtype() != DType::kF32 || gate.where() != Backend::kCpu) {
    throw std::invalid_argument("shared_gate is not f32 in host memory");
  }
  const auto* values = static_cast<const float*>(gate.data());
  return {values, values + gate.size()};
}

Bounded shared_factor(const LayerModel& model, std::span<const double> x) {
  if (!model.config.shared_gated) return {1.0, 0};
  const std::vector<double> gate = shared_gate(model);
  const Bounded logit = dot(gate, 0, x, {}, {});
  const double value = 1.0 / (1.0 + std::exp(-logit.value));
  const double relative = 8 * kUnit + kUnit * std::abs(logit.value);
  return {value, logit.error / 4 + relative * value + kFlush};
}

std::vector<double> expert_tokens(const LayerModel& model, const LayerRun& run,
                                  std::span<const double> tokens, std::span<const float> weight) {
  std::vector<double> sent = sent_tokens(model, run, tokens, weight);
  if (!run.dispatch_wire) return sent;
  return crossed(sent, at(model.config.experts.hidden), *run.dispatch_wire, run.precision.compute);
}

std::vector<Bounded> layer_output(const LayerModel& model, const LayerRun& run,
                                  std::span<const double> tokens, const Assignments& assignments) {
  const std::size_t hidden = at(model.config.experts.hidden);
  const bool on_input = model.config.weight_on_input;
  const std::vector<double> arrived = expert_tokens(model, run, tokens, assignments.weight);
  const std::vector<float> ones(on_input ? assignments.weight.size() : 0, 1.0F);
  Assignments counted = assignments;
  if (on_input) counted.weight = ones;
  std::vector<Fp8Row> fp8_tokens;
  if (run.fp8_rows != Fp8Rows::kNone) {
    // What an fp8 wire has brought is multiplied as it is.
    const bool as_sent = run.dispatch_wire == DType::kF8E4M3;
    fp8_tokens =
        as_fp8(as_sent ? sent_tokens(model, run, tokens, assignments.weight) : arrived, hidden);
  }
  std::vector<Bounded> out = Summation(model, run, arrived, std::move(fp8_tokens), counted).all();
  if (model.config.router.zero_computation.total() == 0) {
    if (model.shared != nullptr) add_shared(model, run, tokens, out);
    return out;
  }
  // What goes around the experts is a sum of its own.
  std::vector<Bounded> around(out.size());
  if (model.shared != nullptr) add_shared(model, run, tokens, around);
  add_zero_computation(model, tokens, assignments, around);
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = add(out[i], around[i]);
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

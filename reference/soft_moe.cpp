#include "reference/soft_moe.hpp"

#include <algorithm>
#include <cmath>

#include "reference/expert.hpp"

namespace switchyard::reference {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

using Row = std::vector<double>;

Row row_of(const std::vector<double>& matrix, std::int64_t row, std::int64_t cols) {
  return {matrix.begin() + row * cols, matrix.begin() + (row + 1) * cols};
}

double inner_product_of(const Row& a, const Row& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

Row normalized(Row row) {
  const double length = std::sqrt(inner_product_of(row, row) + double{kSoftMoeEpsilon});
  for (double& value : row) value /= length;
  return row;
}

Row softmax(Row logits) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (double& value : logits) sum += value = std::exp(value - largest);
  for (double& value : logits) value /= sum;
  return logits;
}

Row expert(const SoftMoeProblem& p, std::int64_t e, const Row& x) {
  const std::int64_t inner = p.experts.inner, hidden = p.experts.hidden;
  const std::int64_t width = (p.experts.gated ? 2 : 1) * inner;
  Row activated;
  for (std::int64_t i = 0; i < inner; ++i) {
    const double gate = inner_product_of(row_of(p.w13, e * width + i, hidden), x);
    const double up =
        p.experts.gated ? inner_product_of(row_of(p.w13, e * width + inner + i, hidden), x) : 0.0;
    activated.push_back(inner_value(p.experts, {gate, 0}, {up, 0}).value);
  }
  Row y;
  for (std::int64_t h = 0; h < hidden; ++h) {
    y.push_back(inner_product_of(row_of(p.w2, e * hidden + h, inner), activated));
  }
  return y;
}

}  // namespace

SoftMoeResult soft_moe(const SoftMoeProblem& p) {
  const std::int64_t hidden = p.experts.hidden;
  const std::int64_t slots = p.experts.num_experts * p.config.slots;
  const std::int64_t sequence = p.config.sequence > 0 ? p.config.sequence : p.num_tokens;
  const std::int64_t m = p.config.group > 0 ? p.config.group : sequence;

  std::vector<Row> logits;  // by token
  for (std::int64_t t = 0; t < p.num_tokens; ++t) {
    Row of_token;
    for (std::int64_t s = 0; s < slots; ++s) {
      Row x = row_of(p.x, t, hidden), phi = row_of(p.phi, s, hidden);
      if (p.config.normalize) {
        x = normalized(x);
        phi = normalized(phi);
      }
      of_token.push_back(p.scale * inner_product_of(x, phi));
    }
    logits.push_back(of_token);
  }

  SoftMoeResult result{.y = Row(p.x.size()),
                       .dispatch = Row(at(p.num_tokens * slots)),
                       .combine = Row(at(p.num_tokens * slots))};
  for (std::int64_t first = 0; first < p.num_tokens; first += m) {
    // Whose tokens make the slots that this group reads.
    const std::int64_t source = p.config.causal ? first - m : first;
    if (p.config.causal && first % sequence == 0) continue;
    std::vector<Row> outputs;
    for (std::int64_t s = 0; s < slots; ++s) {
      Row of_slot;
      for (std::int64_t t = source; t < source + m; ++t) of_slot.push_back(logits[at(t)][at(s)]);
      const Row weights = softmax(of_slot);
      Row input(at(hidden));
      for (std::int64_t i = 0; i < m; ++i) {
        result.dispatch[at((source + i) * slots + s)] = weights[at(i)];
        for (std::int64_t h = 0; h < hidden; ++h) {
          input[at(h)] += weights[at(i)] * p.x[at((source + i) * hidden + h)];
        }
      }
      outputs.push_back(expert(p, s / p.config.slots, input));
    }
    for (std::int64_t t = first; t < first + m; ++t) {
      const Row weights = softmax(logits[at(t)]);
      for (std::int64_t s = 0; s < slots; ++s) {
        result.combine[at(t * slots + s)] = weights[at(s)];
        for (std::int64_t h = 0; h < hidden; ++h) {
          result.y[at(t * hidden + h)] += weights[at(s)] * outputs[at(s)][at(h)];
        }
      }
    }
  }
  return result;
}

}  // namespace switchyard::reference

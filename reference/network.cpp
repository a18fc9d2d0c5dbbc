#include "reference/network.hpp"

// The networks of a router by their definitions, token by token.

#include <cmath>
#include <numbers>

#include "reference/expert.hpp"

namespace switchyard::reference {
namespace {

using Kind = RouterNetwork::Kind;

// A library's exp, erf, square root and division in fp32: a few units in the last place.
constexpr double kFunctionUnits = 8 * kUnit;
constexpr double kLargestSlope = 1.13;  // of gelu
constexpr double kLargestBend = 0.81;   // of its slope

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
Bounded exact(double value) { return {value, 0}; }

Bounded gelu(Bounded x) {
  if (x.may_overflow()) return {0, HUGE_VAL};
  return {x.value * 0.5 * std::erfc(-x.value / std::numbers::sqrt2),
          kLargestSlope * x.error + kFunctionUnits * std::abs(x.value) + kFlush};
}

Bounded gelu_slope(Bounded x) {
  if (x.may_overflow()) return {0, HUGE_VAL};
  const double v = x.value;
  const double density = std::exp(-0.5 * v * v) / std::sqrt(2 * std::numbers::pi);
  return {0.5 * std::erfc(-v / std::numbers::sqrt2) + v * density,
          kLargestBend * x.error + kFunctionUnits * (1 + std::abs(v)) + kFlush};
}

/// 1 / sqrt(sum of squares + epsilon), between what its ends give.
Bounded inverse_length(std::span<const Bounded> row) {
  BoundedSum sum;
  for (const Bounded x : row) sum.add(x, x);
  sum.add(exact(kCosineEpsilon));
  const Bounded square = sum.total();
  if (square.may_overflow()) return {0, HUGE_VAL};
  const double least = std::max(square.low(), 0.5 * double{kCosineEpsilon});
  const double value = 1 / std::sqrt(square.value);
  const double error = std::max(1 / std::sqrt(least) - value, value - 1 / std::sqrt(square.high()));
  return {value, error + kFunctionUnits * (value + error)};
}

std::vector<Bounded> unit(std::span<const Bounded> row) {
  const Bounded inverse = inverse_length(row);
  std::vector<Bounded> out;
  for (const Bounded x : row) out.push_back(multiply(x, inverse));
  return out;
}

/// Through unit(): (d - u (u . d)) / length.
std::vector<Bounded> unit_gradient(std::span<const Bounded> row, std::span<const Bounded> d) {
  const Bounded inverse = inverse_length(row);
  const std::vector<Bounded> u = unit(row);
  BoundedSum sum;
  for (std::size_t i = 0; i < row.size(); ++i) sum.add(u[i], d[i]);
  // Whoever multiplies with the length last rounds once more.
  const Bounded along = rounded(rounded(sum.total()));
  std::vector<Bounded> out;
  for (std::size_t i = 0; i < row.size(); ++i) {
    const Bounded part = rounded(multiply(u[i], along));
    out.push_back(multiply(inverse, add(d[i], {-part.value, part.error})));
  }
  return out;
}

class Network {
 public:
  Network(const RouterConfig& config, std::int64_t hidden, const RouterWeights& weights)
      : kind_(config.network.kind),
        experts_(at(config.num_logits())),
        hidden_(at(hidden)),
        width_(at(config.network.inner(hidden))),
        features_(at(config.network.features(hidden))),
        weights_(weights),
        b1_(width_ * hidden_),
        w2_(b1_ + width_),
        b2_(w2_ + width_ * hidden_) {
    for (const float value : weights.gate) gate_.push_back(exact(double{value}));
    if (kind_ != Kind::kCosine) return;
    const double s = weights.network.back();
    const double scale = std::exp(std::min(s, std::log(100.0)));
    // exp of an argument whose rounding is a relative error.
    scale_ = {scale, scale * (kFunctionUnits + 8 * kUnit)};
    raw_gate_ = gate_;
    for (std::size_t e = 0; e < experts_; ++e) {
      const std::vector<Bounded> row = unit(std::span(raw_gate_).subspan(e * features_, features_));
      for (std::size_t d = 0; d < features_; ++d) {
        gate_[e * features_ + d] = rounded(multiply(row[d], scale_));
      }
    }
  }

  /// Of one token: fills what the way back wants.
  std::vector<Bounded> logits(std::span<const double> x) {
    inner_ = products(x, 0, width_, kind_ == Kind::kCosine ? nullptr : &b1_);
    z_.clear();
    if (kind_ == Kind::kCosine) {
      z_ = unit(inner_);
    } else {
      for (const Bounded u : inner_) z_.push_back(gelu(u));
    }
    if (kind_ == Kind::kHadamard) {
      active_ = z_;
      factor_.clear();
      for (std::size_t h = 0; h < hidden_; ++h) {
        BoundedSum sum;
        for (std::size_t m = 0; m < width_; ++m) {
          sum.add(active_[m], exact(weights_.network[w2_ + h * width_ + m]));
        }
        sum.add(exact(weights_.network[b2_ + h]));
        factor_.push_back(sum.total());
      }
      z_.clear();
      for (std::size_t h = 0; h < hidden_; ++h) z_.push_back(multiply(factor_[h], exact(x[h])));
    }
    std::vector<Bounded> out;
    for (std::size_t e = 0; e < experts_; ++e) {
      BoundedSum sum;
      for (std::size_t d = 0; d < features_; ++d) sum.add(z_[d], gate_[e * features_ + d]);
      if (!weights_.bias.empty()) sum.add(exact(weights_.bias[e]));
      out.push_back(sum.total());
    }
    return out;
  }

  void begin_gradient() {
    dgate_.assign(experts_ * features_, BoundedSum());
    dparameters_.assign(weights_.network.size(), BoundedSum());
  }

  /// Of one token. @returns dx.
  std::vector<Bounded> add(std::span<const double> x, std::span<const Bounded> dlogits) {
    (void)logits(x);
    std::vector<BoundedSum> sums(features_);
    for (std::size_t e = 0; e < experts_; ++e) {
      for (std::size_t d = 0; d < features_; ++d) {
        sums[d].add(dlogits[e], gate_[e * features_ + d]);
        dgate_[e * features_ + d].add(dlogits[e], z_[d]);
      }
    }
    const std::vector<Bounded> dz = totals(sums);
    std::vector<Bounded> du = dz;
    std::vector<Bounded> direct(hidden_);
    if (kind_ == Kind::kHadamard) {
      std::vector<BoundedSum> dactive(width_);
      for (std::size_t h = 0; h < hidden_; ++h) {
        const Bounded dfactor = multiply(dz[h], exact(x[h]));
        direct[h] = multiply(dz[h], factor_[h]);
        dparameters_[b2_ + h].add(dfactor);
        for (std::size_t m = 0; m < width_; ++m) {
          dparameters_[w2_ + h * width_ + m].add(dfactor, active_[m]);
          dactive[m].add(dfactor, exact(weights_.network[w2_ + h * width_ + m]));
        }
      }
      du = totals(dactive);
    }
    if (kind_ == Kind::kCosine) {
      du = unit_gradient(inner_, dz);
    } else {
      for (std::size_t m = 0; m < width_; ++m) du[m] = multiply(du[m], gelu_slope(inner_[m]));
    }
    std::vector<BoundedSum> dx(hidden_);
    for (std::size_t m = 0; m < width_; ++m) {
      if (kind_ != Kind::kCosine) dparameters_[b1_ + m].add(du[m]);
      for (std::size_t h = 0; h < hidden_; ++h) {
        dparameters_[m * hidden_ + h].add(du[m], exact(x[h]));
        dx[h].add(du[m], exact(weights_.network[m * hidden_ + h]));
      }
    }
    if (kind_ == Kind::kHadamard) {
      for (std::size_t h = 0; h < hidden_; ++h) dx[h].add(direct[h]);
    }
    return totals(dx);
  }

  void end_gradient(NetworkGradient& gradient) const {
    gradient.gate = totals(dgate_);
    gradient.parameters = totals(dparameters_);
    if (kind_ != Kind::kCosine) return;
    BoundedSum dscale;
    for (std::size_t e = 0; e < experts_; ++e) {
      const auto row = std::span(raw_gate_).subspan(e * features_, features_);
      std::vector<Bounded> dunit;
      for (std::size_t d = 0; d < features_; ++d) {
        dunit.push_back(rounded(multiply(scale_, gradient.gate[e * features_ + d])));
      }
      const std::vector<Bounded> length_one = unit(row);
      for (std::size_t d = 0; d < features_; ++d) {
        dscale.add(rounded(rounded(length_one[d])), dunit[d]);
      }
      const std::vector<Bounded> back = unit_gradient(row, dunit);
      std::copy(back.begin(), back.end(), gradient.gate.begin() + std::ptrdiff_t(e * features_));
    }
    const bool clamped = double{weights_.network.back()} >= std::log(100.0);
    gradient.parameters.back() = clamped ? Bounded{} : dscale.total();
  }

 private:
  std::vector<Bounded> products(std::span<const double> x, std::size_t matrix, std::size_t rows,
                                const std::size_t* bias) const {
    std::vector<Bounded> out;
    for (std::size_t m = 0; m < rows; ++m) {
      BoundedSum sum;
      for (std::size_t h = 0; h < hidden_; ++h) {
        sum.add(exact(x[h]), exact(weights_.network[matrix + m * hidden_ + h]));
      }
      if (bias != nullptr) sum.add(exact(weights_.network[*bias + m]));
      out.push_back(sum.total());
    }
    return out;
  }

  Kind kind_;
  std::size_t experts_, hidden_, width_, features_;
  const RouterWeights& weights_;
  std::size_t b1_, w2_, b2_;  ///< Where they begin.
  std::vector<Bounded> gate_, raw_gate_;
  Bounded scale_{1, 0};
  std::vector<Bounded> inner_, active_, factor_, z_;
  std::vector<BoundedSum> dgate_, dparameters_;
};

}  // namespace

std::vector<Bounded> network_logits(const RouterConfig& config, std::span<const double> tokens,
                                    std::int64_t hidden, const RouterWeights& weights) {
  if (config.network.is_linear()) {
    return router_logits(tokens, hidden, config.num_logits(), weights);
  }
  Network network(config, hidden, weights);
  std::vector<Bounded> logits;
  for (std::size_t t = 0; t < tokens.size() / at(hidden); ++t) {
    const std::vector<Bounded> row = network.logits(tokens.subspan(t * at(hidden), at(hidden)));
    logits.insert(logits.end(), row.begin(), row.end());
  }
  return logits;
}

void add_residual(std::vector<Bounded>& logits, std::span<const float> residual,
                  std::span<const float> previous) {
  if (residual.empty()) return;
  const auto columns =
      static_cast<std::size_t>(std::llround(std::sqrt(static_cast<double>(residual.size()))));
  const std::vector<double> matrix(residual.begin(), residual.end());
  const std::vector<double> before(previous.begin(), previous.end());
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const auto row = std::span(before).subspan(i / columns * columns, columns);
    logits[i] = add(logits[i], dot(matrix, static_cast<std::int64_t>(i % columns), row, {}, {}));
  }
}

NetworkGradient network_gradient(const RouterConfig& config, std::span<const double> tokens,
                                 std::int64_t hidden, const RouterWeights& weights,
                                 std::span<const Bounded> dlogits) {
  Network network(config, hidden, weights);
  NetworkGradient gradient;
  network.begin_gradient();
  const auto experts = at(config.num_logits());
  for (std::size_t t = 0; t < tokens.size() / at(hidden); ++t) {
    const std::vector<Bounded> dx = network.add(tokens.subspan(t * at(hidden), at(hidden)),
                                                dlogits.subspan(t * experts, experts));
    gradient.tokens.insert(gradient.tokens.end(), dx.begin(), dx.end());
  }
  network.end_gradient(gradient);
  return gradient;
}

}  // namespace switchyard::reference

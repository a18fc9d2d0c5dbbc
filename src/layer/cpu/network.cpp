// The networks of a router on a CPU: products by router_gemm, so that every sum is in ascending
// order, and rows by loops. No bits depend on the number of tokens or threads.
#include "layer/cpu/network.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/row_ops.hpp"
#include "experts/raw_matrix.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {
namespace {

ConstRawMatrix raw_in(const float* data, std::int64_t rows, std::int64_t cols) {
  return raw(Matrix<const float>{data, {rows, cols}});
}
RawMatrix raw_out(float* data, std::int64_t rows, std::int64_t cols) {
  return data == nullptr ? RawMatrix{} : raw(Matrix<float>{data, {rows, cols}});
}
Vector<float> vector_out(float* data, std::int64_t size) {
  return data == nullptr ? Vector<float>{} : Vector<float>{data, {size}};
}

float gelu(float x) {
  return static_cast<float>(0.5 * double{x} * std::erfc(-double{x} / std::numbers::sqrt2));
}

float gelu_slope(float x) {
  const double v = x;
  const double density = std::exp(-0.5 * v * v) / std::sqrt(2 * std::numbers::pi);
  return static_cast<float>(0.5 * std::erfc(-v / std::numbers::sqrt2) + v * density);
}

/// 1 / length of a row.
float inverse_length(const float* row, std::int64_t size) {
  float sum = kCosineEpsilon;
  for (std::int64_t i = 0; i < size; ++i) sum = std::fma(row[i], row[i], sum);
  return 1 / std::sqrt(sum);
}

float dot(const float* a, const float* b, std::int64_t size) {
  float sum = 0;
  for (std::int64_t i = 0; i < size; ++i) sum = std::fma(a[i], b[i], sum);
  return sum;
}

/// drow of dunit = the gradient of row / length: (dunit - unit (unit . dunit)) / length.
void unit_backward(const float* row, const float* dunit, std::int64_t size, float* drow) {
  const float inverse = inverse_length(row, size);
  const float along = dot(row, dunit, size) * inverse;
  for (std::int64_t i = 0; i < size; ++i) {
    drow[i] = inverse * (dunit[i] - row[i] * inverse * along);
  }
}

}  // namespace

ConstRawMatrix CpuNetwork::features(ConstRawMatrix tokens, const Execution& execution) {
  if (network_.is_linear()) return tokens;
  const std::int64_t rows = tokens.rows, hidden = tokens.cols, width = network_.inner(hidden);
  const NetworkParts<const float> p = values(hidden);
  const bool is_cosine = network_.kind == Kind::kCosine;
  const Matrix<float> inner = inner_.matrix(rows, width);
  const Matrix<float> active = active_.matrix(rows, width);
  Vector<const float> bias{};
  if (!is_cosine) bias = {p.b1, {width}};
  router_gemm({.tokens = tokens,
               .gate = raw_in(p.w1, width, hidden),
               .bias = bias,
               .logits = inner,
               .execution = execution});
  parallel_for(execution.pool, rows, [&](std::int64_t t, int) {
    const float* const u = inner.row(t);
    float* const to = active.row(t);
    const float scale = is_cosine ? inverse_length(u, width) : 1;
    for (std::int64_t i = 0; i < width; ++i) to[i] = is_cosine ? u[i] * scale : gelu(u[i]);
  });
  if (network_.kind != Kind::kHadamard) return raw(active);
  const Matrix<float> factor = factor_.matrix(rows, hidden);
  const Matrix<float> product = features_.matrix(rows, hidden);
  router_gemm({.tokens = raw(active),
               .gate = raw_in(p.w2, hidden, width),
               .bias = {p.b2, {hidden}},
               .logits = factor,
               .execution = execution});
  parallel_for(execution.pool, rows, [&](std::int64_t t, int) {
    float* const to = product.row(t);
    row_ops::widen(tokens.dtype, tokens.row(t), to, hidden);
    for (std::int64_t h = 0; h < hidden; ++h) to[h] *= factor.row(t)[h];
  });
  return raw(product);
}

ConstRawMatrix CpuNetwork::scaled(ConstRawMatrix gate) {
  if (network_.kind != Kind::kCosine) return gate;
  const float scale = std::exp(std::min(parameters_.floats().back(), kMostCosineScale));
  const Matrix<float> rows = gate_.matrix(gate.rows, gate.cols);
  for (std::int64_t e = 0; e < gate.rows; ++e) {
    float* const row = rows.row(e);
    row_ops::widen(gate.dtype, gate.row(e), row, gate.cols);
    const float factor = scale * inverse_length(row, gate.cols);
    for (std::int64_t i = 0; i < gate.cols; ++i) row[i] *= factor;
  }
  return raw(rows);
}

/// The gradient of the gate, and of s, from that of what scaled() makes, in dgate_.
void CpuNetwork::scale_gate_backward(const RouterGemmBackwardArgs& args, float* dscale) {
  const std::int64_t rows = args.gate.rows, cols = args.gate.cols;
  const float s = parameters_.floats().back();
  const float scale = std::exp(std::min(s, kMostCosineScale));
  const Matrix<float> row = widened_.matrix(3, cols);
  float sum = 0;
  for (std::int64_t e = 0; e < rows; ++e) {
    const float* const dout = dgate_.values().data() + e * cols;
    row_ops::widen(args.gate.dtype, args.gate.row(e), row.row(0), cols);
    for (std::int64_t i = 0; i < cols; ++i) row.row(1)[i] = scale * dout[i];
    sum += dot(row.row(0), row.row(1), cols) * inverse_length(row.row(0), cols);
    if (args.dgate.data == nullptr) continue;
    unit_backward(row.row(0), row.row(1), cols, row.row(2));
    row_ops::write_gradient(row.row(2), args.dgate.dtype, args.dgate.row(e), cols, args.accumulate);
  }
  if (dscale == nullptr) return;
  const float gradient = s < kMostCosineScale ? sum : 0;
  *dscale = args.accumulate ? *dscale + gradient : gradient;
}

void CpuNetwork::backward(const RouterGemmBackwardArgs& args, Vector<float> dparameters) {
  if (network_.is_linear()) return router_gemm_backward(args);
  const std::int64_t rows = args.tokens.rows, hidden = args.tokens.cols;
  const std::int64_t width = network_.inner(hidden);
  const bool is_cosine = network_.kind == Kind::kCosine;
  const bool is_hadamard = network_.kind == Kind::kHadamard;
  const bool inside = args.dtokens.data != nullptr || dparameters.data != nullptr;
  const NetworkParts<const float> p = values(hidden);
  const auto d = NetworkParts<float>::of(network_, hidden, dparameters.data);

  RouterGemmBackwardArgs last = args;
  last.tokens = features(args.tokens, args.execution);
  last.gate = scaled(args.gate);
  last.dtokens = {};
  if (inside) last.dtokens = dfeatures_.matrix(rows, last.tokens.cols);
  if (is_cosine) {
    const Matrix<float> dgate = dgate_.matrix(args.gate.rows, args.gate.cols);
    if (args.accumulate) std::fill_n(dgate.data, dgate.size(), 0.0F);
    last.dgate = raw_out(dgate.data, args.gate.rows, args.gate.cols);
    router_gemm_backward(last);
    scale_gate_backward(args, d.b1);
  } else {
    router_gemm_backward(last);
  }
  if (!inside) return;

  const Matrix<float> dfeatures = dfeatures_.matrix(rows, is_hadamard ? hidden : width);
  Matrix<float> dactive = dfeatures;
  if (is_hadamard) {
    const Matrix<float> dfactor = dfactor_.matrix(rows, hidden);
    parallel_for(args.execution.pool, rows, [&](std::int64_t t, int) {
      float* const to = dfactor.row(t);
      row_ops::widen(args.tokens.dtype, args.tokens.row(t), to, hidden);
      for (std::int64_t h = 0; h < hidden; ++h) to[h] *= dfeatures.row(t)[h];
    });
    dactive = dinner_.matrix(rows, width);
    router_gemm_backward({.tokens = raw(active_.matrix(rows, width)),
                          .gate = raw_in(p.w2, hidden, width),
                          .dlogits = dfactor,
                          .dtokens = dactive,
                          .dgate = raw_out(d.w2, hidden, width),
                          .dbias = vector_out(d.b2, hidden),
                          .accumulate = args.accumulate,
                          .execution = args.execution});
  }
  const Matrix<float> inner = inner_.matrix(rows, width);
  parallel_for(args.execution.pool, rows, [&](std::int64_t t, int) {
    const float* const u = inner.row(t);
    float* const to = dactive.row(t);
    if (is_cosine) return unit_backward(u, to, width, to);
    for (std::int64_t i = 0; i < width; ++i) to[i] *= gelu_slope(u[i]);
  });
  router_gemm_backward({.tokens = args.tokens,
                        .gate = raw_in(p.w1, width, hidden),
                        .dlogits = dactive,
                        .dtokens = args.dtokens,
                        .dgate = raw_out(d.w1, width, hidden),
                        .dbias = is_cosine ? Vector<float>{} : vector_out(d.b1, width),
                        .accumulate = args.accumulate,
                        .execution = args.execution});
  if (!is_hadamard || args.dtokens.data == nullptr) return;
  const Matrix<float> factor = factor_.matrix(rows, hidden);
  parallel_for(args.execution.pool, rows, [&](std::int64_t t, int) {
    float* const to = args.dtokens.row(t);
    for (std::int64_t h = 0; h < hidden; ++h) {
      to[h] = std::fma(dfeatures.row(t)[h], factor.row(t)[h], to[h]);
    }
  });
}

}  // namespace switchyard

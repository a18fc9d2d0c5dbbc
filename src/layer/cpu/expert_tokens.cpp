// What is done to tokens before experts take them. Bound by memory: one pass over the tokens each.
#include "layer/cpu/expert_tokens.hpp"

#include <algorithm>

#include "comm/exchange_layout.hpp"
#include "comm/host/wire.hpp"
#include "core/row_ops.hpp"
#include "layer/cpu/fixed_dot.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {
namespace {

double bytes_of(ConstRawMatrix m) { return static_cast<double>(m.bytes()); }

}  // namespace

Assignments ExpertTokens::weighted(const Assignments& work, const Execution& execution) {
  const ConstRawMatrix x = work.x;
  const RawMatrix out = weighted_.matrix(x.dtype, x.rows, x.cols);
  const Vector<float> ones = ones_.vector(x.rows);
  std::fill_n(ones.data, x.rows, 1.0F);
  const Matrix<float> wide = wide_.matrix(num_threads(execution.pool), x.cols);
  const ScopedStage stage(execution, "pack", {.bytes = 2 * bytes_of(x)});
  parallel_for(execution.pool, x.rows, [&](std::int64_t t, int thread) {
    float* const row = wide.row(thread);
    std::fill_n(row, x.cols, 0.0F);
    row_ops::accumulate(x.dtype, work.weight.data[t], x.row(t), row, x.cols);
    row_ops::narrow(x.dtype, row, out.row(t), x.cols);
  });
  Assignments done = work;
  done.x = out;
  done.weight = {ones.data, {x.rows, 1}};
  return done;
}

ConstRawMatrix ExpertTokens::crossed(ConstRawMatrix tokens, DType wire,
                                     const Execution& execution) {
  const DType compute = tokens.dtype;
  if (wire == compute) return tokens;
  const RawMatrix out = crossed_.matrix(compute, tokens.rows, tokens.cols);
  const ScopedStage stage(execution, "dequantize", {.bytes = 2 * bytes_of(tokens)});
  parallel_for(execution.pool, tokens.rows, [&](std::int64_t t, int) {
    std::vector<std::byte> row(static_cast<std::size_t>(tokens.cols * size_of(wire)));
    std::vector<float> scales(static_cast<std::size_t>(scales_per_row(wire, tokens.cols)));
    encode_row(tokens.row(t), compute, row.data(), wire, scales.data(), tokens.cols);
    decode_row(row.data(), wire, scales.data(), out.row(t), compute, tokens.cols);
  });
  return out;
}

void weighted_backward(ConstRawMatrix tokens, Matrix<const float> weight, Matrix<float> dx,
                       Matrix<float> dweight, const Execution& execution) {
  ArrayBuffer<float> buffer;
  const Matrix<float> wide = buffer.matrix(num_threads(execution.pool), tokens.cols);
  const ScopedStage stage(execution, "pack",
                          {.bytes = bytes_of(tokens) + 8 * static_cast<double>(dx.size())});
  parallel_for(execution.pool, tokens.rows, [&](std::int64_t t, int thread) {
    float* const row = dx.row(t);
    if (dweight.data != nullptr) {
      row_ops::widen(tokens.dtype, tokens.row(t), wide.row(thread), tokens.cols);
      dweight.row(t)[0] = fixed_dot(row, wide.row(thread), tokens.cols);
    }
    const float factor = weight.row(t)[0];
    for (std::int64_t h = 0; h < tokens.cols; ++h) row[h] *= factor;
  });
}

}  // namespace switchyard

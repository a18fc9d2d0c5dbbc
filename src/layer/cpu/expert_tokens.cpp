// What is done to tokens before experts take them, and what goes around these. Bound by memory: one
// pass over the tokens each.
#include "layer/cpu/expert_tokens.hpp"

#include <algorithm>

#include "comm/exchange_layout.hpp"
#include "comm/host/wire.hpp"
#include "core/row_ops.hpp"
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

Matrix<const float> ExpertTokens::around(ConstRawMatrix tokens, Vector<const float> identity_weight,
                                         Matrix<const float> shared, const Execution& execution) {
  const Matrix<float> out = around_.matrix(tokens.rows, tokens.cols);
  const ScopedStage stage(execution, "shared",
                          {.bytes = bytes_of(tokens) + 4 * static_cast<double>(out.size())});
  parallel_for(execution.pool, tokens.rows, [&](std::int64_t t, int) {
    if (shared.data == nullptr) {
      std::fill_n(out.row(t), tokens.cols, 0.0F);
    } else {
      std::copy_n(shared.row(t), tokens.cols, out.row(t));
    }
    row_ops::accumulate(tokens.dtype, identity_weight[t], tokens.row(t), out.row(t), tokens.cols);
  });
  return out;
}

}  // namespace switchyard

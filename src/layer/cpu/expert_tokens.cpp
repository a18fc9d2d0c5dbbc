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

/// In 16 chains, whose number no machine changes.
float dot(const float* a, const float* b, std::int64_t n) {
  constexpr std::int64_t kChains = 16;
  float sums[kChains] = {};
  const std::int64_t whole = n - n % kChains;
  for (std::int64_t i = 0; i < whole; i += kChains) {
    for (std::int64_t c = 0; c < kChains; ++c) sums[c] += a[i + c] * b[i + c];
  }
  for (std::int64_t i = whole; i < n; ++i) sums[i - whole] += a[i] * b[i];
  for (std::int64_t half = kChains / 2; half > 0; half /= 2) {
    for (std::int64_t c = 0; c < half; ++c) sums[c] += sums[c + half];
  }
  return sums[0];
}

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
      dweight.row(t)[0] = dot(row, wide.row(thread), tokens.cols);
    }
    const float factor = weight.row(t)[0];
    for (std::int64_t h = 0; h < tokens.cols; ++h) row[h] *= factor;
  });
}

void identity_backward(const IdentityBackward& args, const Execution& execution) {
  const ConstRawMatrix& tokens = args.tokens;
  const std::int64_t hidden = tokens.cols;
  ArrayBuffer<float> buffer;
  const Matrix<float> wide = buffer.matrix(std::int64_t{2} * num_threads(execution.pool), hidden);
  const ScopedStage stage(execution, "shared",
                          {.bytes = bytes_of(tokens) + bytes_of(args.dout) +
                                    8 * static_cast<double>(args.dtokens.size())});
  parallel_for(execution.pool, tokens.rows, [&](std::int64_t t, int thread) {
    const std::int32_t* const expert = args.expert.row(t);
    const std::int32_t* const end = expert + args.expert.shape[1];
    const auto is_identity = [&](std::int32_t e) { return e >= args.first_identity; };
    if (args.dtokens.data != nullptr) {
      std::fill_n(args.dtokens.row(t), hidden, 0.0F);
      row_ops::accumulate(args.dout.dtype, args.identity_weight[t], args.dout.row(t),
                          args.dtokens.row(t), hidden);
    }
    if (args.dweight.data != nullptr && std::any_of(expert, end, is_identity)) {
      float* const x = wide.row(std::int64_t{2} * thread);
      float* const dout = wide.row(std::int64_t{2} * thread + 1);
      row_ops::widen(tokens.dtype, tokens.row(t), x, hidden);
      row_ops::widen(args.dout.dtype, args.dout.row(t), dout, hidden);
      const float product = dot(x, dout, hidden);
      for (std::int64_t k = 0; k < args.expert.shape[1]; ++k) {
        if (is_identity(expert[k])) args.dweight.row(t)[k] = product;
      }
    }
  });
}

}  // namespace switchyard

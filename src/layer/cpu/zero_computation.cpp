// Zero-computation experts on a CPU: what they give is made of a rank's own tokens, around all
// others. Gradients of constants are sums over tokens in ascending order, whatever the threads.
#include "layer/cpu/zero_computation.hpp"

#include <algorithm>
#include <cmath>
#include <optional>

#include "core/row_ops.hpp"
#include "layer/cpu/fixed_dot.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {
namespace {

double bytes_of(ConstRawMatrix m) { return static_cast<double>(m.bytes()); }

bool is_kept(const Assignments& chosen, std::int64_t token, std::int64_t k) {
  return chosen.kept.data == nullptr || chosen.kept.row(token)[k] != 0;
}

float sigmoid(float x) { return 1.0F / (1.0F + std::exp(-x)); }

void add_row(float weight, const float* row, float* to, std::int64_t n) {
  row_ops::accumulate(DType::kF32, weight, row, to, n);
}

}  // namespace

CpuZeroComputation::CpuZeroComputation(const LayerModel& model)
    : free_(model.config.router.zero_computation),
      first_(model.config.router.num_computing()),
      hidden_(model.config.experts.hidden),
      constants_(model.constant_experts) {}

Assignments CpuZeroComputation::without(const Assignments& chosen, const Execution& execution) {
  if (!any()) return chosen;
  const auto [num_tokens, top_k] = chosen.expert.shape;
  others_ = others_buffer_.matrix(num_tokens, top_k);
  counts_ = counts_buffer_.vector(num_tokens);
  of_token_ = of_token_buffer_.matrix(num_tokens, top_k);
  of_constant_ = of_constant_buffer_.matrix(num_tokens, top_k);
  const Matrix<float> x = wide_.matrix(num_threads(execution.pool), hidden_);
  std::optional<ScopedStage> stage;
  if (free_.constant > 0)
    stage.emplace(execution, "shared", StageWork{.bytes = bytes_of(chosen.x)});
  parallel_for(execution.pool, num_tokens,
               [&](std::int64_t t, int thread) { weigh(chosen, t, x.row(thread)); });
  Assignments rest = chosen;
  rest.expert = others_;
  return rest;
}

/// Shares of a token's picks, and what it counts in its own output. @param x  Room for the token.
void CpuZeroComputation::weigh(const Assignments& chosen, std::int64_t token, float* x) {
  const std::int32_t first_copy = first_ + free_.constant;
  const std::int32_t first_zero = first_copy + free_.copy;
  const std::int32_t* const expert = chosen.expert.row(token);
  const float* const weight = chosen.weight.row(token);
  bool is_wide = false;
  float sum = 0.0F;
  for (std::int64_t k = 0; k < chosen.expert.shape[1]; ++k) {
    others_.row(token)[k] = expert[k] >= first_ ? -1 : expert[k];
    float of_token = 0.0F;
    float of_constant = 0.0F;
    if (expert[k] >= first_ && is_kept(chosen, token, k)) {
      if (expert[k] < first_copy) {
        if (!is_wide) row_ops::widen(chosen.x.dtype, chosen.x.row(token), x, hidden_);
        is_wide = true;
        const std::int32_t c = expert[k] - first_;
        const float first = fixed_dot(constant(c, 0), x, hidden_);
        const float more = first - fixed_dot(constant(c, 1), x, hidden_);
        of_token = sigmoid(more);
        of_constant = sigmoid(-more);
        sum += weight[k] * of_token;
      } else if (expert[k] < first_zero) {
        sum += weight[k];
      }
    }
    of_token_.row(token)[k] = of_token;
    of_constant_.row(token)[k] = of_constant;
  }
  counts_[token] = sum;
}

Matrix<const float> CpuZeroComputation::around(const Assignments& chosen,
                                               Matrix<const float> shared,
                                               const Execution& execution) {
  const ConstRawMatrix& tokens = chosen.x;
  const Matrix<float> out = around_.matrix(tokens.rows, hidden_);
  const ScopedStage stage(execution, "shared",
                          {.bytes = bytes_of(tokens) + 4 * static_cast<double>(out.size())});
  parallel_for(execution.pool, tokens.rows, [&](std::int64_t t, int) {
    if (shared.data == nullptr) {
      std::fill_n(out.row(t), hidden_, 0.0F);
    } else {
      std::copy_n(shared.row(t), hidden_, out.row(t));
    }
    row_ops::accumulate(tokens.dtype, counts_[t], tokens.row(t), out.row(t), hidden_);
    for (std::int64_t k = 0; k < chosen.expert.shape[1]; ++k) {
      const float share = of_constant_.row(t)[k];
      if (share == 0.0F) continue;
      add_row(chosen.weight.row(t)[k] * share, constant(chosen.expert.row(t)[k] - first_, 2),
              out.row(t), hidden_);
    }
  });
  return out;
}

void CpuZeroComputation::backward(const ZeroComputationBackward& args, const Execution& execution) {
  const std::int64_t num_tokens = args.dout.rows;
  const Matrix<float> wide = wide_.matrix(std::int64_t{2} * num_threads(execution.pool), hidden_);
  slope_ = slope_buffer_.matrix(num_tokens, args.chosen.expert.shape[1]);
  const ScopedStage stage(execution, "shared",
                          {.bytes = bytes_of(args.chosen.x) + bytes_of(args.dout) +
                                    8 * static_cast<double>(args.dtokens.size())});
  parallel_for(execution.pool, num_tokens, [&](std::int64_t t, int thread) {
    back_through(args, t, wide.row(std::int64_t{2} * thread),
                 wide.row(std::int64_t{2} * thread + 1));
  });
  if (args.dconstant.data != nullptr) add_up_constants(args, execution);
}

/// One token's gradients, and its slopes.
/// @param x     Room for the token
/// @param dout  and its gradient.
void CpuZeroComputation::back_through(const ZeroComputationBackward& args, std::int64_t token,
                                      float* x, float* dout) {
  const Assignments& chosen = args.chosen;
  const std::int64_t top_k = chosen.expert.shape[1];
  const std::int32_t first_copy = first_ + free_.constant;
  const std::int32_t first_zero = first_copy + free_.copy;
  const std::int32_t* const expert = chosen.expert.row(token);
  float* const dtokens = args.dtokens.data == nullptr ? nullptr : args.dtokens.row(token);
  if (dtokens != nullptr) {
    std::fill_n(dtokens, hidden_, 0.0F);
    row_ops::accumulate(args.dout.dtype, counts_[token], args.dout.row(token), dtokens, hidden_);
  }
  if (std::none_of(expert, expert + top_k, [&](std::int32_t e) { return e >= first_; })) return;
  row_ops::widen(chosen.x.dtype, chosen.x.row(token), x, hidden_);
  row_ops::widen(args.dout.dtype, args.dout.row(token), dout, hidden_);
  const float of_copy = fixed_dot(x, dout, hidden_);
  float* const slope = slope_.row(token);
  for (std::int64_t k = 0; k < top_k; ++k) {
    slope[k] = 0.0F;
    if (expert[k] < first_) continue;
    float dweight = 0.0F;
    if (expert[k] < first_zero && is_kept(chosen, token, k)) {
      dweight = of_copy;
      if (expert[k] < first_copy) {
        const std::int32_t c = expert[k] - first_;
        const float of_vector = fixed_dot(constant(c, 2), dout, hidden_);
        const float a1 = of_token_.row(token)[k];
        const float a2 = of_constant_.row(token)[k];
        dweight = a1 * of_copy + a2 * of_vector;
        slope[k] = chosen.weight.row(token)[k] * (a1 * a2) * (of_copy - of_vector);
        if (dtokens != nullptr) {
          add_row(slope[k], constant(c, 0), dtokens, hidden_);
          add_row(-slope[k], constant(c, 1), dtokens, hidden_);
        }
      }
    }
    if (args.dweight.data != nullptr) args.dweight.row(token)[k] = dweight;
  }
}

void CpuZeroComputation::add_up_constants(const ZeroComputationBackward& args,
                                          const Execution& execution) {
  constexpr std::int64_t kColumns = 256;
  const Assignments& chosen = args.chosen;
  const std::int64_t num_tokens = chosen.expert.shape[0];
  const std::int64_t top_k = chosen.expert.shape[1];
  const std::int64_t pieces = (hidden_ + kColumns - 1) / kColumns;
  parallel_for(execution.pool, free_.constant * pieces, [&](std::int64_t i, int) {
    const std::int64_t begin = i % pieces * kColumns;
    const std::int64_t n = std::min(kColumns, hidden_ - begin);
    const std::int64_t c = i / pieces;
    float sums[3][kColumns] = {};
    for (std::int64_t t = 0; t < num_tokens; ++t) {
      for (std::int64_t k = 0; k < top_k; ++k) {
        const float share = of_constant_.row(t)[k];
        if (chosen.expert.row(t)[k] != first_ + c || share == 0.0F) continue;
        row_ops::accumulate(chosen.x.dtype, slope_.row(t)[k],
                            chosen.x.row(t) + begin * size_of(chosen.x.dtype), sums[0], n);
        row_ops::accumulate(args.dout.dtype, chosen.weight.row(t)[k] * share,
                            args.dout.row(t) + begin * size_of(args.dout.dtype), sums[2], n);
      }
    }
    for (std::int64_t h = 0; h < n; ++h) sums[1][h] = -sums[0][h];
    for (std::int64_t part = 0; part < 3; ++part) {
      row_ops::write_gradient(sums[part], DType::kF32,
                              args.dconstant.data + (3 * c + part) * hidden_ + begin, n,
                              args.accumulate);
    }
  });
}

}  // namespace switchyard

// Sums over rows on the way back. Bound by reading the rows once more.
#include "experts/cpu/backward/row_sums.hpp"

#include <algorithm>
#include <cmath>

#include "core/half.hpp"
#include "core/row_ops.hpp"

namespace switchyard::cpu {
namespace {

const CpuExpertWeights& weights_of(const ExpertsBackwardArgs& call) {
  return static_cast<const CpuExpertWeights&>(*call.weights);
}

std::int64_t first_cols_of_all(const CpuExpertWeights& weights) {
  return (weights.config().gated ? 2 : 1) * weights.config().inner;
}

}  // namespace

std::int64_t row_of_column(const CpuExpertWeights& weights, std::int64_t j) {
  const std::int64_t inner = weights.config().inner;
  const std::int64_t width = weights.kernels().panel_cols;
  const std::int64_t per_panel = weights.first_cols();
  const std::int64_t i = j / width * per_panel + j % width % per_panel;
  return i < inner ? j % width / per_panel * inner + i : -1;
}

void sum_row_weights(const RowSumsArgs& args) {
  const ExpertsBackwardArgs& call = *args.call;
  if (call.drow_weight.data == nullptr) return;
  const CpuExpertWeights& weights = weights_of(call);
  std::vector<float> bias;
  if (weights.config().bias) {
    bias.resize(static_cast<std::size_t>(weights.config().hidden));
    weights.read_bias(weights.first_expert() + args.expert, ExpertPart::kDown, bias.data());
  }
  const std::int64_t first_row = call.plan.expert_begin[args.expert];
  const auto rows = std::ssize(*args.dout);
  parallel_for(call.execution.pool, rows, [&](std::int64_t row, int) {
    float sum = 0.0F;
    for (std::int64_t p = 0; p < args.pieces; ++p) sum += args.dots[p * rows + row];
    const std::byte* dout = (*args.dout)[static_cast<std::size_t>(row)];
    for (std::size_t h = 0; h < bias.size(); ++h) {
      sum = std::fma(load_float(dout, weights.dtype(), static_cast<std::int64_t>(h)), bias[h], sum);
    }
    call.drow_weight[first_row + row] = sum;
  });
}

void sum_bias_gradients(const RowSumsArgs& args) {
  const ExpertsBackwardArgs& call = *args.call;
  const CpuExpertWeights& weights = weights_of(call);
  const auto& [w13, w2, b13, b2] = call.gradients;
  if (b13.data != nullptr) {
    std::vector<float> sums(
        static_cast<std::size_t>(weights.first().panels * weights.kernels().panel_cols));
    for (const std::byte* dz : *args.dz) {
      row_ops::accumulate(weights.dtype(), 1.0F, dz, sums.data(), std::ssize(sums));
    }
    std::vector<float> in_order(static_cast<std::size_t>(first_cols_of_all(weights)));
    for (std::size_t j = 0; j < sums.size(); ++j) {
      const std::int64_t row = row_of_column(weights, static_cast<std::int64_t>(j));
      if (row >= 0) in_order[static_cast<std::size_t>(row)] = sums[j];
    }
    row_ops::write_gradient(in_order.data(), DType::kF32, b13.row(args.expert),
                            std::ssize(in_order), call.accumulate);
  }
  if (b2.data != nullptr) {
    std::vector<float> sums(static_cast<std::size_t>(weights.config().hidden));
    const float* weight = call.plan.row_weight.data + call.plan.expert_begin[args.expert];
    for (std::size_t r = 0; r < args.dout->size(); ++r) {
      row_ops::accumulate(weights.dtype(), weight[r], (*args.dout)[r], sums.data(),
                          std::ssize(sums));
    }
    row_ops::write_gradient(sums.data(), DType::kF32, b2.row(args.expert), std::ssize(sums),
                            call.accumulate);
  }
}

void clear_gradients(const ExpertsBackwardArgs& call, std::int32_t expert) {
  const std::int64_t first = first_cols_of_all(weights_of(call));
  const std::int64_t hidden = weights_of(call).config().hidden;
  const auto clear = [&](const RawMatrix& matrix, std::int64_t rows) {
    if (matrix.data == nullptr) return;
    parallel_for(call.execution.pool, rows, [&](std::int64_t r, int) {
      std::fill_n(matrix.row(expert * rows + r), matrix.row_bytes(), std::byte{0});
    });
  };
  const auto& [w13, w2, b13, b2] = call.gradients;
  clear(w13, first);
  clear(w2, hidden);
  if (b13.data != nullptr) std::fill_n(b13.row(expert), first, 0.0F);
  if (b2.data != nullptr) std::fill_n(b2.row(expert), hidden, 0.0F);
}

}  // namespace switchyard::cpu

#pragma once

#include "experts/gpu/grouped/product.hpp"
#include "experts/gpu/grouped/sm80/load.cuh"

namespace switchyard {

/// What the portable kernels, in 16 bits and in f32, take of a product whose tiles have
/// `out_columns` columns of the output.
inline Sm80Params sm80_params(const GroupedProduct& product, bool gated, int out_columns) {
  const auto columns = static_cast<std::int32_t>(product.columns);
  return {
      .schedule = {product.layer.expert_begin, product.layer.expert_rows, product.layer.num_experts,
                   (columns + out_columns - 1) / out_columns, product.counter},
      .epilogue = {product.out,
                   product.bias,
                   columns,
                   {product.layer.activation, product.layer.alpha, product.layer.limit}},
      .rows = product.rows,
      .row_token = product.row_token,
      .weights = product.weights,
      .depth = static_cast<std::int32_t>(product.depth),
      .weight_rows = columns * (gated ? 2 : 1),
      .preactivation = product.layer.preactivation};
}

}  // namespace switchyard

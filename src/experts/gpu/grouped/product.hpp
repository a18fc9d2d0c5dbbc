#pragma once

// One grouped product as its kernels take it; each kernel is compiled in a file of its own.

#include "experts/gpu/grouped/gemm.hpp"

namespace switchyard {

/// out[row] = epilogue(weights[e] rows[row_token[row]] + bias[e]): one of the two products of a
/// layer, which has what they share.
struct GroupedProduct {
  const GroupedGemmParams& layer;
  const void* rows;  // [layer.max_rows or layer.num_tokens, depth]
  const std::int32_t* row_token;
  const void* weights;  // [E * columns (twice that when gated), depth]
  const float* bias;
  void* out;  // [layer.max_rows, columns]
  std::int32_t* counter;
  std::int64_t depth;
  std::int64_t columns;  // of out
  int num_sms;
};

void launch_sm90_gated(const GroupedProduct& product, cudaStream_t stream);
void launch_sm90_gated_ping_pong(const GroupedProduct& product, cudaStream_t stream);
void launch_sm90_plain(const GroupedProduct& product, cudaStream_t stream);
void launch_sm90_down(const GroupedProduct& product, cudaStream_t stream);
void launch_sm90_gated_kept(const GroupedProduct& product, cudaStream_t stream);
void launch_sm90_plain_kept(const GroupedProduct& product, cudaStream_t stream);

void launch_sm80_gated(const GroupedProduct& product, cudaStream_t stream);
void launch_sm80_plain(const GroupedProduct& product, cudaStream_t stream);
void launch_sm80_down(const GroupedProduct& product, cudaStream_t stream);
void launch_sm80_gated_kept(const GroupedProduct& product, cudaStream_t stream);
void launch_sm80_plain_kept(const GroupedProduct& product, cudaStream_t stream);

void launch_f32_sm90_gated(const GroupedProduct& product, cudaStream_t stream);
void launch_f32_sm90_plain(const GroupedProduct& product, cudaStream_t stream);
void launch_f32_sm90_down(const GroupedProduct& product, cudaStream_t stream);
void launch_f32_sm90_gated_kept(const GroupedProduct& product, cudaStream_t stream);
void launch_f32_sm90_plain_kept(const GroupedProduct& product, cudaStream_t stream);

void launch_f32_gated(const GroupedProduct& product, cudaStream_t stream);
void launch_f32_plain(const GroupedProduct& product, cudaStream_t stream);
void launch_f32_down(const GroupedProduct& product, cudaStream_t stream);
void launch_f32_gated_kept(const GroupedProduct& product, cudaStream_t stream);
void launch_f32_plain_kept(const GroupedProduct& product, cudaStream_t stream);

}  // namespace switchyard

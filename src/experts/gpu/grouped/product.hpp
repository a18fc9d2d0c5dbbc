#pragma once

// One grouped product as its kernels take it; each kernel is compiled in a file of its own.

#include <cuda_runtime_api.h>

#include "switchyard/experts.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

class TensorMaps;

/// out[row] = epilogue(weights[e] rows[row_token[row]] + bias[e]).
struct GroupedProduct {
  const void* rows = nullptr;  // [max_rows or tokens, depth]
  const std::int32_t* row_token = nullptr;
  const void* weights = nullptr;  // [E * columns (twice that when gated), depth]
  TensorMaps* weight_maps = nullptr;
  const float* bias = nullptr;
  void* out = nullptr;  // [max_rows, columns]
  const std::int32_t* expert_begin = nullptr;
  const std::int32_t* expert_rows = nullptr;
  std::int32_t* counter = nullptr;
  std::int32_t num_experts = 0;
  std::int64_t max_rows = 0;
  std::int64_t depth = 0;
  std::int64_t columns = 0;  // of out
  DType dtype = DType::kBF16;
  Activation activation = Activation::kSilu;
  float alpha = 0;
  float limit = 0;
  int num_sms = 0;
  bool flat = false;  // 16-bit sm_80: in 98 KB of shared memory whatever the chip has
};

void launch_sm90_gated(const GroupedProduct& product, cudaStream_t stream);
void launch_sm90_gated_ping_pong(const GroupedProduct& product, cudaStream_t stream);
void launch_sm90_plain(const GroupedProduct& product, cudaStream_t stream);
void launch_sm90_down(const GroupedProduct& product, cudaStream_t stream);

void launch_sm80_gated(const GroupedProduct& product, cudaStream_t stream);
void launch_sm80_plain(const GroupedProduct& product, cudaStream_t stream);
void launch_sm80_down(const GroupedProduct& product, cudaStream_t stream);

void launch_f32_sm90_gated(const GroupedProduct& product, cudaStream_t stream);
void launch_f32_sm90_plain(const GroupedProduct& product, cudaStream_t stream);
void launch_f32_sm90_down(const GroupedProduct& product, cudaStream_t stream);

void launch_f32_gated(const GroupedProduct& product, cudaStream_t stream);
void launch_f32_plain(const GroupedProduct& product, cudaStream_t stream);
void launch_f32_down(const GroupedProduct& product, cudaStream_t stream);

}  // namespace switchyard

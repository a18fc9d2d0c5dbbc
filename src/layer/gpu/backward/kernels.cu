#include "layer/gpu/backward/kernels.hpp"

#include "comm/split_count.hpp"
#include "core/gpu/cuda_check.hpp"
#include "core/gpu/each.cuh"
#include "core/gpu/pack16.cuh"

namespace switchyard {
namespace {

using each::blocks_for;
using each::for_each;
using each::kThreads;

struct ChoiceParams {
  const std::int32_t* token_begin;  // [T+1]
  const std::int32_t* token_row;
  const std::int32_t* expert;  // [T, K]
  const std::uint8_t* kept;    // [T, K] or null
  const float* drow_weight;
  float* dweight;  // [T, K]
  std::int64_t num_tokens;
  std::int32_t top_k, num_experts;
};

/// A thread a choice. What the plan has left out, an id that is none among it, gets 0.
__global__ void __launch_bounds__(kThreads) choice_kernel(const __grid_constant__ ChoiceParams p) {
  for_each(p.num_tokens * p.top_k, [&](std::int64_t at) {
    const std::int64_t token = at / p.top_k;
    const auto k = static_cast<int>(at % p.top_k);
    const std::int32_t* const expert = p.expert + token * p.top_k;
    const std::uint8_t* const kept = p.kept == nullptr ? nullptr : p.kept + token * p.top_k;
    const auto counts = [&](int i) {
      return expert[i] >= 0 && expert[i] < p.num_experts && (kept == nullptr || kept[i] != 0);
    };
    // A token's rows ascend by (expert, k).
    std::int32_t place = p.token_begin[token];
    for (int other = 0; other < p.top_k; ++other) {
      const bool before = expert[other] < expert[k] || (expert[other] == expert[k] && other < k);
      if (before && counts(other)) ++place;
    }
    const bool has_row = counts(k) && place < p.token_begin[token + 1];
    p.dweight[at] = has_row ? p.drow_weight[p.token_row[place]] : 0.0F;
  });
}

struct SigmoidParams {
  const float* weight;
  const float* dweight;
  float* dlogit;
  std::int64_t size;
};

__global__ void __launch_bounds__(kThreads)
    sigmoid_kernel(const __grid_constant__ SigmoidParams p) {
  for_each(p.size, [&](std::int64_t i) {
    p.dlogit[i] = p.dweight[i] * p.weight[i] * (1.0F - p.weight[i]);
  });
}

struct AddParams {
  const float* experts;  // [T, H] or null
  const float* router;   // [T, H] or null
  const float* shared;   // [T, H] or null
  const float* dlogit;   // [T] or null
  const float* gate;     // [H]
  void* out;             // [T, H]
  std::int64_t size;     // T * H / 4
  std::int32_t quads;    // H / 4
};

__device__ __forceinline__ float4 load_four(const float* from, std::int64_t quad) {
  return __ldcs(reinterpret_cast<const float4*>(from) + quad);
}

template <typename Out>
__global__ void __launch_bounds__(kThreads) add_kernel(const __grid_constant__ AddParams p) {
  for_each(p.size, [&](std::int64_t quad) {
    const float4 sum = p.experts != nullptr ? load_four(p.experts, quad) : float4{};
    float rest[4] = {};
    if (p.shared != nullptr) {
      const float4 part = load_four(p.shared, quad);
      rest[0] = part.x, rest[1] = part.y, rest[2] = part.z, rest[3] = part.w;
      if (p.dlogit != nullptr) {
        const float dlogit = p.dlogit[quad / p.quads];
        const float4 gate = reinterpret_cast<const float4*>(p.gate)[quad % p.quads];
        rest[0] = __fmaf_rn(dlogit, gate.x, rest[0]), rest[1] = __fmaf_rn(dlogit, gate.y, rest[1]);
        rest[2] = __fmaf_rn(dlogit, gate.z, rest[2]), rest[3] = __fmaf_rn(dlogit, gate.w, rest[3]);
      }
    }
    if (p.router != nullptr) {
      const float4 part = load_four(p.router, quad);
      rest[0] = __fadd_rn(part.x, rest[0]), rest[1] = __fadd_rn(part.y, rest[1]);
      rest[2] = __fadd_rn(part.z, rest[2]), rest[3] = __fadd_rn(part.w, rest[3]);
    }
    if (p.experts != nullptr) {
      rest[0] = __fadd_rn(sum.x, rest[0]), rest[1] = __fadd_rn(sum.y, rest[1]);
      rest[2] = __fadd_rn(sum.z, rest[2]), rest[3] = __fadd_rn(sum.w, rest[3]);
    }
    store_floats(static_cast<Out*>(p.out) + quad * 4, rest);
  });
}

template <typename Out>
__global__ void __launch_bounds__(kThreads)
    write_kernel(const float* values, Out* out, std::int64_t size, bool accumulate) {
  for_each(size, [&](std::int64_t i) {
    float x = values[i];
    if (accumulate) x = __fadd_rn(static_cast<float>(out[i]), x);
    out[i] = static_cast<Out>(x);
  });
}

__global__ void __launch_bounds__(kThreads)
    counts_kernel(const std::int64_t* counts, std::int64_t* kept, std::int64_t size) {
  for_each(size, [&](std::int64_t i) { kept[i] = counts[i]; });
}

__global__ void __launch_bounds__(kThreads)
    split_kernel(const std::int64_t* counts, float* parts, std::int64_t size) {
  for_each(size, [&](std::int64_t i) {
    const SplitCount split = split_count(counts[i]);
    parts[2 * i] = split.low;
    parts[2 * i + 1] = split.rest;
  });
}

__global__ void __launch_bounds__(kThreads)
    join_kernel(const float* parts, std::int64_t* counts, std::int64_t size) {
  for_each(size, [&](std::int64_t i) { counts[i] = joined_count(parts[2 * i], parts[2 * i + 1]); });
}

__global__ void __launch_bounds__(kThreads) ones_kernel(float* values, std::int64_t size) {
  for_each(size, [&](std::int64_t i) { values[i] = 1.0F; });
}

}  // namespace

void give_choice_gradients_on_gpu(const ChoiceGradientsArgs& args, cudaStream_t stream) {
  const auto [num_tokens, top_k] = args.expert.shape;
  if (num_tokens == 0) return;
  const ChoiceParams params{.token_begin = args.plan.token_begin.data,
                            .token_row = args.plan.token_row.data,
                            .expert = args.expert.data,
                            .kept = args.kept.data,
                            .drow_weight = args.drow_weight.data,
                            .dweight = args.dweight.data,
                            .num_tokens = num_tokens,
                            .top_k = static_cast<std::int32_t>(top_k),
                            .num_experts = args.num_experts};
  choice_kernel<<<blocks_for(num_tokens * top_k), kThreads, 0, stream>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

void through_sigmoid(Vector<const float> weight, Vector<const float> dweight, Vector<float> dlogit,
                     cudaStream_t stream) {
  const std::int64_t size = dlogit.shape[0];
  if (size == 0) return;
  const SigmoidParams params{weight.data, dweight.data, dlogit.data, size};
  sigmoid_kernel<<<blocks_for(size), kThreads, 0, stream>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

void add_token_gradients(const TokenGradientParts& parts, RawMatrix out, cudaStream_t stream) {
  const std::int64_t size = out.rows * out.cols / 4;
  if (size == 0) return;
  const AddParams params{.experts = parts.experts.data,
                         .router = parts.router.data,
                         .shared = parts.shared.data,
                         .dlogit = parts.dlogit.data,
                         .gate = parts.gate.data,
                         .out = out.data,
                         .size = size,
                         .quads = static_cast<std::int32_t>(out.cols / 4)};
  switch (out.dtype) {
    case DType::kBF16:
      add_kernel<__nv_bfloat16><<<blocks_for(size), kThreads, 0, stream>>>(params);
      break;
    case DType::kF16: add_kernel<__half><<<blocks_for(size), kThreads, 0, stream>>>(params); break;
    default: add_kernel<float><<<blocks_for(size), kThreads, 0, stream>>>(params); break;
  }
  SWITCHYARD_CUDA(cudaGetLastError());
}

void write_gradient_on_gpu(Vector<const float> values, DType dtype, void* out, bool accumulate,
                           cudaStream_t stream) {
  const std::int64_t size = values.shape[0];
  if (size == 0) return;
  const auto write = [&](auto* to) {
    write_kernel<<<blocks_for(size), kThreads, 0, stream>>>(values.data, to, size, accumulate);
  };
  switch (dtype) {
    case DType::kBF16: write(static_cast<__nv_bfloat16*>(out)); break;
    case DType::kF16: write(static_cast<__half*>(out)); break;
    default: write(static_cast<float*>(out)); break;
  }
  SWITCHYARD_CUDA(cudaGetLastError());
}

void keep_counts(const std::int64_t* counts, Matrix<std::int64_t> kept, cudaStream_t stream) {
  const std::int64_t size = kept.size();
  counts_kernel<<<blocks_for(size), kThreads, 0, stream>>>(counts, kept.data, size);
  SWITCHYARD_CUDA(cudaGetLastError());
}

void split_counts(Vector<const std::int64_t> counts, float* parts, cudaStream_t stream) {
  const std::int64_t size = counts.shape[0];
  split_kernel<<<blocks_for(size), kThreads, 0, stream>>>(counts.data, parts, size);
  SWITCHYARD_CUDA(cudaGetLastError());
}

void join_counts(const float* parts, Vector<std::int64_t> counts, cudaStream_t stream) {
  const std::int64_t size = counts.shape[0];
  join_kernel<<<blocks_for(size), kThreads, 0, stream>>>(parts, counts.data, size);
  SWITCHYARD_CUDA(cudaGetLastError());
}

void fill_ones(Vector<float> values, cudaStream_t stream) {
  const std::int64_t size = values.shape[0];
  if (size == 0) return;
  ones_kernel<<<blocks_for(size), kThreads, 0, stream>>>(values.data, size);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard

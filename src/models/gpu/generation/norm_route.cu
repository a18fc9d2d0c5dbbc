// The norm before the experts and their router in one kernel: a block has a row, which it
// normalises into shared memory; a warp has the logits of every so manieth expert, the first warp
// the choice.
#include "models/gpu/generation/choose_experts.cuh"
#include "models/gpu/generation/overlap.cuh"
#include "models/gpu/generation/stages.hpp"
#include "models/gpu/launch.cuh"

namespace switchyard::models::gpu {
namespace {

constexpr int kMostWarps = 16;
constexpr int kQuadsAhead =
    8;  // of a lane: numbers of a warp's first expert that it asks for early

template <typename T>
__global__ void norm_route_kernel(NormRouteArgs p) {
  extern __shared__ float4 shared[];
  __shared__ float sums[kMostWarps];
  __shared__ float logits[kMostRouted];
  float* const row = reinterpret_cast<float*>(shared);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int num_warps = static_cast<int>(blockDim.x) / 32, size = static_cast<int>(p.size);
  const int each = 4 * static_cast<int>(blockDim.x), begin = 4 * static_cast<int>(threadIdx.x);
  if (p.lets_next_begin) let_stage_behind_begin();
  wait_for_stages_in_front();
  if (!p.lets_next_begin) let_stage_behind_begin();
  const auto load_gate = [&](int e, int first, float(&of)[kQuadsAhead][4]) {
#pragma unroll
    for (int q = 0; q < kQuadsAhead; ++q) {
      const int i = first + 4 * lane + 128 * q;
      if (i < size && e < p.experts) load4(p.gate + std::int64_t{e} * size + i, of[q]);
    }
  };
  float gate[kQuadsAhead][4];
  load_gate(warp, 0, gate);
  const float* const x = p.x + blockIdx.x * p.size;
  float squares = 0;
  for (int i = begin; i < size; i += each) {
    float v[4];
    load4(x + i, v);
    if (p.delta != nullptr) {
      const std::int64_t at = blockIdx.x * p.size + i;
      float delta[4];
      load4(static_cast<const T*>(p.delta) + at, delta);
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] += delta[j];
      store4(p.sum + at, v);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) squares += v[j] * v[j];
    store4(row + i, v);
  }
  squares = warp_sum(squares);
  if (lane == 0) sums[warp] = squares;
  __syncthreads();
  float total = 0;
  for (int w = 0; w < num_warps; ++w) total += sums[w];
  const float scale = 1.0F / sqrtf(total / static_cast<float>(size) + p.epsilon);
  for (int i = begin; i < size; i += each) {  // what this thread has put there
    float v[4], weight[4];
    load4(row + i, v);
    load4(p.weight + i, weight);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      T typed;
      store(&typed, v[j] * weight[j] * scale);
      v[j] = to_float(typed);
    }
    store4(static_cast<T*>(p.y) + blockIdx.x * p.size + i, v);
    store4(row + i, v);
  }
  __syncthreads();
#pragma unroll 1
  for (int e = warp; e < p.experts; e += num_warps) {
    float sum = 0;
#pragma unroll 1
    for (int first = 0; first < size; first += 128 * kQuadsAhead) {
      if (e != warp || first > 0) load_gate(e, first, gate);
#pragma unroll
      for (int q = 0; q < kQuadsAhead; ++q) {
        const int i = first + 4 * lane + 128 * q;
        if (i >= size) continue;
        float of_row[4];
        load4(row + i, of_row);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum = fmaf(gate[q][j], of_row[j], sum);
      }
    }
    sum = warp_sum(sum);
    if (lane == 0) logits[e] = sum;
  }
  __syncthreads();
  if (warp > 0) return;
  const ChoiceArgs choice{p.bias, p.experts, p.top_k, p.renormalize, p.scale};
  const std::int64_t at = std::int64_t{blockIdx.x} * p.top_k;
  choose_experts(choice, logits, p.expert + at, p.share + at);
}

}  // namespace

void norm_route(const NormRouteArgs& args) {
  const int threads = args.experts > 8 ? 32 * kMostWarps : 256;
  by_type(args.bf16, [&](auto type) {
    launch_overlapped(norm_route_kernel<decltype(type)>, static_cast<unsigned>(args.rows), threads,
                      sizeof(float) * static_cast<std::size_t>(args.size), args.stream, args);
  });
}

}  // namespace switchyard::models::gpu

// Rows of the embedding's table by id, and back. Bound by the bytes of the rows.
#include "models/gpu/launch.cuh"
#include "models/gpu/stages.hpp"

namespace switchyard::models::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kColumns = 128;  // of a block of the backward: 4 a lane
constexpr int kChunk = 2048;   // ids that are looked at together

__global__ void embed_kernel(const std::int32_t* ids, const float* table, float* x,
                             std::int64_t tokens, std::int64_t hidden) {
  const std::int64_t quads = hidden / 4;
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= tokens * quads) return;
  const std::int64_t row = std::int64_t{ids[i / quads]} * quads + i % quads;
  reinterpret_cast<float4*>(x)[i] = reinterpret_cast<const float4*>(table)[row];
}

struct Back {
  const std::int32_t* ids;
  const float* dx;
  float* dtable;
  std::int64_t tokens, hidden;
  bool accumulate;
};

/// Block (id, columns). The tokens of an id are listed in ascending order, chunk by chunk; warp w
/// adds up rows w, w + 8, ... of each list, and the warps' sums are added in order.
__global__ void embed_backward_kernel(Back p) {
  __shared__ std::int32_t list[kChunk];
  __shared__ std::int32_t counts[kWarps];
  __shared__ float sums[kWarps][kColumns];
  const int id = static_cast<int>(blockIdx.x);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t column = std::int64_t{blockIdx.y} * kColumns + 4 * lane;
  const bool inside = column < p.hidden;
  float sum[4] = {};
  for (std::int64_t chunk = 0; chunk < p.tokens; chunk += kChunk) {
    // Each warp looks at a stretch of the chunk.
    constexpr int kStretch = kChunk / kWarps;
    std::uint32_t found[kStretch / 32];
    int count = 0;
    for (int i = 0; i < kStretch / 32; ++i) {
      const std::int64_t t = chunk + warp * kStretch + i * 32 + lane;
      const bool is_here = t < p.tokens && p.ids[t] == id;
      found[i] = __ballot_sync(0xffffffffU, is_here);
      count += __popc(found[i]);
    }
    if (lane == 0) counts[warp] = count;
    __syncthreads();
    int place = 0, all = 0;
    for (int w = 0; w < kWarps; ++w) {
      place += w < warp ? counts[w] : 0;
      all += counts[w];
    }
    for (int i = 0; i < kStretch / 32 && count > 0; ++i) {
      const std::uint32_t before = found[i] & ((1U << lane) - 1U);
      if ((found[i] >> lane & 1U) != 0) {
        list[place + __popc(before)] = warp * kStretch + i * 32 + lane;
      }
      place += __popc(found[i]);
    }
    __syncthreads();
    if (inside) {
#pragma unroll 4
      for (int i = warp; i < all; i += kWarps) {
        float row[4];
        load4(p.dx + (chunk + list[i]) * p.hidden + column, row);
        for (int j = 0; j < 4; ++j) sum[j] += row[j];
      }
    }
    __syncthreads();
  }
  for (int j = 0; j < 4; ++j) sums[warp][4 * lane + j] = sum[j];
  __syncthreads();
  if (warp > 0 || !inside) return;
  float* const to = p.dtable + id * p.hidden + column;
  float total[4] = {};
  if (p.accumulate) load4(to, total);
  for (int w = 0; w < kWarps; ++w) {
    for (int j = 0; j < 4; ++j) total[j] += sums[w][4 * lane + j];
  }
  store4(to, total);
}

}  // namespace

void embed(const EmbedArgs& args) {
  launch(embed_kernel, blocks_for(args.tokens * (args.hidden / 4), kThreads), kThreads, 0,
         args.stream, args.ids, args.table, args.x, args.tokens, args.hidden);
}

void embed_backward(const EmbedBackwardArgs& args) {
  const dim3 blocks(static_cast<unsigned>(args.vocabulary), blocks_for(args.hidden, kColumns));
  launch(embed_backward_kernel, blocks, kThreads, 0, args.stream,
         Back{args.ids, args.dx, args.dtable, args.tokens, args.hidden, args.accumulate});
}

}  // namespace switchyard::models::gpu

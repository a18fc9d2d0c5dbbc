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

constexpr int kIds = 64;         // of a block where there are many
constexpr int kFewIds = 2048;    // a block each
constexpr int kRows = 8;         // that a warp asks for at once
constexpr int kOwners = kWarps;  // of an id: the warp of its last three bits

/// Block (64 ids, columns). The tokens of these ids are listed in ascending order, chunk by chunk;
/// each warp walks along the list and adds up the rows of its own ids, so that an id's rows are
/// added in order and by one warp.
__global__ void __launch_bounds__(kThreads)
    embed_backward_ids_kernel(Back p, std::int64_t num_ids) {
  __shared__ std::int32_t list[kChunk];  // token of the chunk * kIds + id of the block
  static_assert(kIds % kOwners == 0);
  __shared__ std::int32_t counts[kWarps];
  __shared__ float sums[kIds][kColumns];
  const std::int64_t first_id = std::int64_t{blockIdx.x} * kIds;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t column = std::int64_t{blockIdx.y} * kColumns + 4 * lane;
  const bool inside = column < p.hidden;
  for (int id = warp; id < kIds; id += kOwners) {
    float before[4] = {};
    if (p.accumulate && inside && first_id + id < num_ids) {
      load4(p.dtable + (first_id + id) * p.hidden + column, before);
    }
    store4(&sums[id][4 * lane], before);
  }
  constexpr int kStretch = kChunk / kWarps;
  for (std::int64_t chunk = 0; chunk < p.tokens; chunk += kChunk) {
    std::int32_t id[kStretch / 32];
    std::uint32_t found[kStretch / 32];
    int count = 0;
#pragma unroll
    for (int i = 0; i < kStretch / 32; ++i) {
      const std::int64_t t = chunk + warp * kStretch + i * 32 + lane;
      id[i] = t < p.tokens ? static_cast<std::int32_t>(p.ids[t] - first_id) : -1;
    }
#pragma unroll
    for (int i = 0; i < kStretch / 32; ++i) {
      found[i] = __ballot_sync(0xffffffffU, id[i] >= 0 && id[i] < kIds);
      count += __popc(found[i]);
    }
    if (lane == 0) counts[warp] = count;
    __syncthreads();
    int place = 0, all = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      place += w < warp ? counts[w] : 0;
      all += counts[w];
    }
#pragma unroll
    for (int i = 0; i < kStretch / 32; ++i) {
      if ((found[i] >> lane & 1U) != 0) {
        const std::uint32_t before = found[i] & ((1U << lane) - 1U);
        list[place + __popc(before)] = (warp * kStretch + i * 32 + lane) * kIds + id[i];
      }
      place += __popc(found[i]);
    }
    __syncthreads();
    for (int begin = 0; begin < all; begin += 32) {
      const std::int32_t mine = begin + lane < all ? list[begin + lane] : -1;
      std::uint32_t own = __ballot_sync(0xffffffffU, mine >= 0 && mine % kOwners == warp);
      while (own != 0) {
        int of[kRows];
        float row[kRows][4];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          of[r] = -1;
          if (own == 0) continue;
          const std::int32_t entry =
              __shfl_sync(0xffffffffU, mine, __ffs(static_cast<int>(own)) - 1);
          own &= own - 1;
          of[r] = entry % kIds;
          if (inside) load4(p.dx + (chunk + entry / kIds) * p.hidden + column, row[r]);
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (of[r] < 0 || !inside) continue;
          float sum[4];
          load4(&sums[of[r]][4 * lane], sum);
          for (int j = 0; j < 4; ++j) sum[j] += row[r][j];
          store4(&sums[of[r]][4 * lane], sum);
        }
      }
    }
    __syncthreads();
  }
  for (int id = warp; id < kIds && inside; id += kOwners) {
    if (first_id + id >= num_ids) break;
    float sum[4];
    load4(&sums[id][4 * lane], sum);
    store4(p.dtable + (first_id + id) * p.hidden + column, sum);
  }
}

}  // namespace

void embed(const EmbedArgs& args) {
  launch(embed_kernel, blocks_for(args.tokens * (args.hidden / 4), kThreads), kThreads, 0,
         args.stream, args.ids, args.table, args.x, args.tokens, args.hidden);
}

void embed_backward(const EmbedBackwardArgs& args) {
  const Back back{args.ids, args.dx, args.dtable, args.tokens, args.hidden, args.accumulate};
  const unsigned of_columns = blocks_for(args.hidden, kColumns);
  if (args.vocabulary <= kFewIds) {
    launch(embed_backward_kernel, dim3(static_cast<unsigned>(args.vocabulary), of_columns),
           kThreads, 0, args.stream, back);
  } else {
    launch(embed_backward_ids_kernel, dim3(blocks_for(args.vocabulary, kIds), of_columns), kThreads,
           0, args.stream, back, args.vocabulary);
  }
}

}  // namespace switchyard::models::gpu

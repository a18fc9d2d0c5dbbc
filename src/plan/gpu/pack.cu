// Pack on a GPU: each token's row goes to all rows of the layout that want it, so x is read once;
// padding becomes 0. Bound by memory. A warp takes a piece of a token: 16 bytes a lane at a time.
// The last token goes first: what the kernel before wrote last may still be in the L2 cache, and
// the rows of the first tokens stay there for a combine that begins with them.
#include <algorithm>

#include "core/gpu/cuda_device.hpp"
#include "plan/implementations.hpp"

namespace switchyard {
namespace {

constexpr int kThreads = 256;
constexpr int kChunks = 4;  // of 16 bytes in flight a lane
constexpr unsigned kAll = 0xffffffffU;

struct PackParams {
  const int4* x;                     // [N, chunks]
  int4* rows;                        // [rows, chunks]
  const std::int32_t* expert_begin;  // [El+1]
  const std::int32_t* row_token;     // [rows]
  const std::int32_t* token_begin;   // [N+1]
  const std::int32_t* token_row;     // [N*K]
  std::int32_t num_tokens, num_experts, max_rows;
  std::int32_t chunks;  // of 16 bytes a row
  std::int32_t pieces;  // of a row: 32 * kChunks chunks each
};

__device__ __forceinline__ void copy_piece(const PackParams& p, std::int64_t task, int lane) {
  const int token = p.num_tokens - 1 - static_cast<int>(task / p.pieces);
  const int first = static_cast<int>(task % p.pieces) * 32 * kChunks + lane;
  const int begin = __ldg(p.token_begin + token);
  const int end = __ldg(p.token_begin + token + 1);
  if (begin == end) return;
  int4 value[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (first + 32 * c < p.chunks) {
      value[c] = __ldcs(p.x + std::int64_t{token} * p.chunks + first + 32 * c);
    }
  }
  for (int base = begin; base < end; base += 32) {
    const int mine = base + lane < end ? __ldg(p.token_row + base + lane) : 0;
    const int count = min(32, end - base);
    for (int i = 0; i < count; ++i) {
      const std::int64_t row = __shfl_sync(kAll, mine, i);
      if (row >= p.max_rows) continue;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (first + 32 * c < p.chunks) p.rows[row * p.chunks + first + 32 * c] = value[c];
      }
    }
  }
}

/// Zeros the padding among 32 rows of the layout.
__device__ __forceinline__ void clear_padding(const PackParams& p, int first, int end, int lane) {
  const bool padding = first + lane < end && __ldg(p.row_token + first + lane) < 0;
  unsigned rows = __ballot_sync(kAll, padding);
  while (rows != 0) {
    const std::int64_t row = first + __ffs(static_cast<int>(rows)) - 1;
    rows &= rows - 1;
    for (int c = lane; c < p.chunks; c += 32) p.rows[row * p.chunks + c] = make_int4(0, 0, 0, 0);
  }
}

__global__ void __launch_bounds__(kThreads) pack_kernel(const PackParams p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const int warps = static_cast<int>(gridDim.x * blockDim.x) / 32;
  const std::int64_t tasks = std::int64_t{p.num_tokens} * p.pieces;
  for (std::int64_t task = warp; task < tasks; task += warps) copy_piece(p, task, lane);
  const int rows = min(__ldg(p.expert_begin + p.num_experts), p.max_rows);
  for (std::int64_t first = std::int64_t{warp} * 32; first < rows;
       first += std::int64_t{warps} * 32) {
    clear_padding(p, static_cast<int>(first), rows, lane);
  }
}

std::optional<std::string> reject(const PackArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  if (args.x.row_bytes() % 16 != 0) return "rows are not multiples of 16 bytes";
  if (!is_aligned_16(args.x.data) || !is_aligned_16(args.rows.data)) {
    return "x or rows are not aligned to 16 bytes";
  }
  return std::nullopt;
}

void run(const PackArgs& args) {
  const PlanView& plan = args.plan;
  if (args.x.cols == 0 || (args.x.rows == 0 && args.rows.rows == 0)) return;
  const auto chunks = static_cast<std::int32_t>(args.x.row_bytes() / 16);
  const std::int32_t pieces = (chunks + 32 * kChunks - 1) / (32 * kChunks);
  const PackParams params{.x = reinterpret_cast<const int4*>(args.x.data),
                          .rows = reinterpret_cast<int4*>(args.rows.data),
                          .expert_begin = plan.expert_begin.data,
                          .row_token = plan.row_token.data,
                          .token_begin = plan.token_begin.data,
                          .token_row = plan.token_row.data,
                          .num_tokens = static_cast<std::int32_t>(args.x.rows),
                          .num_experts = plan.num_experts,
                          .max_rows = static_cast<std::int32_t>(args.rows.rows),
                          .chunks = chunks,
                          .pieces = pieces};
  const std::int64_t warps =
      std::max(args.x.rows * std::int64_t{pieces}, (args.rows.rows + 31) / 32);
  const std::int64_t wanted = (warps * 32 + kThreads - 1) / kThreads;
  // A task a warp, in order, as far as that is possible.
  const auto blocks = static_cast<unsigned>(std::clamp<std::int64_t>(wanted, 1, 1 << 20));
  pack_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(args.execution.stream)>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace

const Implementation<PackArgs> kPackCuda{"cuda.copy", reject, run};

}  // namespace switchyard

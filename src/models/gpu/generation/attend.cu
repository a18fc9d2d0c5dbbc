// Attention of a few rows over a cache as a kernel: a block an item or a stretch of it.
#include "models/gpu/generation/attend_rows.cuh"

#include <algorithm>

namespace switchyard::models::gpu {
namespace {

constexpr int kWarps = 8;

template <typename T, int kLanes, int kGroup>
__global__ void __launch_bounds__(32 * kWarps) attend_kernel(AttendArgs p) {
  using Block = AttendBlock<T, kLanes, kGroup, kWarps>;
  extern __shared__ int4 room[];
  if (!p.cache_is_older) ptx::start_after_previous_kernel();
  Block block(p, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y),
              *reinterpret_cast<typename Block::Room*>(room));
  if (p.cache_is_older) {
    block.ask_first(kAttendAhead);
    ptx::start_after_previous_kernel();
  }
  block.run();
}

template <typename T, int kLanes, int kGroup>
void launch_blocks(const AttendArgs& args, std::int64_t items) {
  const auto kernel = attend_kernel<T, kLanes, kGroup>;
  const std::size_t bytes = sizeof(AttendRoom<T, kLanes, kGroup, kWarps>);
  if (bytes > (48U << 10U)) allow_most_shared_memory(reinterpret_cast<const void*>(kernel));
  const dim3 blocks(static_cast<unsigned>(items), static_cast<unsigned>(args.splits));
  if (args.cache_is_older) {
    launch_dependent(true, kernel, blocks, 32 * kWarps, bytes, args.stream, args);
  } else {
    launch_overlapped(kernel, blocks, 32 * kWarps, bytes, args.stream, args);
  }
}

template <typename T, int kLanes>
void launch_lanes(const AttendArgs& args) {
  const std::int64_t of_kv = args.heads / args.kv_heads, heads = args.rows * args.kv_heads;
  if (of_kv == 1) return launch_blocks<T, kLanes, 1>(args, heads);
  launch_blocks<T, kLanes, 4>(args, heads * ((of_kv + 3) / 4));
}

}  // namespace

std::int64_t cache_row(std::int64_t head_dim, bool bf16) {
  const std::int64_t pack = bf16 ? 8 : 4;
  return (head_dim + pack - 1) / pack * pack;
}

std::int32_t attend_splits(std::int64_t rows, std::int32_t heads, std::int32_t kv_heads,
                           std::int64_t capacity) {
  if (rows > kFewRows) return 1;
  constexpr std::int64_t kFewest = 64;  // positions that are worth a block
  const std::int64_t of_kv = heads / kv_heads;
  const std::int64_t items = rows * kv_heads * (of_kv == 1 ? 1 : (of_kv + 3) / 4);
  const std::int64_t most = std::min<std::int64_t>(16, (capacity + kFewest - 1) / kFewest);
  return static_cast<std::int32_t>(
      std::clamp<std::int64_t>(2 * num_multiprocessors() / items, 1, most));
}

void attend(const AttendArgs& args) {
  const std::int64_t row = cache_row(args.head_dim, args.bf16);
  if (args.bf16) {
    if (row <= 32) return launch_lanes<Bf16, 4>(args);
    if (row <= 64) return launch_lanes<Bf16, 8>(args);
    return launch_lanes<Bf16, 16>(args);
  }
  if (row <= 32) return launch_lanes<float, 8>(args);
  if (row <= 64) return launch_lanes<float, 16>(args);
  launch_lanes<float, 32>(args);
}

}  // namespace switchyard::models::gpu

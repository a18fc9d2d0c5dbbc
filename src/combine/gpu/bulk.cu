// Combine of tokens with at most two rows of several KB, on Hopper. Bound by memory: a warp takes a
// token (or a piece of it) at a time: bulk copies bring its rows to shared memory, the lanes add
// them up in place, and a bulk copy takes the sum out. So rows cross the multiprocessor in whole
// lines, and the registers hold nothing that is under way.
#include "combine/gpu/bulk.hpp"

#include "combine/gpu/call.hpp"
#include "combine/implementations.hpp"
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/pack16.cuh"
#include "core/gpu/ptx.cuh"
#include "core/tree_width.hpp"

namespace switchyard {
namespace {

constexpr int kWarps = 14;
constexpr int kThreads = 32 * kWarps;
constexpr int kRowBytes = 4096;  // of a piece, at most
constexpr int kSlotBytes = 2 * kRowBytes;
constexpr int kSlots = 2;  // of a warp
constexpr int kBarriersAt = kWarps * kSlots * kSlotBytes;
constexpr int kSharedBytes = kBarriersAt + kWarps * kSlots * 8;

struct BulkParams {
  const std::byte* rows;             // [rows, row_bytes]
  std::byte* sums;                   // [N, row_bytes]
  const std::int32_t* expert_begin;  // [El+1]
  const float* row_weight;           // [rows]
  const std::int32_t* token_begin;   // [N+1]
  const std::int32_t* token_row;     // [2N]
  std::int32_t num_tokens, row_bytes;
  std::int32_t pieces, piece_bytes;  // of a row: set by the launch
  std::int32_t num_groups, width;
  std::int32_t border[combining::kMaxGroups];  // local expert at which group g + 1 begins
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

constexpr unsigned kAll = 0xffffffffU;

/// A token's rows and weights, in one lane's registers.
struct RowsOfToken {
  std::int32_t row[2];
  float weight[2];
  std::int32_t count;   // 0 to 2
  std::int32_t leaves;  // groups that these are of

  /// What the copies need; the rest comes while they are under way. Plain loads: the kernel before
  /// may write what they read.
  __device__ __forceinline__ void load_rows(const BulkParams& p, std::int64_t token) {
    const std::int32_t begin = p.token_begin[token];
    count = p.token_begin[token + 1] - begin;
#pragma unroll
    for (int i = 0; i < 2; ++i) row[i] = i < count ? p.token_row[begin + i] : 0;
  }
  __device__ __forceinline__ void load_weights(const BulkParams& p, const std::int32_t* borders) {
    leaves = count > 0 ? 1 : 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) weight[i] = i < count ? p.row_weight[row[i]] : 0.0F;
    if (count < 2) return;
    for (int g = 0; g < p.num_groups - 1; ++g) {
      if ((row[0] >= borders[g]) != (row[1] >= borders[g])) leaves = 2;
    }
  }
};

/// Sixteen bytes of both rows become those of the sum: as the tree of combine_cuda.cu adds them.
template <typename T, int kCount>
__device__ __forceinline__ void add_up(std::uint32_t at, const RowsOfToken& rows, float absent) {
  constexpr int kColumns = kPack<T>;
  float sum[kColumns] = {};
  if constexpr (kCount > 0) {
    float first[kColumns];
    unpack16(ptx::load_shared_16(at), first, T{});
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sum[i] = __fmaf_rn(rows.weight[0], first[i], 0.0F);
  }
  if constexpr (kCount == 2) {
    float second[kColumns];
    unpack16(ptx::load_shared_16(at + kRowBytes), second, T{});
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const float before = rows.leaves == 1 ? sum[i] : 0.0F;
      const float added = __fmaf_rn(rows.weight[1], second[i], before);
      sum[i] = rows.leaves == 1 ? added : __fadd_rn(sum[i], added);
    }
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) sum[i] = __fadd_rn(sum[i], absent);
  ptx::store_shared_16(at, pack16(sum, T{}));
}

template <typename T, int kCount>
__device__ __forceinline__ void add_up_piece(std::uint32_t slot, int bytes, const RowsOfToken& rows,
                                             float absent) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 4
  for (int at = lane * 16; at < bytes; at += 512) {
    add_up<T, kCount>(slot + static_cast<std::uint32_t>(at), rows, absent);
  }
}

/// One warp: items first, first + step, ... of (token, piece). Lane i knows the rows of the i-th of
/// 32 items. One slot is filled while the lanes add up what lies in the other.
template <typename T>
class BulkWarp {
 public:
  __device__ BulkWarp(const BulkParams& p, const std::int32_t* borders, std::uint32_t slots,
                      std::uint32_t barriers)
      : p_(p),
        borders_(borders),
        slots_(slots),
        barriers_(barriers),
        items_(std::int64_t{p.num_tokens} * p.pieces),
        step_(std::int64_t{kWarps} * gridDim.x),
        // Neighbouring items lie on different multiprocessors.
        first_(std::int64_t{threadIdx.x / 32} * gridDim.x + blockIdx.x) {}

  __device__ __forceinline__ void run() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (std::int64_t base = 0; first_ + base * step_ < items_; base += 32) {
      const std::int64_t ahead = first_ + (base + lane) * step_;
      RowsOfToken mine{};
      if (ahead < items_) mine.load_rows(p_, ahead / p_.pieces);
      __syncwarp();
      const auto here =
          static_cast<int>(min(std::int64_t{32}, (items_ - first_ + step_ - 1) / step_ - base));
      ask(mine, base, 0);
      mine.load_weights(p_, borders_);
      __syncwarp();
      for (int n = 0; n < here; ++n) {
        // Also: the last sum has left the other slot.
        if (n + 1 < here) ask(mine, base, n + 1);
        add_up_item(mine, base, n);
      }
      if (lane == 0) ptx::bulk_wait_read<0>();
      __syncwarp();
    }
    if (lane == 0) ptx::bulk_wait<0>();
  }

 private:
  struct Place {
    std::int64_t token;
    int offset, bytes;
  };
  [[nodiscard]] __device__ __forceinline__ Place place_of(std::int64_t n) const {
    const std::int64_t item = first_ + n * step_;
    const std::int64_t token = item / p_.pieces;
    const auto offset = static_cast<int>(item - token * p_.pieces) * p_.piece_bytes;
    return {token, offset, min(p_.piece_bytes, p_.row_bytes - offset)};
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t slot(int n) const {
    return slots_ + static_cast<std::uint32_t>(n % kSlots * kSlotBytes);
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t full(int n) const {
    return barriers_ + static_cast<std::uint32_t>(n % kSlots * 8);
  }

  /// Copies of item base + n's rows begin. A slot that is not filled counts as a phase too.
  __device__ __forceinline__ void ask(const RowsOfToken& mine, std::int64_t base, int n) {
    const int count = __shfl_sync(kAll, mine.count, n);
    const int row[2] = {__shfl_sync(kAll, mine.row[0], n), __shfl_sync(kAll, mine.row[1], n)};
    if (threadIdx.x % 32 == 0) {
      const Place place = place_of(base + n);
      if (n > 0) ptx::bulk_wait_read<0>();
      ptx::mbarrier_arrive_expect(full(n), static_cast<std::uint32_t>(count * place.bytes));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i >= count) continue;
        ptx::bulk_load(slot(n) + static_cast<std::uint32_t>(i * kRowBytes),
                       p_.rows + std::int64_t{row[i]} * p_.row_bytes + place.offset,
                       static_cast<std::uint32_t>(place.bytes), full(n));
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void add_up_item(const RowsOfToken& mine, std::int64_t base, int n) {
    const RowsOfToken rows{
        {0, 0},
        {__shfl_sync(kAll, mine.weight[0], n), __shfl_sync(kAll, mine.weight[1], n)},
        __shfl_sync(kAll, mine.count, n),
        __shfl_sync(kAll, mine.leaves, n)};
    const Place place = place_of(base + n);
    ptx::mbarrier_wait(full(n), phases_ >> (n % kSlots) & 1);
    phases_ ^= 1U << (n % kSlots);
    // -0 leaves every sum as it is.
    const float absent = rows.leaves == p_.width || rows.count == 0 ? -0.0F : 0.0F;
    if (rows.count == 2) {
      add_up_piece<T, 2>(slot(n), place.bytes, rows, absent);
    } else if (rows.count == 1) {
      add_up_piece<T, 1>(slot(n), place.bytes, rows, absent);
    } else {
      add_up_piece<T, 0>(slot(n), place.bytes, rows, absent);
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      ptx::bulk_store(p_.sums + place.token * p_.row_bytes + place.offset, slot(n),
                      static_cast<std::uint32_t>(place.bytes));
      ptx::bulk_commit();
    }
  }

  const BulkParams& p_;
  const std::int32_t* borders_;
  std::uint32_t slots_;
  std::uint32_t barriers_;
  std::int64_t items_;
  std::int64_t step_;
  std::int64_t first_;
  std::uint32_t phases_ = 0;  // a bit for each slot
};

#endif

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    combine_bulk_kernel(const __grid_constant__ BulkParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ std::int32_t borders[combining::kMaxGroups];
  const auto warp = threadIdx.x / 32;
  const std::uint32_t base = ptx::shared_address(shared);
  const std::uint32_t barriers = base + kBarriersAt + warp * kSlots * 8;
  if (threadIdx.x % 32 == 0) {
    for (std::uint32_t i = 0; i < kSlots; ++i) ptx::mbarrier_init(barriers + 8 * i, 1);
    ptx::fence_mbarrier_init();
  }
  ptx::start_after_previous_kernel();
  if (static_cast<int>(threadIdx.x) < p.num_groups - 1) {
    borders[threadIdx.x] = p.expert_begin[p.border[threadIdx.x]];
  }
  __syncthreads();
  BulkWarp<T>(p, borders, base + warp * kSlots * kSlotBytes, barriers).run();
#endif
}

template <typename T>
void launch(const BulkParams& params, cudaStream_t stream) {
  const auto kernel = combine_bulk_kernel<T>;
  allow_most_shared_memory(reinterpret_cast<const void*>(kernel));
  launch_overlapped(kernel, static_cast<unsigned>(num_multiprocessors()), kThreads, kSharedBytes,
                    stream, params);
}

std::optional<std::string> reject(const CombineArgs& args) {
  if (auto reason = combining::reject_of_known_rows(args)) return reason;
  if (args.added.data != nullptr) return "adds nothing to the sums";
  if (!takes_bulk({.num_tokens = args.plan.num_tokens(),
                   .rows_per_token = args.plan.most_rows,
                   .row_bytes = args.rows.row_bytes(),
                   .in = args.rows.dtype,
                   .out = args.reduced.sums.dtype,
                   .each_group = args.reduced.each_group,
                   .hopper = device_attribute(cudaDevAttrComputeCapabilityMajor) == 9})) {
    return "only on Hopper, for 4096 or more tokens of at most 2 rows each of 4 KB or more, in the "
           "type of the sums, which are of all groups";
  }
  return std::nullopt;
}

void run(const CombineArgs& args) {
  if (args.rows.cols == 0) return;
  const auto row_bytes = static_cast<std::int32_t>(args.rows.row_bytes());
  BulkParams params{};
  combining::set_call(params, args);
  params.num_tokens = static_cast<std::int32_t>(args.plan.num_tokens());
  params.row_bytes = row_bytes;
  params.pieces = (row_bytes + kRowBytes - 1) / kRowBytes;
  params.width = tree_width(params.num_groups);
  params.piece_bytes = (row_bytes / 16 + params.pieces - 1) / params.pieces * 16;
  combining::find_borders(args, params.border);
  const auto stream = static_cast<cudaStream_t>(args.execution.stream);
  switch (args.rows.dtype) {
    case DType::kBF16: return launch<__nv_bfloat16>(params, stream);
    case DType::kF16: return launch<__half>(params, stream);
    default: return launch<float>(params, stream);
  }
}

}  // namespace

bool takes_bulk(const BulkProblem& problem) {
  return problem.hopper && problem.rows_per_token <= 2 && !problem.each_group &&
         problem.in == problem.out && problem.row_bytes >= kRowBytes &&
         problem.num_tokens >= 4096;  // two for each warp of the chip
}

const Implementation<CombineArgs> kCombineCudaBulk{"cuda.bulk", reject, run};

}  // namespace switchyard

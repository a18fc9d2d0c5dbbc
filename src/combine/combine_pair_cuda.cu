// Combine of tokens with at most two rows of several KB, on Hopper. Bound by memory: a warp takes a
// token (or a piece of it) at a time: bulk copies bring its rows to shared memory, the lanes add
// them up in place, and a bulk copy takes the sum out. So rows cross the multiprocessor in whole
// lines, and the registers hold nothing that is under way.
#include "combine/combine_pair.hpp"
#include "core/cuda_device.hpp"
#include "core/pack16.cuh"
#include "core/ptx.cuh"

namespace switchyard {
namespace {

constexpr int kWarps = 14;
constexpr int kThreads = 32 * kWarps;
constexpr int kRowBytes = 8192;  // of a piece, at most
constexpr int kSlotBytes = 2 * kRowBytes;
constexpr int kBarriersAt = kWarps * kSlotBytes;
constexpr int kSharedBytes = kBarriersAt + kWarps * 8;
constexpr unsigned kAll = 0xffffffffU;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

/// A token's rows and weights, in one lane's registers.
struct PairOfRows {
  std::int32_t row[2];
  float weight[2];
  std::int32_t count;   // 0 to 2
  std::int32_t leaves;  // groups that these are of

  __device__ __forceinline__ void load(const PairParams& p, const std::int32_t* borders,
                                       std::int64_t token) {
    const std::int32_t begin = __ldg(p.token_begin + token);
    count = __ldg(p.token_begin + token + 1) - begin;
    leaves = count > 0 ? 1 : 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      row[i] = i < count ? __ldg(p.token_row + begin + i) : 0;
      weight[i] = i < count ? __ldg(p.row_weight + row[i]) : 0.0F;
    }
    if (count < 2) return;
    for (int g = 0; g < p.num_groups - 1; ++g) {
      if ((row[0] >= borders[g]) != (row[1] >= borders[g])) leaves = 2;
    }
  }
  [[nodiscard]] __device__ __forceinline__ PairOfRows of_lane(int lane) const {
    return {{__shfl_sync(kAll, row[0], lane), __shfl_sync(kAll, row[1], lane)},
            {__shfl_sync(kAll, weight[0], lane), __shfl_sync(kAll, weight[1], lane)},
            __shfl_sync(kAll, count, lane),
            __shfl_sync(kAll, leaves, lane)};
  }
};

/// Sixteen bytes of both rows become those of the sum: as the tree of combine_cuda.cu adds them.
template <typename T, int kCount>
__device__ __forceinline__ void add_up(std::uint32_t at, const PairOfRows& rows, float absent) {
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
__device__ __forceinline__ void add_up_piece(std::uint32_t slot, int bytes, const PairOfRows& rows,
                                             float absent) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 4
  for (int at = lane * 16; at < bytes; at += 512) {
    add_up<T, kCount>(slot + static_cast<std::uint32_t>(at), rows, absent);
  }
}

/// One warp: items warp, warp + warps, ... of (token, piece).
template <typename T>
class PairWarp {
 public:
  __device__ PairWarp(const PairParams& p, const std::int32_t* borders, std::uint32_t slot,
                      std::uint32_t full)
      : p_(p), borders_(borders), slot_(slot), full_(full) {}

  __device__ __forceinline__ void run() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const std::int64_t items = std::int64_t{p_.num_tokens} * p_.pieces;
    const std::int64_t step = std::int64_t{kWarps} * gridDim.x;
    // Neighbouring items lie on different multiprocessors.
    const std::int64_t first = std::int64_t{threadIdx.x / 32} * gridDim.x + blockIdx.x;
    PairOfRows mine{};
    for (std::int64_t item = first, n = 0; item < items; item += step, ++n) {
      if (n % 32 == 0) {
        const std::int64_t ahead = item + lane * step;
        if (ahead < items) mine.load(p_, borders_, ahead / p_.pieces);
        __syncwarp();
      }
      const PairOfRows rows = mine.of_lane(static_cast<int>(n % 32));
      const std::int64_t token = item / p_.pieces;
      const auto offset = static_cast<int>(item - token * p_.pieces) * p_.piece_bytes;
      const int bytes = min(p_.piece_bytes, p_.row_bytes - offset);
      if (lane == 0) {
        ptx::bulk_wait_read<0>();  // the last sum has left
        if (rows.count > 0) {
          ptx::mbarrier_arrive_expect(full_, static_cast<std::uint32_t>(rows.count * bytes));
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (i >= rows.count) continue;
            ptx::bulk_load(slot_ + static_cast<std::uint32_t>(i * kRowBytes),
                           p_.rows + std::int64_t{rows.row[i]} * p_.row_bytes + offset,
                           static_cast<std::uint32_t>(bytes), full_);
          }
        }
      }
      __syncwarp();
      if (rows.count > 0) {
        ptx::mbarrier_wait(full_, phase_);
        phase_ ^= 1;
      }
      // -0 leaves every sum as it is.
      const float absent = rows.leaves == p_.width || rows.count == 0 ? -0.0F : 0.0F;
      if (rows.count == 2) {
        add_up_piece<T, 2>(slot_, bytes, rows, absent);
      } else if (rows.count == 1) {
        add_up_piece<T, 1>(slot_, bytes, rows, absent);
      } else {
        add_up_piece<T, 0>(slot_, bytes, rows, absent);
      }
      ptx::fence_proxy_async();
      __syncwarp();
      if (lane == 0) {
        ptx::bulk_store(p_.sums + token * p_.row_bytes + offset, slot_,
                        static_cast<std::uint32_t>(bytes));
        ptx::bulk_commit();
      }
    }
    if (lane == 0) ptx::bulk_wait<0>();
  }

 private:
  const PairParams& p_;
  const std::int32_t* borders_;
  std::uint32_t slot_;
  std::uint32_t full_;
  std::uint32_t phase_ = 0;
};

#endif

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    combine_pair_kernel(const __grid_constant__ PairParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ std::int32_t borders[PairParams::kMaxGroups];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const std::uint32_t base = ptx::shared_address(shared);
  const std::uint32_t full = base + kBarriersAt + 8 * static_cast<std::uint32_t>(warp);
  if (threadIdx.x % 32 == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::fence_mbarrier_init();
  }
  if (static_cast<int>(threadIdx.x) < p.num_groups - 1) {
    borders[threadIdx.x] = __ldg(p.expert_begin + p.border[threadIdx.x]);
  }
  __syncthreads();
  PairWarp<T>(p, borders, base + static_cast<std::uint32_t>(warp * kSlotBytes), full).run();
#endif
}

template <typename T>
void launch(const PairParams& params, cudaStream_t stream) {
  const auto kernel = combine_pair_kernel<T>;
  allow_most_shared_memory(reinterpret_cast<const void*>(kernel));
  kernel<<<static_cast<unsigned>(num_multiprocessors()), kThreads, kSharedBytes, stream>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace

bool takes_pairs(const PairProblem& problem) {
  return problem.hopper && problem.rows_per_token <= 2 && !problem.each_group &&
         problem.in == problem.out && problem.row_bytes >= kRowBytes / 2 &&
         problem.num_tokens >= 4096;  // two for each warp of the chip
}

void launch_combine_pairs(PairParams params, DType dtype, cudaStream_t stream) {
  params.pieces = (params.row_bytes + kRowBytes - 1) / kRowBytes;
  params.piece_bytes = (params.row_bytes / 16 + params.pieces - 1) / params.pieces * 16;
  switch (dtype) {
    case DType::kBF16: return launch<__nv_bfloat16>(params, stream);
    case DType::kF16: return launch<__half>(params, stream);
    default: return launch<float>(params, stream);
  }
}

}  // namespace switchyard

// Router logits on tensor cores. 16-bit tokens and gate are multiplied exactly and summed in fp32;
// f32 operands are split into two TF32 terms each, so that about 2^-22 of a product is lost.
//
// H is cut into chunks of kChunk columns, and a logit is the sum of the chunks' sums in order. That
// is all a token's bits depend on: neither on the tile nor on whether one block walks over all
// chunks (many tokens; bound by the tensor cores and the second cache level) or a block takes each
// chunk and the last one of a tile adds them up (few tokens; bound by reading the gate).
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "core/gpu/cuda_device.hpp"
#include "core/gpu/ptx.cuh"
#include "core/gpu/stage_workspace.hpp"
#include "core/shape_check.hpp"
#include "route/implementations.hpp"

namespace switchyard {
namespace {

constexpr int kChunk = 256;
constexpr int kDepth = 64;  // columns of a stage
constexpr int kSteps = kChunk / kDepth;
constexpr int kThreads = 256;

struct RouterGemmParams {
  const void* tokens;      // [T, H]
  const void* gate;        // [E, H]
  const float* bias;       // [E] or null
  float* logits;           // [T, E]
  float* parts;            // [chunks, tiles, kRows * kCols]: one chunk a block; else null
  std::uint32_t* arrived;  // [tiles]
  std::int32_t num_tokens, num_experts, hidden, chunks;
};

/// kRows tokens by kCols experts; eight warps, kWarpRows of them along the tokens.
template <int kRows_, int kCols_, int kWarpRows_>
struct Tile {
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;
  static constexpr int kWarpRows = kWarpRows_;
  static constexpr int kMmaRows = kRows / kWarpRows / 16;  // of a warp
  static constexpr int kMmaCols = kCols / (8 / kWarpRows) / 8;
};

/// Rows of a stage in shared memory are padded so that fragments meet no bank twice.
template <typename T>
constexpr int kRowBytes = kDepth* static_cast<int>(sizeof(T)) + (sizeof(T) == 4 ? 32 : 16);

template <typename Token, typename Gate, typename Tile>
constexpr int kStageBytes = Tile::kRows* kRowBytes<Token> + Tile::kCols* kRowBytes<Gate>;

template <typename Token, typename Gate>
constexpr int kStages = sizeof(Token) + sizeof(Gate) == 4 ? 4 : 2;

/// Copies columns [column, column + kDepth) of rows [first, first + count) of [rows, H].
template <typename T>
__device__ __forceinline__ void load_stage(const void* matrix, int rows, int hidden, int first,
                                           int count, int column, std::uint32_t to) {
  constexpr int kPerRow = kDepth * static_cast<int>(sizeof(T)) / 16;
  constexpr int kElements = 16 / static_cast<int>(sizeof(T));
  const T* const data = static_cast<const T*>(matrix);
  for (int i = static_cast<int>(threadIdx.x); i < count * kPerRow; i += kThreads) {
    const int row = i / kPerRow;
    const int piece = i % kPerRow;
    const int at = column + piece * kElements;
    const bool inside = first + row < rows && at < hidden;
    const T* const from = data + (inside ? std::int64_t{first + row} * hidden + at : 0);
    ptx::cp_async_16(to + static_cast<std::uint32_t>(row * kRowBytes<T> + piece * 16), from,
                     inside ? 16U : 0U);
  }
}

__device__ __forceinline__ void mma_tf32(float (&d)[4], const float (&a)[4], float b0, float b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
        "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

__device__ __forceinline__ float round_tf32(float x) {
  std::uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return __uint_as_float(y);
}

/// Two neighbours of a row in shared memory as floats.
template <typename T>
__device__ __forceinline__ float2 load_pair(const std::byte* at) {
  if constexpr (std::is_same_v<T, float>) {
    return *reinterpret_cast<const float2*>(at);
  } else if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(at));
  } else {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(at));
  }
}

/// A value as the sum of TF32 terms; 16-bit values are one.
template <typename T, int kCount>
struct Terms {
  static constexpr bool kSplit = std::is_same_v<T, float>;
  float high[kCount];
  float low[kCount];
  __device__ __forceinline__ void set(int i, float x) {
    high[i] = kSplit ? round_tf32(x) : x;
    low[i] = kSplit ? round_tf32(x - high[i]) : 0.0F;
  }
};

/// Multiplies one stage: `a` is [kRows, kDepth] and `b` [kCols, kDepth] of this warp.
template <typename Token, typename Gate, typename Tile>
__device__ __forceinline__ void multiply_split(const std::byte* a, const std::byte* b,
                                               float (&acc)[Tile::kMmaRows][Tile::kMmaCols][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = lane / 4;
  const int pair = lane % 4 * 2;  // the order of columns inside an mma does not matter
#pragma unroll
  for (int k = 0; k < kDepth; k += 8) {
    Terms<Gate, 2> gate[Tile::kMmaCols];
#pragma unroll
    for (int n = 0; n < Tile::kMmaCols; ++n) {
      const float2 x = load_pair<Gate>(b + (n * 8 + row) * kRowBytes<Gate> +
                                       (k + pair) * static_cast<int>(sizeof(Gate)));
      gate[n].set(0, x.x), gate[n].set(1, x.y);
    }
#pragma unroll
    for (int m = 0; m < Tile::kMmaRows; ++m) {
      const std::byte* const at =
          a + (m * 16 + row) * kRowBytes<Token> + (k + pair) * static_cast<int>(sizeof(Token));
      const float2 upper = load_pair<Token>(at);
      const float2 lower = load_pair<Token>(at + 8 * kRowBytes<Token>);
      Terms<Token, 4> token;
      token.set(0, upper.x), token.set(1, lower.x), token.set(2, upper.y), token.set(3, lower.y);
#pragma unroll
      for (int n = 0; n < Tile::kMmaCols; ++n) {
        if constexpr (Terms<Token, 4>::kSplit) {
          mma_tf32(acc[m][n], token.low, gate[n].high[0], gate[n].high[1]);
        }
        if constexpr (Terms<Gate, 2>::kSplit) {
          mma_tf32(acc[m][n], token.high, gate[n].low[0], gate[n].low[1]);
        }
        mma_tf32(acc[m][n], token.high, gate[n].high[0], gate[n].high[1]);
      }
    }
  }
}

/// The same for 16-bit tokens and gate of one type.
template <typename T, typename Tile>
__device__ __forceinline__ void multiply_exact(const std::byte* a, const std::byte* b,
                                               float (&acc)[Tile::kMmaRows][Tile::kMmaCols][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::uint32_t a_at = ptx::shared_address(a) +
                             static_cast<std::uint32_t>(lane % 16 * kRowBytes<T> + lane / 16 * 16);
  const int row = lane / 4;
  const int pair = lane % 4 * 4;  // bytes
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) {
    std::uint32_t gate[Tile::kMmaCols][2];
#pragma unroll
    for (int n = 0; n < Tile::kMmaCols; ++n) {
      const std::byte* const at = b + (n * 8 + row) * kRowBytes<T> + k * 2 + pair;
      gate[n][0] = *reinterpret_cast<const std::uint32_t*>(at);
      gate[n][1] = *reinterpret_cast<const std::uint32_t*>(at + 16);
    }
#pragma unroll
    for (int m = 0; m < Tile::kMmaRows; ++m) {
      std::uint32_t token[4];
      ptx::ldmatrix_x4(token, a_at + static_cast<std::uint32_t>(m * 16 * kRowBytes<T> + k * 2));
#pragma unroll
      for (int n = 0; n < Tile::kMmaCols; ++n) {
        if constexpr (std::is_same_v<T, __half>) {
          ptx::mma_f16(acc[m][n], token, gate[n][0], gate[n][1]);
        } else {
          ptx::mma_bf16(acc[m][n], token, gate[n][0], gate[n][1]);
        }
      }
    }
  }
}

/// The last block of a tile to come here adds the chunks in order; [kRows, kCols] each.
template <typename Tile>
__device__ __forceinline__ void add_parts(const RouterGemmParams& p, int tile, int tiles,
                                          int first_token, int first_expert) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(p.arrived + tile, 1U) == static_cast<unsigned>(p.chunks) - 1;
    if (last) p.arrived[tile] = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  constexpr int kSize = Tile::kRows * Tile::kCols;
  for (int i = static_cast<int>(threadIdx.x) * 4; i < kSize; i += kThreads * 4) {
    const int token = first_token + i / Tile::kCols;
    const int expert = first_expert + i % Tile::kCols;
    if (token >= p.num_tokens || expert >= p.num_experts) continue;
    float sum[4] = {};
#pragma unroll 8
    for (int c = 0; c < p.chunks; ++c) {
      const float4 part = __ldcg(
          reinterpret_cast<const float4*>(p.parts + (std::int64_t{c} * tiles + tile) * kSize + i));
      sum[0] = __fadd_rn(sum[0], part.x), sum[1] = __fadd_rn(sum[1], part.y);
      sum[2] = __fadd_rn(sum[2], part.z), sum[3] = __fadd_rn(sum[3], part.w);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (expert + j >= p.num_experts) break;
      const float bias = p.bias != nullptr ? __ldg(p.bias + expert + j) : 0.0F;
      p.logits[std::int64_t{token} * p.num_experts + expert + j] =
          p.bias != nullptr ? __fadd_rn(sum[j], bias) : sum[j];
    }
  }
}

template <typename Token, typename Gate, typename Tile>
__global__ void __launch_bounds__(kThreads) router_gemm_kernel(const RouterGemmParams p) {
  extern __shared__ __align__(128) std::byte shared[];
  constexpr int kDeep = kStages<Token, Gate>;
  constexpr int kBytes = kStageBytes<Token, Gate, Tile>;
  constexpr int kColsPerWarp = Tile::kMmaCols * 8;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_row = warp % Tile::kWarpRows * Tile::kMmaRows * 16;
  const int warp_col = warp / Tile::kWarpRows * kColsPerWarp;
  const int first_token = static_cast<int>(blockIdx.x) * Tile::kRows;
  const int first_expert = static_cast<int>(blockIdx.y) * Tile::kCols;
  const bool split = p.parts != nullptr;
  const int begin = split ? static_cast<int>(blockIdx.z) * kSteps : 0;
  const int end = min((p.hidden + kDepth - 1) / kDepth, split ? begin + kSteps : 0x7fffffff);

  const auto stage_of = [&](int step) {
    return ptx::shared_address(shared) + static_cast<std::uint32_t>(step % kDeep * kBytes);
  };
  const auto load_tokens = [&](int step) {
    if (step < end) {
      load_stage<Token>(p.tokens, p.num_tokens, p.hidden, first_token, Tile::kRows, step * kDepth,
                        stage_of(step));
    }
    ptx::cp_async_commit();
  };
  const auto load_gate = [&](int step) {
    if (step >= end) return;
    load_stage<Gate>(p.gate, p.num_experts, p.hidden, first_expert, Tile::kCols, step * kDepth,
                     stage_of(step) + static_cast<std::uint32_t>(Tile::kRows * kRowBytes<Token>));
  };

  float acc[Tile::kMmaRows][Tile::kMmaCols][4] = {};
  float total[Tile::kMmaRows][Tile::kMmaCols][4] = {};
  const auto close_chunk = [&] {
#pragma unroll
    for (int m = 0; m < Tile::kMmaRows; ++m) {
#pragma unroll
      for (int n = 0; n < Tile::kMmaCols; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          total[m][n][i] = __fadd_rn(total[m][n][i], acc[m][n][i]);
          acc[m][n][i] = 0.0F;
        }
      }
    }
  };

  // The gate is older than the previous kernel.
  for (int step = begin; step < begin + kDeep - 1; ++step) load_gate(step);
  ptx::start_after_previous_kernel();
  for (int step = begin; step < begin + kDeep - 1; ++step) load_tokens(step);
  for (int step = begin; step < end; ++step) {
    ptx::cp_async_wait<kDeep - 2>();
    __syncthreads();
    load_gate(step + kDeep - 1);
    load_tokens(step + kDeep - 1);
    const std::byte* const stage = shared + step % kDeep * kBytes;
    const std::byte* const a = stage + warp_row * kRowBytes<Token>;
    const std::byte* const b = stage + Tile::kRows * kRowBytes<Token> + warp_col * kRowBytes<Gate>;
    if constexpr (std::is_same_v<Token, Gate> && sizeof(Token) == 2) {
      multiply_exact<Token, Tile>(a, b, acc);
    } else {
      multiply_split<Token, Gate, Tile>(a, b, acc);
    }
    if ((step + 1) % kSteps == 0 || step + 1 == end) close_chunk();
  }
  ptx::cp_async_wait<0>();

  const int tiles = static_cast<int>(gridDim.x * gridDim.y);
  const int tile = static_cast<int>(blockIdx.y * gridDim.x + blockIdx.x);
  float* const part = split
                          ? p.parts + (std::int64_t{static_cast<int>(blockIdx.z)} * tiles + tile) *
                                          (Tile::kRows * Tile::kCols)
                          : nullptr;
#pragma unroll
  for (int m = 0; m < Tile::kMmaRows; ++m) {
#pragma unroll
    for (int n = 0; n < Tile::kMmaCols; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = warp_row + m * 16 + lane / 4 + i / 2 * 8;
        const int col = warp_col + n * 8 + lane % 4 * 2 + i % 2;
        if (split) {
          part[row * Tile::kCols + col] = total[m][n][i];
        } else if (first_token + row < p.num_tokens && first_expert + col < p.num_experts) {
          const float sum = total[m][n][i];
          p.logits[std::int64_t{first_token + row} * p.num_experts + first_expert + col] =
              p.bias != nullptr ? __fadd_rn(sum, __ldg(p.bias + first_expert + col)) : sum;
        }
      }
    }
  }
  if (split) add_parts<Tile>(p, tile, tiles, first_token, first_expert);
}

using Few = Tile<16, 64, 1>;
using Some = Tile<64, 64, 4>;
using Many = Tile<128, 128, 2>;

/// What the choice of a launch depends on, of the device.
struct Chip {
  int multiprocessors = num_multiprocessors();
  /// The widest operands take 144 KB of the large tile.
  bool large_tiles = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) >= 160 * 1024;
};

struct Launch {
  int rows, cols;
  bool split;
  std::int64_t tiles, chunks;
  bool gate_is_fresh = false;
  [[nodiscard]] std::int64_t part_bytes() const {
    return split ? 4 * chunks * tiles * rows * cols : 0;
  }
};

/// A tile that fills the device, one block a chunk where it cannot.
Launch launch_for(std::int64_t num_tokens, std::int64_t num_experts, std::int64_t hidden,
                  const Chip& chip) {
  const auto tiles = [&](int rows, int cols) {
    return (num_tokens + rows - 1) / rows * ((num_experts + cols - 1) / cols);
  };
  Launch launch{.rows = Few::kRows, .cols = Few::kCols, .split = false, .tiles = 0, .chunks = 0};
  if (num_tokens > 32) launch.rows = Some::kRows, launch.cols = Some::kCols;
  const bool large =
      num_experts > Some::kCols && tiles(Many::kRows, Many::kCols) >= chip.multiprocessors;
  if (large && chip.large_tiles) launch.rows = Many::kRows, launch.cols = Many::kCols;
  launch.chunks = std::max<std::int64_t>(1, (hidden + kChunk - 1) / kChunk);
  launch.tiles = tiles(launch.rows, launch.cols);
  launch.split = launch.chunks > 1 && launch.tiles <= chip.multiprocessors / 2;
  return launch;
}

template <typename Token, typename Gate, typename Tile>
void launch_tile(const RouterGemmParams& params, const Launch& launch, cudaStream_t stream) {
  constexpr int kBytes = kStages<Token, Gate> * kStageBytes<Token, Gate, Tile>;
  const auto kernel = router_gemm_kernel<Token, Gate, Tile>;
  allow_most_shared_memory(reinterpret_cast<const void*>(kernel));
  const dim3 grid(static_cast<unsigned>((params.num_tokens + Tile::kRows - 1) / Tile::kRows),
                  static_cast<unsigned>((params.num_experts + Tile::kCols - 1) / Tile::kCols),
                  static_cast<unsigned>(launch.split ? launch.chunks : 1));
  launch_overlapped_if(!launch.gate_is_fresh, kernel, grid, kThreads, kBytes, stream, params);
}

template <typename Token, typename Gate>
void launch_types(const RouterGemmParams& params, const Launch& launch, cudaStream_t stream) {
  if (launch.rows == Few::kRows) return launch_tile<Token, Gate, Few>(params, launch, stream);
  if (launch.rows == Some::kRows) return launch_tile<Token, Gate, Some>(params, launch, stream);
  launch_tile<Token, Gate, Many>(params, launch, stream);
}

std::optional<std::string> reject(const RouterGemmArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  if (args.gate.dtype != DType::kF32 && args.gate.dtype != args.tokens.dtype) {
    return "needs a gate of f32 or of the tokens' type";
  }
  if (args.tokens.cols % 8 != 0) return "hidden size is not a multiple of 8";
  if (!is_aligned_16(args.tokens.data) || !is_aligned_16(args.gate.data)) {
    return "tokens or gate are not aligned to 16 bytes";
  }
  return std::nullopt;
}

std::string tile_name(const RouterGemmArgs& args) {
  const Launch launch = launch_for(args.tokens.rows, args.gate.rows, args.tokens.cols, {});
  return fmt::format("tiles of {} x {}, the sum in {}", launch.rows, launch.cols,
                     launch.split ? launch.chunks : 1);
}

void run(const RouterGemmArgs& args) {
  if (args.tokens.rows == 0) return;
  Launch launch = launch_for(args.tokens.rows, args.gate.rows, args.tokens.cols, {});
  launch.gate_is_fresh = args.gate_is_fresh;
  const std::int64_t bytes = std::int64_t{sizeof(StageWorkspace)} + launch.part_bytes();
  require(!launch.split ||
              (args.execution.workspace != nullptr && bytes <= args.execution.workspace_bytes),
          "router_gemm needs {} bytes of workspace, has {}", bytes, args.execution.workspace_bytes);
  auto* workspace = static_cast<std::byte*>(args.execution.workspace);
  const RouterGemmParams params{
      .tokens = args.tokens.data,
      .gate = args.gate.data,
      .bias = args.bias.data,
      .logits = args.logits.data,
      .parts =
          launch.split ? reinterpret_cast<float*>(workspace + sizeof(StageWorkspace)) : nullptr,
      .arrived = launch.split ? reinterpret_cast<StageWorkspace*>(workspace)->tile_parts : nullptr,
      .num_tokens = static_cast<std::int32_t>(args.tokens.rows),
      .num_experts = static_cast<std::int32_t>(args.gate.rows),
      .hidden = static_cast<std::int32_t>(args.tokens.cols),
      .chunks = static_cast<std::int32_t>(launch.chunks)};
  const auto stream = static_cast<cudaStream_t>(args.execution.stream);
  const bool f32_gate = args.gate.dtype == DType::kF32;
  switch (args.tokens.dtype) {
    case DType::kBF16:
      return f32_gate ? launch_types<__nv_bfloat16, float>(params, launch, stream)
                      : launch_types<__nv_bfloat16, __nv_bfloat16>(params, launch, stream);
    case DType::kF16:
      return f32_gate ? launch_types<__half, float>(params, launch, stream)
                      : launch_types<__half, __half>(params, launch, stream);
    default: return launch_types<float, float>(params, launch, stream);
  }
}

}  // namespace

const Implementation<RouterGemmArgs> kRouterGemmCuda{"cuda.tensor_cores", reject, run, tile_name};

std::int64_t router_gemm_workspace_bytes(std::int64_t max_tokens, std::int64_t num_experts,
                                         std::int64_t hidden) {
  const Chip chip;
  std::int64_t most = 0;
  // Fewer tokens may need more than max_tokens do; beyond one split tile a multiprocessor, none.
  const std::int64_t end = std::min<std::int64_t>(max_tokens, 64 * chip.multiprocessors);
  for (std::int64_t tokens = 1; tokens < end + 16; tokens += 16) {
    most =
        std::max(most, launch_for(std::min(tokens, end), num_experts, hidden, chip).part_bytes());
  }
  return std::int64_t{sizeof(StageWorkspace)} + most;
}

}  // namespace switchyard

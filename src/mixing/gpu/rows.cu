// What Soft-MoE does with rows of tokens and slots: their lengths, the way back through these, the
// plan of slots as the experts' tokens. Bound by memory.
#include "core/gpu/each.cuh"
#include "core/gpu/pack16.cuh"
#include "mixing/gpu/kernels.hpp"

namespace switchyard::mixing {
namespace {

using each::blocks_for;
using each::for_each;
using each::kThreads;

struct LengthParams {
  const void* rows;  // [R, H]
  float* out;        // [R]
  std::int64_t num_rows, hidden;
};

/// A warp a row.
template <typename T>
__global__ void __launch_bounds__(kThreads) length_kernel(const __grid_constant__ LengthParams p) {
  const std::int64_t row =
      (std::int64_t{blockIdx.x} * kThreads + static_cast<int>(threadIdx.x)) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (row >= p.num_rows) return;
  const T* const values = static_cast<const T*>(p.rows) + row * p.hidden;
  float sum = 0.0F;
#pragma unroll 4
  for (std::int64_t h = lane * 4; h < p.hidden; h += 128) {
    float x[4];
    load_floats(values + h, x);
#pragma unroll
    for (const float value : x) sum = fmaf(value, value, sum);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffU, sum, offset));
  }
  if (lane == 0) p.out[row] = 1.0F / sqrtf(sum + kSoftMoeEpsilon);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    widen_kernel(const T* rows, float* out, std::int64_t quads) {
  for_each(quads, [&](std::int64_t quad) {
    float x[4];
    load_floats(rows + 4 * quad, x);
    store_floats(out + 4 * quad, x);
  });
}

__global__ void __launch_bounds__(kThreads)
    round_kernel(const float* values, __nv_bfloat16* out, std::int64_t quads) {
  for_each(quads, [&](std::int64_t quad) {
    float x[4];
    load_floats(values + 4 * quad, x);
    store_floats(out + 4 * quad, x);
  });
}

template <typename T>
void launch_widen(ConstRawMatrix rows, float* out, cudaStream_t stream) {
  const std::int64_t quads = rows.rows * rows.cols / 4;
  widen_kernel<T><<<blocks_for(quads), kThreads, 0, stream>>>(reinterpret_cast<const T*>(rows.data),
                                                              out, quads);
  SWITCHYARD_CUDA(cudaGetLastError());
}

struct RowGradientParams {
  const float* first;    // [R, H]
  const float* second;   // [R, H] or null
  const void* rows;      // [R, H]
  const float* inverse;  // [R] or null
  const float* sums;     // [R]
  float scale;
  void* out;  // [R, H]
  bool accumulate;
  bool of_tokens;
  std::int64_t size;   // R * H / 4
  std::int64_t quads;  // H / 4
  // Of tokens: which groups make slots.
  std::int64_t group_tokens, per_sequence;
  bool causal;

  [[nodiscard]] __device__ __forceinline__ bool has_second(std::int64_t row) const {
    if (second == nullptr || !of_tokens || !causal) return second != nullptr;
    return row / group_tokens % per_sequence != per_sequence - 1;
  }
};

template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads)
    row_gradient_kernel(const __grid_constant__ RowGradientParams p) {
  for_each(p.size, [&](std::int64_t quad) {
    const std::int64_t row = quad / p.quads;
    float g[4];
    load_floats(p.first + 4 * quad, g);
    if (p.inverse != nullptr) {
      const float inverse = p.inverse[row];
      const float along = inverse * inverse * (p.scale * p.sums[row]);
      float x[4];
      load_floats(static_cast<const In*>(p.rows) + 4 * quad, x);
#pragma unroll
      for (int i = 0; i < 4; ++i) g[i] = fmaf(-x[i], along, g[i]);
    }
    if (p.has_second(row)) {
      float more[4];
      load_floats(p.second + 4 * quad, more);
#pragma unroll
      for (int i = 0; i < 4; ++i) g[i] += more[i];
    }
    Out* const out = static_cast<Out*>(p.out) + 4 * quad;
    if (p.accumulate) {
      float before[4];
      load_floats(out, before);
#pragma unroll
      for (int i = 0; i < 4; ++i) g[i] += before[i];
    }
    store_floats(out, g);
  });
}

template <typename In>
void launch_row_gradients(const RowGradientParams& params, DType out, cudaStream_t stream) {
  const unsigned blocks = blocks_for(params.size);
  switch (out) {
    case DType::kBF16:
      row_gradient_kernel<In, __nv_bfloat16><<<blocks, kThreads, 0, stream>>>(params);
      break;
    case DType::kF16:
      row_gradient_kernel<In, __half><<<blocks, kThreads, 0, stream>>>(params);
      break;
    default: row_gradient_kernel<In, float><<<blocks, kThreads, 0, stream>>>(params); break;
  }
  SWITCHYARD_CUDA(cudaGetLastError());
}

struct PlanParams {
  PlanView plan;
  std::int32_t sets, slots, per_expert, experts;
};

/// SlotGroups::row_of(), a thread a slot of all sets.
__global__ void __launch_bounds__(kThreads) plan_kernel(const __grid_constant__ PlanParams p) {
  const std::int64_t rows = std::int64_t{p.sets} * p.slots;
  for_each(rows + p.experts + 1, [&](std::int64_t i) {
    if (i >= rows) {
      const auto e = static_cast<std::int32_t>(i - rows);
      p.plan.expert_begin.data[e] = e * p.sets * p.per_expert;
      if (e < p.experts) {
        p.plan.expert_rows.data[e] = p.sets * p.per_expert;
      } else {
        p.plan.token_begin.data[rows] = static_cast<std::int32_t>(rows);
      }
      return;
    }
    const auto token = static_cast<std::int32_t>(i);
    const std::int32_t set = token / p.slots;
    const std::int32_t slot = token % p.slots;
    const std::int32_t row =
        (slot / p.per_expert * p.sets + set) * p.per_expert + slot % p.per_expert;
    p.plan.row_token.data[row] = token;
    p.plan.row_weight.data[row] = 1.0F;
    p.plan.token_begin.data[token] = token;
    p.plan.token_row.data[token] = row;
  });
}

struct TurnParams {
  const float* from;  // [rows, cols]
  float* to;          // [cols, rows]
  std::int64_t rows, cols;
};

/// A block 32 x 32 values, through shared memory, where a column meets no bank twice.
__global__ void __launch_bounds__(kThreads) turn_kernel(const __grid_constant__ TurnParams p) {
  constexpr int kSide = 32;
  __shared__ float tile[kSide][kSide + 1];
  const std::int64_t across = (p.cols + kSide - 1) / kSide;
  const std::int64_t row = blockIdx.x / across * kSide;
  const std::int64_t column = blockIdx.x % across * kSide;
  const int x = static_cast<int>(threadIdx.x) % kSide;
  for (int y = static_cast<int>(threadIdx.x) / kSide; y < kSide; y += kThreads / kSide) {
    const bool inside = row + y < p.rows && column + x < p.cols;
    tile[y][x] = inside ? p.from[(row + y) * p.cols + column + x] : 0.0F;
  }
  __syncthreads();
  for (int y = static_cast<int>(threadIdx.x) / kSide; y < kSide; y += kThreads / kSide) {
    if (column + y < p.cols && row + x < p.rows) {
      p.to[(column + y) * p.rows + row + x] = tile[x][y];
    }
  }
}

struct MoveParams {
  const int4* rows;
  const std::int32_t* from;
  int4* out;
  std::int64_t size, pieces;  // of 16 bytes, in all and of a row
};

__global__ void __launch_bounds__(kThreads) move_kernel(const __grid_constant__ MoveParams p) {
  for_each(p.size, [&](std::int64_t i) {
    const std::int64_t slot = i / p.pieces;
    p.out[i] = p.rows[p.from[slot] * p.pieces + i % p.pieces];
  });
}

}  // namespace

void inverse_lengths(ConstRawMatrix rows, float* out, cudaStream_t stream) {
  if (rows.rows == 0) return;
  const LengthParams params{
      .rows = rows.data, .out = out, .num_rows = rows.rows, .hidden = rows.cols};
  const auto blocks = static_cast<unsigned>((rows.rows * 32 + kThreads - 1) / kThreads);
  switch (rows.dtype) {
    case DType::kBF16: length_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(params); break;
    case DType::kF16: length_kernel<__half><<<blocks, kThreads, 0, stream>>>(params); break;
    default: length_kernel<float><<<blocks, kThreads, 0, stream>>>(params); break;
  }
  SWITCHYARD_CUDA(cudaGetLastError());
}

void widen_rows(ConstRawMatrix rows, float* out, cudaStream_t stream) {
  if (rows.rows == 0) return;
  switch (rows.dtype) {
    case DType::kBF16: return launch_widen<__nv_bfloat16>(rows, out, stream);
    case DType::kF16: return launch_widen<__half>(rows, out, stream);
    default: return launch_widen<float>(rows, out, stream);
  }
}

void round_values(Matrix<const float> values, std::byte* out, cudaStream_t stream) {
  const std::int64_t quads = values.size() / 4;
  if (quads == 0) return;
  round_kernel<<<blocks_for(quads), kThreads, 0, stream>>>(
      values.data, reinterpret_cast<__nv_bfloat16*>(out), quads);
  SWITCHYARD_CUDA(cudaGetLastError());
}

void turn(Matrix<const float> matrix, float* out, cudaStream_t stream) {
  const auto [rows, cols] = matrix.shape;
  const auto blocks = static_cast<unsigned>((rows + 31) / 32 * ((cols + 31) / 32));
  if (blocks == 0) return;
  const TurnParams params{.from = matrix.data, .to = out, .rows = rows, .cols = cols};
  turn_kernel<<<blocks, kThreads, 0, stream>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

void row_gradients(const RowGradientArgs& args, const GroupShape* makes, cudaStream_t stream) {
  const std::int64_t size = args.out.rows * args.out.cols / 4;
  if (size == 0) return;
  const RowGradientParams params{.first = args.first.data,
                                 .second = args.second,
                                 .rows = args.rows.data,
                                 .inverse = args.inverse,
                                 .sums = args.sums,
                                 .scale = args.scale,
                                 .out = args.out.data,
                                 .accumulate = args.accumulate,
                                 .of_tokens = makes != nullptr,
                                 .size = size,
                                 .quads = args.out.cols / 4,
                                 .group_tokens = makes == nullptr ? 0 : makes->tokens,
                                 .per_sequence = makes == nullptr ? 0 : makes->per_sequence,
                                 .causal = makes != nullptr && makes->causal};
  switch (args.rows.dtype) {
    case DType::kBF16: return launch_row_gradients<__nv_bfloat16>(params, args.out.dtype, stream);
    case DType::kF16: return launch_row_gradients<__half>(params, args.out.dtype, stream);
    default: return launch_row_gradients<float>(params, args.out.dtype, stream);
  }
}

void plan_of_slots(const SlotGroups& groups, const PlanView& plan, cudaStream_t stream) {
  const PlanParams params{.plan = plan,
                          .sets = static_cast<std::int32_t>(groups.num_sets()),
                          .slots = static_cast<std::int32_t>(groups.slots()),
                          .per_expert = static_cast<std::int32_t>(groups.slots_per_expert()),
                          .experts = static_cast<std::int32_t>(groups.num_experts())};
  plan_kernel<<<blocks_for(groups.num_sets() * groups.slots() + groups.num_experts() + 1), kThreads,
                0, stream>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

void rows_by_slots(ConstRawMatrix rows, const std::int32_t* token_row, RawMatrix out,
                   cudaStream_t stream) {
  const std::int64_t size = out.bytes() / 16;
  if (size == 0) return;
  move_kernel<<<blocks_for(size), kThreads, 0, stream>>>(
      MoveParams{.rows = reinterpret_cast<const int4*>(rows.data),
                 .from = token_row,
                 .out = reinterpret_cast<int4*>(out.data),
                 .size = size,
                 .pieces = out.row_bytes() / 16});
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard::mixing

#include "layer/gpu/router/network_kernels.hpp"

#include <algorithm>

#include "core/gpu/each.cuh"
#include "core/gpu/pack16.cuh"
#include "layer/network_parts.hpp"
#include "switchyard/router.hpp"

namespace switchyard {
namespace {

using each::blocks_for;
using each::for_each;
using each::kThreads;

__device__ __forceinline__ float4 load_quad(const float* row, std::int64_t quad) {
  return reinterpret_cast<const float4*>(row)[quad];
}
template <typename T>
__device__ __forceinline__ float4 load_quad(const T* row, std::int64_t quad) {
  float x[4];
  load_floats(row + 4 * quad, x);
  return make_float4(x[0], x[1], x[2], x[3]);
}
__device__ __forceinline__ void store_quad(float* row, std::int64_t quad, float4 x) {
  reinterpret_cast<float4*>(row)[quad] = x;
}

/// to[i] = function(a[i], b[i]) of four numbers at a time; `b` may be `to`.
template <typename A, typename Function>
__global__ void __launch_bounds__(kThreads)
    each_kernel(const A* a, const float* b, float* to, std::int64_t quads, Function function) {
  for_each(quads, [&](std::int64_t quad) {
    const float4 x = load_quad(a, quad);
    const float4 y = b == nullptr ? float4{} : load_quad(b, quad);
    store_quad(to, quad,
               make_float4(function(x.x, y.x), function(x.y, y.y), function(x.z, y.z),
                           function(x.w, y.w)));
  });
}

template <typename A, typename Function>
void launch_each(const A* a, const float* b, float* to, std::int64_t size, cudaStream_t stream,
                 Function function) {
  if (size == 0) return;
  each_kernel<<<blocks_for(size / 4), kThreads, 0, stream>>>(a, b, to, size / 4, function);
  SWITCHYARD_CUDA(cudaGetLastError());
}

struct Gelu {
  __device__ float operator()(float x, float /*none*/) const { return x * normcdff(x); }
};
struct GeluBackward {
  __device__ float operator()(float x, float d) const {
    constexpr float kPeak = 0.3989422804F;  // 1 / sqrt(2 pi)
    return d * fmaf(x, kPeak * expf(-0.5F * x * x), normcdff(x));
  }
};
struct Multiply {
  __device__ float operator()(float x, float y) const { return x * y; }
};

__global__ void __launch_bounds__(kThreads)
    multiply_add_kernel(const float* a, const float* b, float* to, std::int64_t quads) {
  for_each(quads, [&](std::int64_t quad) {
    const float4 x = load_quad(a, quad), y = load_quad(b, quad), z = load_quad(to, quad);
    store_quad(to, quad,
               make_float4(fmaf(x.x, y.x, z.x), fmaf(x.y, y.y, z.y), fmaf(x.z, y.z, z.z),
                           fmaf(x.w, y.w, z.w)));
  });
}

__device__ __forceinline__ float dot(float4 a, float4 b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

/// Of a warp, in every lane.
__device__ __forceinline__ float warp_sum(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffU, x, offset);
  return x;
}

template <typename T>
__device__ __forceinline__ float inverse_length(const T* row, int quads, int lane) {
  float sum = 0;
  for (int i = lane; i < quads; i += 32) {
    const float4 x = load_quad(row, i);
    sum = dot(x, x, sum);
  }
  return 1.0F / sqrtf(warp_sum(sum) + kCosineEpsilon);
}

/// Calls work(row, lane) for each row that is this warp's.
template <typename Work>
__device__ __forceinline__ void for_each_row(std::int64_t rows, Work&& work) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t warps = std::int64_t{gridDim.x} * (kThreads / 32);
  for (std::int64_t r = std::int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32; r < rows;
       r += warps) {
    work(r, lane);
  }
}

/// out = rows over their lengths, times e^s where that is given.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    unit_kernel(const T* in, const float* s, float* out, std::int64_t rows, int quads) {
  const float scale = s == nullptr ? 1.0F : expf(fminf(*s, kMostCosineScale));
  for_each_row(rows, [&](std::int64_t r, int lane) {
    const T* const row = in + r * quads * 4;
    float* const to = out + r * quads * 4;
    const float factor = scale * inverse_length(row, quads, lane);
    for (int i = lane; i < quads; i += 32) {
      const float4 x = load_quad(row, i);
      store_quad(to, i, make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor));
    }
  });
}

__device__ __forceinline__ float through_unit(float x, float d, float inverse, float along) {
  return inverse * (d - x * inverse * along);
}

__global__ void __launch_bounds__(kThreads)
    unit_backward_kernel(const float* in, float* d, std::int64_t rows, int quads) {
  for_each_row(rows, [&](std::int64_t r, int lane) {
    const float* const row = in + r * quads * 4;
    float* const to = d + r * quads * 4;
    const float inverse = inverse_length(row, quads, lane);
    float sum = 0;
    for (int i = lane; i < quads; i += 32) sum = dot(load_quad(row, i), load_quad(to, i), sum);
    const float along = warp_sum(sum) * inverse;
    for (int i = lane; i < quads; i += 32) {
      const float4 x = load_quad(row, i), g = load_quad(to, i);
      store_quad(to, i,
                 make_float4(through_unit(x.x, g.x, inverse, along),
                             through_unit(x.y, g.y, inverse, along),
                             through_unit(x.z, g.z, inverse, along),
                             through_unit(x.w, g.w, inverse, along)));
    }
  });
}

struct ScaleGateParams {
  const float* s;
  const float* dscaled;  // [E, M]
  void* dgate;           // [E, M], or null
  DType dgate_type;
  float* row_sums;  // [E]
  std::int64_t rows;
  int quads;
  bool accumulate;
};

template <typename Out>
__device__ __forceinline__ void write_quad(Out* to, const float (&x)[4], bool accumulate) {
  float sum[4] = {x[0], x[1], x[2], x[3]};
  if (accumulate) {
    const float4 there = load_quad(to, 0);
    sum[0] = __fadd_rn(there.x, x[0]), sum[1] = __fadd_rn(there.y, x[1]);
    sum[2] = __fadd_rn(there.z, x[2]), sum[3] = __fadd_rn(there.w, x[3]);
  }
  store_floats(to, sum);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    scale_gate_backward_kernel(const T* gate, const __grid_constant__ ScaleGateParams p) {
  const float scale = expf(fminf(*p.s, kMostCosineScale));
  for_each_row(p.rows, [&](std::int64_t r, int lane) {
    const T* const row = gate + r * p.quads * 4;
    const float* const d = p.dscaled + r * p.quads * 4;
    const float inverse = inverse_length(row, p.quads, lane);
    float sum = 0;
    for (int i = lane; i < p.quads; i += 32) sum = dot(load_quad(row, i), load_quad(d, i), sum);
    const float along = scale * warp_sum(sum) * inverse;
    if (lane == 0) p.row_sums[r] = along;
    if (p.dgate == nullptr) return;
    for (int i = lane; i < p.quads; i += 32) {
      const float4 x = load_quad(row, i), g = load_quad(d, i);
      const float out[4] = {through_unit(x.x, scale * g.x, inverse, along),
                            through_unit(x.y, scale * g.y, inverse, along),
                            through_unit(x.z, scale * g.z, inverse, along),
                            through_unit(x.w, scale * g.w, inverse, along)};
      const std::int64_t at = (r * p.quads + i) * 4;
      switch (p.dgate_type) {
        case DType::kBF16:
          write_quad(static_cast<__nv_bfloat16*>(p.dgate) + at, out, p.accumulate);
          break;
        case DType::kF16: write_quad(static_cast<__half*>(p.dgate) + at, out, p.accumulate); break;
        default: write_quad(static_cast<float*>(p.dgate) + at, out, p.accumulate); break;
      }
    }
  });
}

/// A warp: lanes add every 32nd row, then their sums by a tree.
__global__ void scale_sum_kernel(const float* row_sums, std::int64_t rows, const float* s,
                                 float* ds, bool accumulate) {
  float sum = 0;
  for (std::int64_t r = threadIdx.x; r < rows; r += 32) sum += row_sums[r];
  sum = warp_sum(sum);
  if (threadIdx.x != 0) return;
  if (!(*s < kMostCosineScale)) sum = 0;
  *ds = accumulate ? *ds + sum : sum;
}

__global__ void __launch_bounds__(kThreads)
    take_columns_kernel(const float* from, float* to, std::int64_t rows, std::int64_t stride,
                        std::int64_t cols, bool accumulate) {
  for_each(rows * cols, [&](std::int64_t i) {
    const float x = from[i / cols * stride + i % cols];
    to[i] = accumulate ? to[i] + x : x;
  });
}

unsigned blocks_for_rows(std::int64_t rows) { return blocks_for(32 * rows); }

int quads_of(std::int64_t cols) { return static_cast<int>(cols / 4); }

template <typename Call>
void by_type(ConstRawMatrix matrix, const Call& call) {
  switch (matrix.dtype) {
    case DType::kBF16: return call(reinterpret_cast<const __nv_bfloat16*>(matrix.data));
    case DType::kF16: return call(reinterpret_cast<const __half*>(matrix.data));
    default: return call(reinterpret_cast<const float*>(matrix.data));
  }
}

}  // namespace

void gelu_on_gpu(Matrix<const float> in, Matrix<float> out, cudaStream_t stream) {
  launch_each(in.data, nullptr, out.data, in.size(), stream, Gelu{});
}

void gelu_backward_on_gpu(Matrix<const float> in, Matrix<float> d, cudaStream_t stream) {
  launch_each(in.data, d.data, d.data, in.size(), stream, GeluBackward{});
}

void unit_rows_on_gpu(Matrix<const float> in, Matrix<float> out, cudaStream_t stream) {
  const auto [rows, cols] = in.shape;
  if (rows == 0) return;
  unit_kernel<<<blocks_for_rows(rows), kThreads, 0, stream>>>(in.data, nullptr, out.data, rows,
                                                              quads_of(cols));
  SWITCHYARD_CUDA(cudaGetLastError());
}

void unit_rows_backward_on_gpu(Matrix<const float> in, Matrix<float> d, cudaStream_t stream) {
  const auto [rows, cols] = in.shape;
  if (rows == 0) return;
  unit_backward_kernel<<<blocks_for_rows(rows), kThreads, 0, stream>>>(in.data, d.data, rows,
                                                                       quads_of(cols));
  SWITCHYARD_CUDA(cudaGetLastError());
}

void scale_gate_on_gpu(ConstRawMatrix gate, const float* s, Matrix<float> out,
                       cudaStream_t stream) {
  by_type(gate, [&](const auto* rows) {
    unit_kernel<<<blocks_for_rows(gate.rows), kThreads, 0, stream>>>(rows, s, out.data, gate.rows,
                                                                     quads_of(gate.cols));
  });
  SWITCHYARD_CUDA(cudaGetLastError());
}

void scale_gate_backward_on_gpu(const ScaleGateBackwardArgs& args, cudaStream_t stream) {
  const ScaleGateParams params{.s = args.s,
                               .dscaled = args.dscaled.data,
                               .dgate = args.dgate.data,
                               .dgate_type = args.dgate.dtype,
                               .row_sums = args.row_sums.data,
                               .rows = args.gate.rows,
                               .quads = quads_of(args.gate.cols),
                               .accumulate = args.accumulate};
  by_type(args.gate, [&](const auto* rows) {
    scale_gate_backward_kernel<<<blocks_for_rows(args.gate.rows), kThreads, 0, stream>>>(rows,
                                                                                         params);
  });
  SWITCHYARD_CUDA(cudaGetLastError());
  if (args.ds == nullptr) return;
  scale_sum_kernel<<<1, 32, 0, stream>>>(args.row_sums.data, args.gate.rows, args.s, args.ds,
                                         args.accumulate);
  SWITCHYARD_CUDA(cudaGetLastError());
}

void multiply_rows_on_gpu(ConstRawMatrix x, Matrix<const float> factor, Matrix<float> out,
                          cudaStream_t stream) {
  by_type(x, [&](const auto* values) {
    launch_each(values, factor.data, out.data, out.size(), stream, Multiply{});
  });
}

void multiply_add_on_gpu(Matrix<const float> a, Matrix<const float> b, Matrix<float> to,
                         cudaStream_t stream) {
  if (to.size() == 0) return;
  multiply_add_kernel<<<blocks_for(to.size() / 4), kThreads, 0, stream>>>(a.data, b.data, to.data,
                                                                          to.size() / 4);
  SWITCHYARD_CUDA(cudaGetLastError());
}

void add_on_gpu(Matrix<const float> from, Matrix<float> to, cudaStream_t stream) {
  take_columns_on_gpu(from, to, true, stream);
}

void take_columns_on_gpu(Matrix<const float> from, Matrix<float> to, bool accumulate,
                         cudaStream_t stream) {
  if (to.size() == 0) return;
  take_columns_kernel<<<blocks_for(to.size()), kThreads, 0, stream>>>(
      from.data, to.data, to.shape[0], from.shape[1], to.shape[1], accumulate);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard

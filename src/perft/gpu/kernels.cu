#include "perft/gpu/kernels.hpp"

#include "core/gpu/cuda_check.hpp"
#include "core/gpu/each.cuh"
#include "core/gpu/pack16.cuh"

namespace switchyard {
namespace {

using each::blocks_for;
using each::for_each;
using each::kThreads;

/// body(T{}) with the type of `dtype`, which is the same for all threads.
template <typename Body>
__device__ __forceinline__ void with_type(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kBF16: body(__nv_bfloat16{}); break;
    case DType::kF16: body(__half{}); break;
    default: body(float{}); break;
  }
}

__device__ __forceinline__ float number_at(DType dtype, const void* from, std::int64_t i) {
  float x = 0.0F;
  with_type(dtype, [&](auto type) {
    x = static_cast<float>(static_cast<const decltype(type)*>(from)[i]);
  });
  return x;
}

__device__ __forceinline__ void put_number(DType dtype, void* to, std::int64_t i, float x) {
  with_type(dtype, [&](auto type) {
    static_cast<decltype(type)*>(to)[i] = static_cast<decltype(type)>(x);
  });
}

__device__ __forceinline__ void load_quad(DType dtype, const void* from, std::int64_t quad,
                                          float (&x)[4]) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    struct alignas(4 * sizeof(T)) Quad {
      T value[4];
    };
    const Quad four = static_cast<const Quad*>(from)[quad];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = static_cast<float>(four.value[i]);
  });
}

struct SumParams {
  const void* in;
  const void* base;  // or null
  void* out;
  DType in_type, base_type, out_type;
  float scale;
  std::int64_t quads;
};

/// A thread four neighbours; it reads them before it writes them.
__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ SumParams p) {
  for_each(p.quads, [&](std::int64_t quad) {
    float x[4];
    load_quad(p.in_type, p.in, quad, x);
#pragma unroll
    for (float& value : x) value = __fmul_rn(p.scale, value);
    if (p.base != nullptr) {
      float base[4];
      load_quad(p.base_type, p.base, quad, base);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = __fadd_rn(x[i], base[i]);
    }
    with_type(p.out_type,
              [&](auto type) { store_floats(static_cast<decltype(type)*>(p.out) + 4 * quad, x); });
  });
}

struct PackParams {
  AdapterLayout layout;
  const void* a;
  const void* b;
  void* w13;
  void* w2;
  DType from, to;
};

/// A thread a number of A and one of B: both arrays have as many.
__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ PackParams p) {
  const AdapterLayout& l = p.layout;
  for_each(l.adapters * l.rank * l.hidden, [&](std::int64_t at) {
    const std::int64_t row = at / l.hidden;
    const std::int64_t h = at % l.hidden;
    const std::int64_t place = l.row_of_a(row / l.rank, row % l.rank) * l.hidden + h;
    put_number(p.to, p.w13, place, number_at(p.from, p.a, at));
    const std::int64_t of_b = at / l.rank;
    const std::int64_t to = l.place_of_b(of_b / l.hidden, of_b % l.hidden, at % l.rank);
    put_number(p.to, p.w2, to, number_at(p.from, p.b, at));
  });
}

struct UnpackParams {
  AdapterLayout layout;
  const float* w13;
  const float* w2;
  void* da;  // or null
  void* db;  // or null
  DType a_type, b_type;
  bool accumulate;
};

__global__ void __launch_bounds__(kThreads) unpack_kernel(const __grid_constant__ UnpackParams p) {
  const AdapterLayout& l = p.layout;
  const auto put = [&](DType dtype, void* to, std::int64_t at, float x) {
    if (p.accumulate) x = __fadd_rn(number_at(dtype, to, at), x);
    put_number(dtype, to, at, x);
  };
  for_each(l.adapters * l.rank * l.hidden, [&](std::int64_t at) {
    if (p.da != nullptr) {
      const std::int64_t row = at / l.hidden;
      const std::int64_t place = l.row_of_a(row / l.rank, row % l.rank) * l.hidden + at % l.hidden;
      put(p.a_type, p.da, at, p.w13[place]);
    }
    if (p.db != nullptr) {
      const std::int64_t row = at / l.rank;
      put(p.b_type, p.db, at, p.w2[l.place_of_b(row / l.hidden, row % l.hidden, at % l.rank)]);
    }
  });
}

/// Kernels that may begin before their predecessor has ended read weights at once, and rely on what
/// came before that one: so this one lies between.
__global__ void ended_kernel() {}

__global__ void __launch_bounds__(kThreads)
    kept_kernel(const std::int32_t* expert, const std::uint8_t* kept, std::int32_t* ids,
                std::int64_t n) {
  for_each(n, [&](std::int64_t i) { ids[i] = kept[i] != 0 ? expert[i] : -1; });
}

}  // namespace

void scale_and_add(ConstRawMatrix in, float scale, ConstRawMatrix base, RawMatrix out,
                   cudaStream_t stream) {
  const std::int64_t quads = out.rows * out.cols / 4;
  if (quads == 0) return;
  const SumParams params{.in = in.data,
                         .base = base.data,
                         .out = out.data,
                         .in_type = in.dtype,
                         .base_type = base.dtype,
                         .out_type = out.dtype,
                         .scale = scale,
                         .quads = quads};
  sum_kernel<<<blocks_for(quads), kThreads, 0, stream>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

void pack_adapters(const AdapterLayout& layout, DType dtype, const void* a, const void* b,
                   DType compute, void* w13, void* w2, cudaStream_t stream) {
  const PackParams params{
      .layout = layout, .a = a, .b = b, .w13 = w13, .w2 = w2, .from = dtype, .to = compute};
  const std::int64_t size = layout.adapters * layout.rank * layout.hidden;
  pack_kernel<<<blocks_for(size), kThreads, 0, stream>>>(params);
  ended_kernel<<<1, 1, 0, stream>>>();
  SWITCHYARD_CUDA(cudaGetLastError());
}

void unpack_gradients(const AdapterLayout& layout, const AdapterGradients& gradients,
                      bool accumulate, cudaStream_t stream) {
  const UnpackParams params{.layout = layout,
                            .w13 = gradients.w13,
                            .w2 = gradients.w2,
                            .da = gradients.da.data,
                            .db = gradients.db.data,
                            .a_type = gradients.da.dtype,
                            .b_type = gradients.db.dtype,
                            .accumulate = accumulate};
  const std::int64_t size = layout.adapters * layout.rank * layout.hidden;
  unpack_kernel<<<blocks_for(size), kThreads, 0, stream>>>(params);
  SWITCHYARD_CUDA(cudaGetLastError());
}

void take_kept(const std::int32_t* expert, const std::uint8_t* kept, std::int32_t* ids,
               std::int64_t n, cudaStream_t stream) {
  if (n == 0) return;
  kept_kernel<<<blocks_for(n), kThreads, 0, stream>>>(expert, kept, ids, n);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard

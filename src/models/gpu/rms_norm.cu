// RMS norms of the residual stream, with the sum that comes before them, and back. Bound by bytes:
// a warp has a row in its registers, so that each number is read once.
#include "models/gpu/launch.cuh"
#include "models/gpu/stages.hpp"

namespace switchyard::models::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr std::int64_t kMostParts = 512;

template <typename T, int kQuads>
__global__ void norm_kernel(NormArgs p) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= p.rows) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t first = row * p.size;
  float x[kQuads][4];
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int column = 4 * (lane + 32 * i);
    if (column >= p.size) continue;
    load4(p.x + first + column, x[i]);
    if (p.delta != nullptr) {
      float delta[4];
      load4(static_cast<const T*>(p.delta) + first + column, delta);
      for (int j = 0; j < 4; ++j) x[i][j] += delta[j];
      store4(p.sum + first + column, x[i]);
    }
    for (int j = 0; j < 4; ++j) squares += x[i][j] * x[i][j];
  }
  const float mean = warp_sum(squares) / static_cast<float>(p.size);
  const float scale = 1.0F / sqrtf(mean + p.epsilon);
  if (lane == 0) p.scale[row] = scale;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int column = 4 * (lane + 32 * i);
    if (column >= p.size) continue;
    float y[4];
    load4(p.weight + column, y);
    for (int j = 0; j < 4; ++j) y[j] *= x[i][j] * scale;
    store4(static_cast<T*>(p.y) + first + column, y);
  }
}

/// A row that is on its way, 4 numbers of each array a quad.
template <typename T, int kQuads>
struct BackwardRow {
  float4 x[kQuads], before[kQuads];
  Four<T> dy[kQuads];

  __device__ __forceinline__ void load(const NormBackwardArgs& p, std::int64_t first, int lane) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int column = 4 * (lane + 32 * i);
      if (column >= p.size) continue;
      x[i] = load_four(p.x + first + column);
      dy[i] = load_four(static_cast<const T*>(p.dy) + first + column);
      before[i] = p.add ? load_four(p.dx + first + column) : float4{};
    }
  }
};

/// Registers for two blocks on a multiprocessor, where rows are not the widest.
template <int kQuads>
inline constexpr int kBackwardBlocks = kQuads <= 6 ? 2 : 1;

/// A block has `rows_each` neighbouring rows; what they add to dweight is a row of parts. All of a
/// row is asked for at once, also what the gradient is added to.
template <typename T, int kQuads>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks<kQuads>)
    norm_backward_kernel(NormBackwardArgs p, std::int64_t rows_each) {
  extern __shared__ float sums[];  // [size]
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t begin = std::int64_t{blockIdx.x} * rows_each;
  const std::int64_t end = begin + rows_each < p.rows ? begin + rows_each : p.rows;
  float dweight[kQuads][4] = {};
  for (std::int64_t row = begin + warp; row < end; row += kWarps) {
    const std::int64_t first = row * p.size;
    BackwardRow<T, kQuads> of;
    of.load(p, first, lane);
    const float scale = p.scale[row];
    float dot = 0;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int column = 4 * (lane + 32 * i);
      if (column >= p.size) continue;
      float weight[4], x[4], dy[4];
      load4(p.weight + column, weight);
      widen(of.x[i], x);
      widen(of.dy[i], dy);
      for (int j = 0; j < 4; ++j) {
        dweight[i][j] += dy[j] * x[j] * scale;
        dot += dy[j] * weight[j] * x[j];
      }
    }
    const float share = warp_sum(dot) * scale * scale / static_cast<float>(p.size);
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int column = 4 * (lane + 32 * i);
      if (column >= p.size) continue;
      float weight[4], x[4], dy[4], dx[4];
      load4(p.weight + column, weight);
      widen(of.x[i], x);
      widen(of.dy[i], dy);
      widen(of.before[i], dx);
      for (int j = 0; j < 4; ++j) dx[j] += scale * (dy[j] * weight[j] - x[j] * share);
      store4(p.dx + first + column, dx);
      if (p.dx_typed != nullptr) store4(static_cast<T*>(p.dx_typed) + first + column, dx);
    }
  }
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) {
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        const int column = 4 * (lane + 32 * i);
        if (column >= p.size) continue;
        for (int j = 0; j < 4; ++j) {
          sums[column + j] = w == 0 ? dweight[i][j] : sums[column + j] + dweight[i][j];
        }
      }
    }
    __syncthreads();
  }
  for (int c = static_cast<int>(threadIdx.x); c < p.size; c += kThreads) {
    p.parts[blockIdx.x * p.size + c] = sums[c];
  }
}

/// Blocks of 32 columns; row y of threads adds up parts y, y + 16, ..., then the rows are added in
/// order.
constexpr int kPartRows = 16;
__global__ void sum_parts_kernel(const float* parts, std::int64_t count, std::int64_t size,
                                 std::int64_t stride, bool accumulate, float* out) {
  __shared__ float sums[kPartRows][32];
  const std::int64_t column = std::int64_t{blockIdx.x} * 32 + threadIdx.x;
  float sum = 0;
  if (column < size) {
#pragma unroll 4
    for (std::int64_t i = threadIdx.y; i < count; i += kPartRows) {
      sum += parts[i * stride + column];
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || column >= size) return;
  float total = accumulate ? out[column] : 0.0F;
  for (int i = 0; i < kPartRows; ++i) total += sums[i][threadIdx.x];
  out[column] = total;
}

std::int64_t rows_of_block(std::int64_t rows) {
  const std::int64_t each = (rows + kMostParts - 1) / kMostParts;
  return (each + kWarps - 1) / kWarps * kWarps;
}

/// Calls `body` with a constant: quads of a lane for rows of `size`.
template <class Body>
void by_size(std::int64_t size, const Body& body) {
  if (size <= 128) return body(std::integral_constant<int, 1>{});
  if (size <= 256) return body(std::integral_constant<int, 2>{});
  if (size <= 512) return body(std::integral_constant<int, 4>{});
  if (size <= 768) return body(std::integral_constant<int, 6>{});
  if (size <= 1024) return body(std::integral_constant<int, 8>{});
  return body(std::integral_constant<int, 16>{});
}

}  // namespace

void sum_parts(const float* parts, std::int64_t count, std::int64_t size, std::int64_t stride,
               bool accumulate, float* out, cudaStream_t stream) {
  launch(sum_parts_kernel, blocks_for(size, 32), dim3(32, kPartRows), 0, stream, parts, count, size,
         stride, accumulate, out);
}

void rms_norm(const NormArgs& args) {
  by_type(args.bf16, [&]<typename T>(T) {
    by_size(args.size, [&]<int kQuads>(std::integral_constant<int, kQuads>) {
      launch(norm_kernel<T, kQuads>, blocks_for(args.rows, kWarps), kThreads, 0, args.stream, args);
    });
  });
}

std::int64_t norm_parts(std::int64_t rows, std::int64_t size) {
  return blocks_for(rows, rows_of_block(rows)) * size;
}

void rms_norm_backward(const NormBackwardArgs& args) {
  const std::int64_t each = rows_of_block(args.rows);
  const unsigned blocks = blocks_for(args.rows, each);
  by_type(args.bf16, [&]<typename T>(T) {
    by_size(args.size, [&]<int kQuads>(std::integral_constant<int, kQuads>) {
      launch(norm_backward_kernel<T, kQuads>, blocks, kThreads,
             static_cast<std::size_t>(4 * args.size), args.stream, args, each);
    });
  });
  sum_parts(args.parts, blocks, args.size, args.size, args.accumulate, args.dweight, args.stream);
}

}  // namespace switchyard::models::gpu

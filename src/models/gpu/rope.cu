// Queries and keys normalised by head and turned by their positions, and back. Bound by bytes:
// heads whose halves are 16-byte pieces, a power of two of them, are read so, several heads of a
// row by a warp; of others a warp has one at a time, each lane pairs (i, i + D/2).
#include "models/gpu/launch.cuh"
#include "models/gpu/stages.hpp"

namespace switchyard::models::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kPairs = static_cast<int>(kMaxHeadDim) / 64;  // of a lane
constexpr std::int64_t kMostParts = 512;

template <typename T>
__global__ void rope_kernel(RopeArgs p) {
  const int of_both = p.heads + p.kv_heads;
  const std::int64_t item = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (item >= p.rows * of_both) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int head = static_cast<int>(item % of_both);
  const std::int64_t row = item / of_both;
  const int half = p.head_dim / 2;
  const T* const x =
      static_cast<const T*>(p.qkv) + row * (of_both + p.kv_heads) * p.head_dim + head * p.head_dim;
  T* const out = static_cast<T*>(p.turned) + (row * of_both + head) * p.head_dim;
  float a[kPairs] = {}, b[kPairs] = {};
  float squares = 0;
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const int i = lane + 32 * j;
    if (i >= half) continue;
    a[j] = to_float(x[i]);
    b[j] = to_float(x[half + i]);
    squares += a[j] * a[j] + b[j] * b[j];
  }
  if (p.q_weight != nullptr) {
    const float* const weight = head < p.heads ? p.q_weight : p.k_weight;
    const float mean = warp_sum(squares) / static_cast<float>(p.head_dim);
    const float scale = 1.0F / sqrtf(mean + p.epsilon);
    if (lane == 0) p.scales[item] = scale;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = lane + 32 * j;
      if (i >= half) continue;
      a[j] *= scale * weight[i];
      b[j] *= scale * weight[half + i];
    }
  }
  const std::int64_t angle = (p.first + row % p.positions) * half;
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const int i = lane + 32 * j;
    if (i >= half) continue;
    const float c = p.cosine[angle + i], s = p.sine[angle + i];
    store(out + i, a[j] * c - b[j] * s);
    store(out + half + i, b[j] * c + a[j] * s);
  }
}

/// A block has `rows_each` neighbouring rows, a warp every eighth head of them. What they add to
/// the weights is a row of parts: [2][D], queries' and keys'.
template <typename T>
__global__ void rope_backward_kernel(RopeBackwardArgs args, std::int64_t rows_each) {
  const RopeArgs& p = args.forward;
  __shared__ float sums[2][kMaxHeadDim];
  const int of_both = p.heads + p.kv_heads;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int half = p.head_dim / 2;
  const std::int64_t begin = std::int64_t{blockIdx.x} * rows_each;
  const std::int64_t end = begin + rows_each < p.rows ? begin + rows_each : p.rows;
  float to_a[2][kPairs] = {}, to_b[2][kPairs] = {};
  for (std::int64_t item = begin * of_both + warp; item < end * of_both; item += kWarps) {
    const int head = static_cast<int>(item % of_both);
    const std::int64_t row = item / of_both;
    const std::int64_t place = row * (of_both + p.kv_heads) * p.head_dim + head * p.head_dim;
    T* const dx = static_cast<T*>(args.dqkv) + place;
    const std::int64_t angle = (p.first + row % p.positions) * half;
    float da[kPairs] = {}, db[kPairs] = {};
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = lane + 32 * j;
      if (i >= half) continue;
      const float c = p.cosine[angle + i], s = p.sine[angle + i];
      const float a = to_float(dx[i]), b = to_float(dx[half + i]);
      da[j] = a * c + b * s;
      db[j] = b * c - a * s;
    }
    if (p.q_weight != nullptr) {
      const T* const x = static_cast<const T*>(p.qkv) + place;
      const bool is_key = head >= p.heads;
      const float* const weight = is_key ? p.k_weight : p.q_weight;
      const float scale = p.scales[item];
      float a[kPairs] = {}, b[kPairs] = {};
      float dot = 0;
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const int i = lane + 32 * j;
        if (i >= half) continue;
        a[j] = to_float(x[i]);
        b[j] = to_float(x[half + i]);
        const float of_a = da[j] * a[j] * scale, of_b = db[j] * b[j] * scale;
        to_a[0][j] += is_key ? 0.0F : of_a;
        to_a[1][j] += is_key ? of_a : 0.0F;
        to_b[0][j] += is_key ? 0.0F : of_b;
        to_b[1][j] += is_key ? of_b : 0.0F;
        da[j] *= weight[i];
        db[j] *= weight[half + i];
        dot += da[j] * a[j] + db[j] * b[j];
      }
      const float share = warp_sum(dot) * scale * scale / static_cast<float>(p.head_dim);
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        da[j] = scale * (da[j] - a[j] * share);
        db[j] = scale * (db[j] - b[j] * share);
      }
    }
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = lane + 32 * j;
      if (i >= half) continue;
      store(dx + i, da[j]);
      store(dx + half + i, db[j]);
    }
  }
  if (p.q_weight == nullptr) return;
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) {
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const int i = lane + 32 * j;
        if (i >= half) continue;
        for (int k = 0; k < 2; ++k) {
          sums[k][i] = w == 0 ? to_a[k][j] : sums[k][i] + to_a[k][j];
          sums[k][half + i] = w == 0 ? to_b[k][j] : sums[k][half + i] + to_b[k][j];
        }
      }
    }
    __syncthreads();
  }
  for (int c = static_cast<int>(threadIdx.x); c < 2 * p.head_dim; c += kThreads) {
    args.parts[std::int64_t{blockIdx.x} * 2 * p.head_dim + c] =
        sums[c / p.head_dim][c % p.head_dim];
  }
}

/// Lanes for a head's pieces of 16 bytes, one of either half each; 0: it has no such pieces.
template <typename T>
int lanes_of_head(std::int32_t head_dim) {
  const int lanes = head_dim / 2 / kPack<T>;
  const bool is_whole = head_dim % (2 * kPack<T>) == 0;
  return is_whole && lanes >= 2 && lanes <= 16 && (lanes & (lanes - 1)) == 0 ? lanes : 0;
}

/// What of a row all heads share: a lane's angles.
template <typename T, int kLanes>
struct Turn {
  static constexpr int kEach = kPack<T>, kHalf = kLanes * kEach, kHeads = 32 / kLanes;
  float cosine[kEach], sine[kEach];

  __device__ Turn(const RopeArgs& p, std::int64_t row, int column) {
    const std::int64_t at = (p.first + row % p.positions) * kHalf + column;
    load(p.cosine + at, cosine);
    load(p.sine + at, sine);
  }

  static __device__ __forceinline__ void load(const float* from, float (&x)[kEach]) {
#pragma unroll
    for (int i = 0; i < kEach; i += 4) load4(from + i, *reinterpret_cast<float(*)[4]>(x + i));
  }
  static __device__ __forceinline__ void read(const T* from, float (&x)[kEach]) {
    unpack16(*reinterpret_cast<const int4*>(from), x, T{});
  }
  /// Over the lanes of a head.
  static __device__ __forceinline__ float sum(float x) {
#pragma unroll
    for (int i = kLanes / 2; i > 0; i /= 2) x += __shfl_xor_sync(0xffffffffU, x, i);
    return x;
  }
};

template <typename T, int kLanes>
__global__ void __launch_bounds__(kThreads) rope_pieces_kernel(RopeArgs p) {
  using Row = Turn<T, kLanes>;
  const std::int64_t row = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= p.rows) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int column = lane % kLanes * Row::kEach;
  const int of_both = p.heads + p.kv_heads;
  const Row turn(p, row, column);
  const T* const x = static_cast<const T*>(p.qkv) + row * (of_both + p.kv_heads) * 2 * Row::kHalf;
  T* const out = static_cast<T*>(p.turned) + row * of_both * 2 * Row::kHalf;
#pragma unroll 2
  for (int first = 0; first < of_both; first += Row::kHeads) {
    const int head = first + lane / kLanes;
    const bool is_there = head < of_both;
    const int at = head * 2 * Row::kHalf + column;
    float a[Row::kEach] = {}, b[Row::kEach] = {};
    if (is_there) {
      Row::read(x + at, a);
      Row::read(x + at + Row::kHalf, b);
    }
    if (p.q_weight != nullptr) {
      float squares = 0;
#pragma unroll
      for (int i = 0; i < Row::kEach; ++i) squares += a[i] * a[i] + b[i] * b[i];
      const float mean = Row::sum(squares) / static_cast<float>(2 * Row::kHalf);
      const float scale = 1.0F / sqrtf(mean + p.epsilon);
      if (is_there && lane % kLanes == 0) p.scales[row * of_both + head] = scale;
      const float* const weight = (head < p.heads ? p.q_weight : p.k_weight) + column;
      float of_a[Row::kEach], of_b[Row::kEach];
      Row::load(weight, of_a);
      Row::load(weight + Row::kHalf, of_b);
#pragma unroll
      for (int i = 0; i < Row::kEach; ++i) {
        a[i] *= scale * of_a[i];
        b[i] *= scale * of_b[i];
      }
    }
    if (!is_there) continue;
    float low[Row::kEach], high[Row::kEach];
#pragma unroll
    for (int i = 0; i < Row::kEach; ++i) {
      low[i] = a[i] * turn.cosine[i] - b[i] * turn.sine[i];
      high[i] = b[i] * turn.cosine[i] + a[i] * turn.sine[i];
    }
    store_floats(out + at, low);
    store_floats(out + at + Row::kHalf, high);
  }
}

/// As rope_backward_kernel(), a warp a row.
template <typename T, int kLanes>
__global__ void __launch_bounds__(kThreads)
    rope_pieces_backward_kernel(RopeBackwardArgs args, std::int64_t rows_each) {
  using Row = Turn<T, kLanes>;
  const RopeArgs& p = args.forward;
  __shared__ float sums[2][2 * Row::kHalf];
  const int of_both = p.heads + p.kv_heads;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int column = lane % kLanes * Row::kEach;
  const std::int64_t begin = std::int64_t{blockIdx.x} * rows_each;
  const std::int64_t end = begin + rows_each < p.rows ? begin + rows_each : p.rows;
  float to_a[2][Row::kEach] = {}, to_b[2][Row::kEach] = {};  // queries' and keys' weights
  for (std::int64_t row = begin + warp; row < end; row += kWarps) {
    const Row turn(p, row, column);
    const std::int64_t place = row * (of_both + p.kv_heads) * 2 * Row::kHalf;
    const T* const x = static_cast<const T*>(p.qkv) + place;
    T* const dx = static_cast<T*>(args.dqkv) + place;
#pragma unroll 2
    for (int first = 0; first < of_both; first += Row::kHeads) {
      const int head = first + lane / kLanes;
      const bool is_there = head < of_both;
      const int at = head * 2 * Row::kHalf + column;
      float da[Row::kEach] = {}, db[Row::kEach] = {};
      if (is_there) {
        Row::read(dx + at, da);
        Row::read(dx + at + Row::kHalf, db);
      }
#pragma unroll
      for (int i = 0; i < Row::kEach; ++i) {
        const float a = da[i], b = db[i];
        da[i] = a * turn.cosine[i] + b * turn.sine[i];
        db[i] = b * turn.cosine[i] - a * turn.sine[i];
      }
      if (p.q_weight != nullptr) {
        float a[Row::kEach] = {}, b[Row::kEach] = {}, of_a[Row::kEach], of_b[Row::kEach];
        float scale = 0;
        if (is_there) {
          Row::read(x + at, a);
          Row::read(x + at + Row::kHalf, b);
          scale = p.scales[row * of_both + head];
        }
        const bool is_key = head >= p.heads;
        const float* const weight = (is_key ? p.k_weight : p.q_weight) + column;
        Row::load(weight, of_a);
        Row::load(weight + Row::kHalf, of_b);
        float dot = 0;
#pragma unroll
        for (int i = 0; i < Row::kEach; ++i) {
          const float in_a = da[i] * a[i] * scale, in_b = db[i] * b[i] * scale;
          to_a[0][i] += is_key ? 0.0F : in_a;
          to_a[1][i] += is_key ? in_a : 0.0F;
          to_b[0][i] += is_key ? 0.0F : in_b;
          to_b[1][i] += is_key ? in_b : 0.0F;
          da[i] *= of_a[i];
          db[i] *= of_b[i];
          dot += da[i] * a[i] + db[i] * b[i];
        }
        const float share = Row::sum(dot) * scale * scale / static_cast<float>(2 * Row::kHalf);
#pragma unroll
        for (int i = 0; i < Row::kEach; ++i) {
          da[i] = scale * (da[i] - a[i] * share);
          db[i] = scale * (db[i] - b[i] * share);
        }
      }
      if (!is_there) continue;
      store_floats(dx + at, da);
      store_floats(dx + at + Row::kHalf, db);
    }
  }
  if (p.q_weight == nullptr) return;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
#pragma unroll
    for (int i = 0; i < Row::kEach; ++i) {
#pragma unroll
      for (int apart = kLanes; apart < 32; apart *= 2) {  // lanes with the same columns
        to_a[k][i] += __shfl_xor_sync(0xffffffffU, to_a[k][i], apart);
        to_b[k][i] += __shfl_xor_sync(0xffffffffU, to_b[k][i], apart);
      }
    }
  }
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp && lane < kLanes) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
#pragma unroll
        for (int i = 0; i < Row::kEach; ++i) {
          float& a = sums[k][column + i];
          float& b = sums[k][column + Row::kHalf + i];
          a = w == 0 ? to_a[k][i] : a + to_a[k][i];
          b = w == 0 ? to_b[k][i] : b + to_b[k][i];
        }
      }
    }
    __syncthreads();
  }
  constexpr int kColumns = 4 * Row::kHalf;
  for (int c = static_cast<int>(threadIdx.x); c < kColumns; c += kThreads) {
    args.parts[std::int64_t{blockIdx.x} * kColumns + c] = (&sums[0][0])[c];
  }
}

/// Calls `body` with the lanes of a head as a constant, 0 where it has no pieces of 16 bytes.
template <typename T, class Body>
void by_lanes(std::int32_t head_dim, const Body& body) {
  switch (lanes_of_head<T>(head_dim)) {
    case 2: return body(std::integral_constant<int, 2>{});
    case 4: return body(std::integral_constant<int, 4>{});
    case 8: return body(std::integral_constant<int, 8>{});
    case 16: return body(std::integral_constant<int, 16>{});
    default: return body(std::integral_constant<int, 0>{});
  }
}

std::int64_t rows_of_block(std::int64_t rows) { return (rows + kMostParts - 1) / kMostParts; }

}  // namespace

void rope(const RopeArgs& args) {
  by_type(args.bf16, [&]<typename T>(T) {
    by_lanes<T>(args.head_dim, [&]<int kLanes>(std::integral_constant<int, kLanes>) {
      if constexpr (kLanes > 0) {
        launch(rope_pieces_kernel<T, kLanes>, blocks_for(args.rows, kWarps), kThreads, 0,
               args.stream, args);
      } else {
        launch(rope_kernel<T>, blocks_for(args.rows * (args.heads + args.kv_heads), kWarps),
               kThreads, 0, args.stream, args);
      }
    });
  });
}

std::int64_t rope_parts(std::int64_t rows, std::int64_t head_dim) {
  return blocks_for(rows, rows_of_block(rows)) * 2 * head_dim;
}

void rope_backward(const RopeBackwardArgs& args) {
  const RopeArgs& forward = args.forward;
  const std::int64_t each = rows_of_block(forward.rows);
  const unsigned blocks = blocks_for(forward.rows, each);
  by_type(forward.bf16, [&]<typename T>(T) {
    by_lanes<T>(forward.head_dim, [&]<int kLanes>(std::integral_constant<int, kLanes>) {
      if constexpr (kLanes > 0) {
        launch(rope_pieces_backward_kernel<T, kLanes>, blocks, kThreads, 0, forward.stream, args,
               each);
      } else {
        launch(rope_backward_kernel<T>, blocks, kThreads, 0, forward.stream, args, each);
      }
    });
  });
  if (forward.q_weight == nullptr) return;
  const std::int64_t dim = forward.head_dim;
  sum_parts(args.parts, blocks, dim, 2 * dim, args.accumulate, args.dq_weight, forward.stream);
  sum_parts(args.parts + dim, blocks, dim, 2 * dim, args.accumulate, args.dk_weight,
            forward.stream);
}

}  // namespace switchyard::models::gpu

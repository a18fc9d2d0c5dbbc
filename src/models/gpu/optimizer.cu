// AdamW over all tensors at once, the norm before it, and what moves with a step. Bound by bytes.
#include "comm/split_count.hpp"
#include "models/gpu/launch.cuh"
#include "models/gpu/stages.hpp"

namespace switchyard::models::gpu {
namespace {

constexpr int kThreads = 256;

/// A block adds up the squares of a piece: threads, warps, then the warps in order.
__global__ void squares_kernel(const Piece* pieces, const float* g, double* sums) {
  __shared__ double parts[kThreads / 32];
  const Piece piece = pieces[blockIdx.x];
  const float* const from = g + piece.first;
  double sum = 0;
  const int quads = piece.size / 4;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < quads; i += kThreads) {
    float x[4];
    load4(from + 4 * i, x);
    for (int j = 0; j < 4; ++j) sum += static_cast<double>(x[j]) * static_cast<double>(x[j]);
  }
  const int rest = 4 * quads + static_cast<int>(threadIdx.x);
  if (rest < piece.size) sum += static_cast<double>(from[rest]) * static_cast<double>(from[rest]);
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  sum = 0;
  for (const double part : parts) sum += part;
  sums[blockIdx.x] = sum;
}

/// One block: in thread 0 the sum of all, in an order that the count decides.
__device__ double sum_in_order(const double* sums, std::int64_t count) {
  __shared__ double parts[kThreads / 32];
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < count; i += kThreads) sum += sums[i];
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (const double part : parts) sum += part;
  return sum;
}

__device__ void split_double(double x, float (&part)[kDoubleParts]) {
  for (float& p : part) {
    p = static_cast<float>(x);
    x -= static_cast<double>(p);
  }
}

/// One block.
__global__ void totals_kernel(RankTotalsArgs a) {
  const double sum = sum_in_order(a.squares, a.num_squares);
  float own[kDoubleParts];
  split_double(sum, own);
  // What is beyond a float's range is no number that a step could go by.
  if (!isfinite(own[0])) own[1] = own[2] = 0;
  for (int i = static_cast<int>(threadIdx.x); i < kDoubleParts * a.num_ranks; i += kThreads) {
    a.totals[i] = i / kDoubleParts == a.rank ? own[i % kDoubleParts] : 0.0F;
  }
  float* const counts = a.totals + kDoubleParts * a.num_ranks;
  for (std::int64_t i = threadIdx.x; i < a.layers * a.experts; i += kThreads) {
    const std::int64_t n = a.counts[i / a.experts * a.stride + i % a.experts];
    const SplitCount split = split_count(n);
    counts[2 * i] = split.low;
    counts[2 * i + 1] = split.rest;
  }
}

__global__ void counts_kernel(const float* totals, std::int64_t count, std::int64_t* counts) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  counts[i] = joined_count(totals[2 * i], totals[2 * i + 1]);
}

/// One block: the norm of all, and the step's factors made in double.
__global__ void factors_kernel(const double* sums, std::int64_t count, const float* rank_totals,
                               int num_ranks, const StepInputs* inputs, StepFactors* factors) {
  double sum = sum_in_order(sums, count);
  if (threadIdx.x > 0) return;
  for (int i = 0; rank_totals != nullptr && i < kDoubleParts * num_ranks; i += kDoubleParts) {
    sum += (static_cast<double>(rank_totals[i]) + static_cast<double>(rank_totals[i + 1])) +
           static_cast<double>(rank_totals[i + 2]);
  }
  const double norm = sqrt(sum);
  const StepInputs in = *inputs;
  factors->norm = norm;
  factors->apply = isfinite(norm) ? 1 : 0;
  if (factors->apply == 0) return;
  const std::int64_t steps = ++factors->steps;
  const double bias1 = 1 - pow(in.beta1, static_cast<double>(steps));
  const double bias2 = 1 - pow(in.beta2, static_cast<double>(steps));
  factors->clip = static_cast<float>(in.clip > 0 && norm > in.clip ? in.clip / norm : 1.0);
  factors->beta1 = static_cast<float>(in.beta1);
  factors->rest1 = static_cast<float>(1 - in.beta1);
  factors->beta2 = static_cast<float>(in.beta2);
  factors->rest2 = static_cast<float>(1 - in.beta2);
  factors->decay = static_cast<float>(1 - in.learning_rate * in.weight_decay);
  factors->rate = static_cast<float>(in.learning_rate / bias1);
  factors->root = static_cast<float>(1 / sqrt(bias2));
  factors->epsilon = static_cast<float>(in.epsilon);
}

/// Products and sums are rounded one by one, as on a CPU.
__device__ __forceinline__ void update(const StepFactors& f, float decay, float gradient, float& p,
                                       float& m, float& v) {
  const float g = __fmul_rn(gradient, f.clip);
  m = __fadd_rn(__fmul_rn(f.beta1, m), __fmul_rn(f.rest1, g));
  v = __fadd_rn(__fmul_rn(f.beta2, v), __fmul_rn(__fmul_rn(f.rest2, g), g));
  const float root = __fadd_rn(__fmul_rn(__fsqrt_rn(v), f.root), f.epsilon);
  p = __fsub_rn(__fmul_rn(p, decay), __fdiv_rn(__fmul_rn(f.rate, m), root));
}

/// A float's upper bits as the nearest bf16 number and its lower 16 bits.
__device__ __forceinline__ void split(float p, std::uint32_t& high, std::uint32_t& low) {
  std::uint32_t bits = __float_as_uint(p);
  // A NaN's upper bits could round to those of a zero.
  if ((bits & 0x7fffffffU) > 0x7f800000U) bits = (bits & 0x80000000U) | 0x7fc00000U;
  high = (bits + 0x8000U) >> 16U;
  low = bits & 0xffffU;
}
__device__ __forceinline__ float joined(std::uint32_t high, std::uint32_t low) {
  return __uint_as_float(((high - (low >> 15U)) << 16U) | low);
}

/// Where the values of a piece lie: as floats, with copies in bf16 or without,
struct WholeValues {
  float* p;     // of the piece
  Bf16* typed;  // or null

  __device__ __forceinline__ void load(int i, float (&x)[4]) const { load4(p + i, x); }
  __device__ __forceinline__ void store(int i, const float (&x)[4]) const {
    store4(p + i, x);
    if (typed != nullptr) store4(typed + i, x);
  }
  __device__ __forceinline__ float load(int i) const { return p[i]; }
  __device__ __forceinline__ void store(int i, float x) const {
    p[i] = x;
    if (typed != nullptr) typed[i] = __float2bfloat16(x);
  }
};

/// or split.
struct SplitValues {
  std::uint16_t* high;
  std::uint16_t* low;

  __device__ __forceinline__ void load(int i, float (&x)[4]) const {
    const uint2 h = *reinterpret_cast<const uint2*>(high + i);
    const uint2 l = *reinterpret_cast<const uint2*>(low + i);
    x[0] = joined(h.x & 0xffffU, l.x & 0xffffU);
    x[1] = joined(h.x >> 16U, l.x >> 16U);
    x[2] = joined(h.y & 0xffffU, l.y & 0xffffU);
    x[3] = joined(h.y >> 16U, l.y >> 16U);
  }
  __device__ __forceinline__ void store(int i, const float (&x)[4]) const {
    std::uint32_t h[4], l[4];
    for (int j = 0; j < 4; ++j) split(x[j], h[j], l[j]);
    *reinterpret_cast<uint2*>(high + i) = {h[0] | h[1] << 16U, h[2] | h[3] << 16U};
    *reinterpret_cast<uint2*>(low + i) = {l[0] | l[1] << 16U, l[2] | l[3] << 16U};
  }
  __device__ __forceinline__ float load(int i) const { return joined(high[i], low[i]); }
  __device__ __forceinline__ void store(int i, float x) const {
    std::uint32_t h, l;
    split(x, h, l);
    high[i] = static_cast<std::uint16_t>(h);
    low[i] = static_cast<std::uint16_t>(l);
  }
};

template <typename Values>
__device__ __forceinline__ void update_piece(const AdamWArgs& a, const StepFactors& f,
                                             const Piece& piece, const Values& values) {
  const float decay = piece.decay != 0 ? f.decay : 1.0F;
  const int quads = piece.size / 4;
#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x); i < quads; i += kThreads) {
    const std::int64_t at = piece.first + 4 * i;
    float p[4], g[4], m[4], v[4];
    values.load(4 * i, p);
    load4(a.g + at, g);
    load4(a.m + at, m);
    load4(a.v + at, v);
    for (int j = 0; j < 4; ++j) update(f, decay, g[j], p[j], m[j], v[j]);
    values.store(4 * i, p);
    store4(a.m + at, m);
    store4(a.v + at, v);
  }
  const int rest = 4 * quads + static_cast<int>(threadIdx.x);
  if (rest >= piece.size) return;
  const std::int64_t at = piece.first + rest;
  float p = values.load(rest);
  update(f, decay, a.g[at], p, a.m[at], a.v[at]);
  values.store(rest, p);
}

__global__ void adamw_kernel(AdamWArgs a) {
  const StepFactors f = *a.factors;
  if (f.apply == 0) return;
  const Piece piece = a.pieces[blockIdx.x];
  if (piece.value < 0) {
    update_piece(
        a, f, piece,
        SplitValues{static_cast<std::uint16_t*>(a.typed) + piece.first, a.low + piece.first});
  } else {
    Bf16* const typed = a.typed == nullptr ? nullptr : static_cast<Bf16*>(a.typed) + piece.first;
    update_piece(a, f, piece, WholeValues{a.p + piece.value, typed});
  }
}

__global__ void split_kernel(const float* p, std::int64_t count, std::uint16_t* high,
                             std::uint16_t* low) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) SplitValues{high + i, low + i}.store(0, p[i]);
}
__global__ void join_kernel(const std::uint16_t* high, const std::uint16_t* low, std::int64_t count,
                            float* p) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) p[i] = joined(high[i], low[i]);
}

__global__ void to_bf16_kernel(const float* p, std::int64_t quads, Bf16* typed) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= quads) return;
  float x[4];
  load4(p + 4 * i, x);
  store4(typed + 4 * i, x);
}

/// Integers: no order shows.
__global__ void count_kernel(CountArgs p) {
  extern __shared__ std::int32_t shared_counts[];  // [2][E]
  for (int e = static_cast<int>(threadIdx.x); e < 2 * p.experts; e += kThreads) {
    shared_counts[e] = 0;
  }
  __syncthreads();
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < p.assignments;
       i += stride) {
    const std::int32_t e = p.expert[i];
    if (e < 0 || e >= p.experts) continue;
    atomicAdd(shared_counts + e, 1);
    if (p.kept == nullptr || p.kept[i] != 0) atomicAdd(shared_counts + p.experts + e, 1);
  }
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < p.experts; e += kThreads) {
    using Word = unsigned long long;  // NOLINT(google-runtime-int): atomicAdd's
    atomicAdd(reinterpret_cast<Word*>(p.counts + e), static_cast<Word>(shared_counts[e]));
    atomicAdd(reinterpret_cast<Word*>(p.counts_kept + e),
              static_cast<Word>(shared_counts[p.experts + e]));
  }
}

__global__ void move_bias_kernel(const std::int64_t* counts, std::int32_t experts, double rate,
                                 const StepFactors* factors, float* bias) {
  if (factors->apply == 0) return;
  std::int64_t sum = 0;
  for (int e = 0; e < experts; ++e) sum += counts[e];
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += kThreads) {
    const std::int64_t more = sum - counts[e] * experts;  // than the mean, times E
    const double move = more > 0 ? rate : more < 0 ? -rate : 0.0;
    bias[e] = static_cast<float>(static_cast<double>(bias[e]) + move);
  }
}

}  // namespace

void squares_of_pieces(const Piece* pieces, std::int64_t num_pieces, const float* g, double* sums,
                       cudaStream_t stream) {
  if (num_pieces == 0) return;
  launch(squares_kernel, static_cast<unsigned>(num_pieces), kThreads, 0, stream, pieces, g, sums);
}

void make_rank_totals(const RankTotalsArgs& args) {
  launch(totals_kernel, 1, kThreads, 0, args.stream, args);
}

void read_rank_counts(const float* totals, int num_ranks, std::int64_t count, std::int64_t* counts,
                      cudaStream_t stream) {
  launch(counts_kernel, blocks_for(count, kThreads), kThreads, 0, stream,
         totals + kDoubleParts * num_ranks, count, counts);
}

void adamw(const AdamWArgs& args) {
  squares_of_pieces(args.pieces, args.num_normed, args.g, args.sums, args.stream);
  launch(factors_kernel, 1, kThreads, 0, args.stream, args.sums, args.num_normed, args.rank_totals,
         args.num_ranks, args.inputs, args.factors);
  if (args.num_pieces == 0) return;
  launch(adamw_kernel, static_cast<unsigned>(args.num_pieces), kThreads, 0, args.stream, args);
}

void to_bf16(const float* p, std::int64_t count, void* typed, cudaStream_t stream) {
  launch(to_bf16_kernel, blocks_for(count / 4, kThreads), kThreads, 0, stream, p, count / 4,
         static_cast<Bf16*>(typed));
}

void split_floats(const float* p, std::int64_t count, void* typed, std::uint16_t* low,
                  cudaStream_t stream) {
  launch(split_kernel, blocks_for(count, kThreads), kThreads, 0, stream, p, count,
         static_cast<std::uint16_t*>(typed), low);
}

void join_floats(const void* typed, const std::uint16_t* low, std::int64_t count, float* p,
                 cudaStream_t stream) {
  launch(join_kernel, blocks_for(count, kThreads), kThreads, 0, stream,
         static_cast<const std::uint16_t*>(typed), low, count, p);
}

void count_experts(const CountArgs& args) {
  const unsigned blocks = std::min(64U, blocks_for(args.assignments, 4L * kThreads));
  launch(count_kernel, blocks, kThreads, static_cast<std::size_t>(8 * args.experts), args.stream,
         args);
}

void move_bias(const std::int64_t* counts, std::int32_t experts, double rate,
               const StepFactors* factors, float* bias, cudaStream_t stream) {
  launch(move_bias_kernel, 1, kThreads, 0, stream, counts, experts, rate, factors, bias);
}

}  // namespace switchyard::models::gpu

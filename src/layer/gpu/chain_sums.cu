// The sums of a chain on a GPU, enqueued between its iterations, with what the next one takes in
// the compute type written in the same pass. Bound by memory.
#include <optional>

#include "core/gpu/cuda_memory.hpp"
#include "core/gpu/each.cuh"
#include "core/gpu/pack16.cuh"
#include "layer/chain_sums.hpp"
#include "layer/gpu/host_staging.hpp"

namespace switchyard {
namespace {

using each::blocks_for;
using each::for_each;
using each::kThreads;

struct SumParams {
  const float* part;  // [T, H]
  const void* from;   // [T, H], or null: not added
  const void* whole;  // [T, H], or null: not added
  float* to;          // [T, H], or null
  void* out;          // [T, H], or null
  void* next;         // [T, H], or null
  std::int64_t quads;
  DType from_type, whole_type, out_type, next_type;
};

struct LossParams {
  const double* values;
  double* to;
  const std::int64_t* counts;
  std::int64_t* to_counts;
  std::int64_t num_values, num_counts;
  bool first;
};

__device__ __forceinline__ void load_quad(const void* from, DType type, std::int64_t quad,
                                          float (&x)[4]) {
  switch (type) {
    case DType::kBF16: return load_floats(static_cast<const __nv_bfloat16*>(from) + 4 * quad, x);
    case DType::kF16: return load_floats(static_cast<const __half*>(from) + 4 * quad, x);
    default: return load_floats(static_cast<const float*>(from) + 4 * quad, x);
  }
}

__device__ __forceinline__ void store_quad(void* to, DType type, std::int64_t quad,
                                           const float (&x)[4]) {
  switch (type) {
    case DType::kBF16: return store_floats(static_cast<__nv_bfloat16*>(to) + 4 * quad, x);
    case DType::kF16: return store_floats(static_cast<__half*>(to) + 4 * quad, x);
    default: return store_floats(static_cast<float*>(to) + 4 * quad, x);
  }
}

__device__ __forceinline__ void add_quad(const void* from, DType type, std::int64_t quad,
                                         float (&sum)[4]) {
  float x[4];
  load_quad(from, type, quad, x);
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] = __fadd_rn(x[i], sum[i]);
}

__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ SumParams p) {
  for_each(p.quads, [&](std::int64_t quad) {
    const float4 part = __ldcs(reinterpret_cast<const float4*>(p.part) + quad);
    float sum[4] = {part.x, part.y, part.z, part.w};
    if (p.from != nullptr) add_quad(p.from, p.from_type, quad, sum);
    if (p.next != nullptr) store_quad(p.next, p.next_type, quad, sum);
    if (p.to != nullptr) store_quad(p.to, DType::kF32, quad, sum);
    if (p.out == nullptr) return;
    if (p.whole != nullptr) add_quad(p.whole, p.whole_type, quad, sum);
    store_quad(p.out, p.out_type, quad, sum);
  });
}

/// Few numbers: a block.
__global__ void __launch_bounds__(kThreads) loss_kernel(const __grid_constant__ LossParams p) {
  const auto add_all = [&](const auto* from, std::int64_t size, auto* to) {
    for (std::int64_t i = threadIdx.x; i < size; i += kThreads) {
      to[i] = p.first ? from[i] : to[i] + from[i];
    }
  };
  add_all(p.values, p.num_values, p.to);
  add_all(p.counts, p.num_counts, p.to_counts);
}

class CudaChainSums final : public ChainSums {
 public:
  CudaChainSums(const ChainConfig& chain, DType compute, std::int64_t max_tokens,
                std::int64_t max_host_tokens, std::int64_t hidden)
      : ChainSums(chain), compute_(compute) {
    // Made anew later it would wait for the device, where ranks may wait for this one.
    (void)going_on_.matrix<float>(max_tokens, hidden);
    (void)made_.matrix<float>(max_tokens, hidden);
    (void)next_.matrix(compute_, max_tokens, hidden);
    (void)tokens_.matrix(DType::kF32, max_host_tokens, hidden);
    (void)out_.matrix(DType::kF32, max_host_tokens, hidden);
    make_staging(static_cast<std::size_t>(8 * max_host_tokens * hidden));
    SWITCHYARD_CUDA(cudaStreamCreateWithFlags(&own_stream_, cudaStreamNonBlocking));
    // A first launch may wait for the device too.
    sum_kernel<<<1, kThreads, 0, own_stream_>>>(SumParams{});
    loss_kernel<<<1, kThreads, 0, own_stream_>>>(LossParams{});
    SWITCHYARD_CUDA(cudaGetLastError());
    SWITCHYARD_CUDA(cudaStreamSynchronize(own_stream_));
  }
  ~CudaChainSums() override { cudaStreamDestroy(own_stream_); }
  CudaChainSums(const CudaChainSums&) = delete;
  CudaChainSums& operator=(const CudaChainSums&) = delete;

  void* begin(const ForwardArgs& args) override {
    const bool in_host_memory =
        args.tokens.rows == 0 || (!is_on_device(args.tokens.data) && !is_on_device(args.out.data));
    execution_.stream = args.stream == nullptr && in_host_memory ? own_stream_ : args.stream;
    execution_.recorder = args.recorder;
    staging_->begin();
    return execution_.stream;
  }
  void begin(const BackwardArgs& args) override {
    execution_.stream = args.stream;
    execution_.recorder = args.recorder;
  }
  Matrix<float> going_on(std::int64_t rows, std::int64_t cols) override {
    return going_on_.matrix<float>(rows, cols);
  }
  Matrix<float> made(std::int64_t rows, std::int64_t cols) override {
    return made_.matrix<float>(rows, cols);
  }
  RawMatrix next(std::int64_t rows, std::int64_t cols) override {
    if (compute_ == DType::kF32) return {};
    return next_.matrix(compute_, rows, cols);
  }

  ConstRawMatrix within_reach(ConstRawMatrix tokens) override {
    if (tokens.rows == 0 || is_on_device(tokens.data)) return tokens;
    const auto bytes = static_cast<std::size_t>(tokens.bytes());
    make_staging(static_cast<std::size_t>(8 * tokens.rows * tokens.cols));
    const RawMatrix copy = tokens_.matrix(tokens.dtype, tokens.rows, tokens.cols);
    SWITCHYARD_CUDA(cudaMemcpyAsync(copy.data, staging_->keep(tokens.data, bytes), bytes,
                                    cudaMemcpyHostToDevice, stream()));
    return copy;
  }
  RawMatrix place_of(RawMatrix out) override {
    if (out.rows == 0 || is_on_device(out.data)) return out;
    if (!staging_->used()) make_staging(static_cast<std::size_t>(8 * out.rows * out.cols));
    return out_.matrix(out.dtype, out.rows, out.cols);
  }
  bool bring(ConstRawMatrix placed, RawMatrix out) override {
    if (placed.data != out.data) {
      // Not before the last exchange is over: copies of ranks share queues.
      SWITCHYARD_CUDA(cudaStreamSynchronize(stream()));
      staging_->download(out.data, placed.data, static_cast<std::size_t>(placed.bytes()), stream());
    }
    return staging_->used();
  }
  void finish() override { staging_->finish(); }

  void add(const Sum& sum) override {
    const std::int64_t quads = sum.to.size() / 4;
    if (quads == 0) return;
    const ScopedStage stage(execution_, "residual", work_of(sum));
    const bool inner = chain().inner_residual;
    const bool outer = chain().outer_residual && sum.out.data != nullptr;
    const SumParams params{.part = sum.part.data,
                           .from = inner ? sum.from.data : nullptr,
                           .whole = outer ? sum.whole.data : nullptr,
                           .to = sum.out.data == nullptr ? sum.to.data : nullptr,
                           .out = sum.out.data,
                           .next = sum.next.data,
                           .quads = quads,
                           .from_type = sum.from.dtype,
                           .whole_type = sum.whole.dtype,
                           .out_type = sum.out.dtype,
                           .next_type = sum.next.dtype};
    sum_kernel<<<blocks_for(quads), kThreads, 0, stream()>>>(params);
    SWITCHYARD_CUDA(cudaGetLastError());
  }
  void add(const LossSum& sum) override {
    loss_kernel<<<1, kThreads, 0, stream()>>>({.values = sum.values.data,
                                               .to = sum.to.data,
                                               .counts = sum.counts.data,
                                               .to_counts = sum.to_counts.data,
                                               .num_values = sum.values.size(),
                                               .num_counts = sum.counts.size(),
                                               .first = sum.first});
    SWITCHYARD_CUDA(cudaGetLastError());
  }
  void clear(void* from, std::size_t bytes) override {
    SWITCHYARD_CUDA(cudaMemsetAsync(from, 0, bytes, stream()));
  }

 private:
  [[nodiscard]] cudaStream_t stream() const { return static_cast<cudaStream_t>(execution_.stream); }
  void make_staging(std::size_t bytes) {
    constexpr std::size_t kPieces = 2 * 256;
    if (staging_ && bytes <= staged_) return;
    staging_.emplace(bytes + kPieces);
    staged_ = bytes;
  }

  DType compute_;
  cudaStream_t own_stream_ = nullptr;
  Execution execution_{.backend = Backend::kCuda};
  DeviceBuffer going_on_, made_, next_, tokens_, out_;
  std::optional<HostStaging> staging_;
  std::size_t staged_ = 0;
};

}  // namespace

std::unique_ptr<ChainSums> make_cuda_chain_sums(const ChainConfig& chain, DType compute,
                                                std::int64_t max_tokens,
                                                std::int64_t max_host_tokens, std::int64_t hidden) {
  return std::make_unique<CudaChainSums>(chain, compute, max_tokens, max_host_tokens, hidden);
}

}  // namespace switchyard

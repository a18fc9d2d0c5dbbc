#pragma once

#include <algorithm>
#include <type_traits>

#include "models/gpu/generation/attend_rows.cuh"
#include "models/gpu/generation/likeliest.cuh"
#include "models/gpu/generation/persistent/barrier.cuh"
#include "models/gpu/generation/persistent/experts.cuh"
#include "models/gpu/generation/persistent/mma_product.cuh"
#include "models/gpu/generation/row_makers.cuh"

namespace switchyard::models::gpu {

/// Bytes of a router's gate that every block reads for itself; of a larger one a warp has an
/// expert, and the blocks meet once more.
inline constexpr int kGateOfBlock = 32 << 10;

/// A block of the grid that goes through the layers, with at most kRows rows; kLanes threads have a
/// cached position, kGroup heads of queries share it.
template <typename T, int kRows, int kLanes, int kGroup>
class StepBlock {
  static constexpr bool kMma = kByMma<T, kRows>;

 public:
  struct alignas(16) Shared {
    Choices choices;
    float router_logits[kRows][kMostRouted];
    float sums[kStepWarps];
    Best best[kStepWarps][kRows];
    std::conditional_t<kMma, MmaParts, int> parts;
  };

  __device__ __forceinline__ StepBlock(const PersistentStepArgs& args, Shared& shared, int4* room)
      : p_(args),
        shared_(shared),
        layers_(reinterpret_cast<const PersistentLayer*>(room)),
        room_(room + kPacksOfLayer * args.num_layers),
        barrier_(args.barrier),
        position_(args.place->next) {
    const int4* const from = reinterpret_cast<const int4*>(args.layers);
    const int packs = kPacksOfLayer * args.num_layers;
    for (int i = thread(); i < packs; i += kStepThreads) room[i] = from[i];
    __syncthreads();
  }

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (int l = 0; l < p_.num_layers; ++l) {
      project(l);
      barrier_.arrive();
      attend(l);
      barrier_.arrive();
      project_out(l);
      barrier_.arrive();
      run_experts(l);
      barrier_.arrive();
    }
    head();
    barrier_.arrive();
    barrier_.wait();
    tell();
  }

 private:
  static constexpr int kPacksOfLayer = sizeof(PersistentLayer) / sizeof(int4);
  static_assert(sizeof(PersistentLayer) % sizeof(int4) == 0);

  static __device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x); }
  [[nodiscard]] __device__ __forceinline__ T* rows() const { return reinterpret_cast<T*>(room_); }
  /// Numbers from one to the next of rows of `size` in shared memory.
  static __device__ __forceinline__ int stride_of(int size) {
    return padded_packs(size / kPack<T>) * kPack<T>;
  }
  /// The stream in front of layer l: the first one's lies in the table.
  [[nodiscard]] __device__ __forceinline__ const float* stream(int l, int row) const {
    if (l > 0) return p_.x + row * p_.hidden;
    return p_.table + std::int64_t{p_.ids[row]} * p_.hidden;
  }

  /// The normed rows into shared memory; waits for the stage before, but of a step's first.
  template <class RowAt>
  __device__ __forceinline__ void normalise(const float* weight, bool waits, const RowAt& row_at) {
    prefetch_row<kStepThreads>(weight, p_.hidden);
    if (waits) barrier_.wait();
    const auto load = [&](int row, int column, float(&to)[4]) { load4(row_at(row) + column, to); };
    make_normed_rows<T, kRows, kStepThreads>(load, p_.rows, p_.hidden, weight, p_.epsilon, rows(),
                                             stride_of(p_.hidden), shared_.sums);
    __syncthreads();
  }

  /// The product of the rows in shared memory with w [out, in].
  [[nodiscard]] __device__ __forceinline__ auto product_with(const void* w, int in, int out) const {
    if constexpr (kMma) {
      return MmaProduct(w, in, out, p_.rows, shared_.parts);
    } else {
      return RowProduct<T, kRows>(w, in, out, p_.rows);
    }
  }

  /// Queries, keys and values.
  __device__ __forceinline__ void project(int l) {
    const PersistentLayer& layer = layers_[l];
    const int size = (p_.heads + 2 * p_.kv_heads) * p_.head_dim;
    const auto nothing = [](int, int) { return 0.0F; };
    auto product = product_with(layer.qkv, p_.hidden, size);
    product.begin(nothing);
    normalise(layer.norm1, l > 0, [&](int row) { return stream(l, row); });
    T* const to = static_cast<T*>(p_.qkv);
    product.run(rows(), nothing,
                [&](int row, int out, float y) { store(to + row * size + out, y); });
  }

  __device__ __forceinline__ void attend(int l) {
    const PersistentLayer& layer = layers_[l];
    AttendArgs args;
    args.qkv = p_.qkv;
    args.q_weight = layer.q_norm;
    args.k_weight = layer.k_norm;
    args.cosine = p_.cosine;
    args.sine = p_.sine;
    args.epsilon = p_.epsilon;
    args.cache = {layer.keys, layer.values, p_.capacity, p_.cache_row};
    args.first = position_;
    args.rows = p_.rows;
    args.heads = p_.heads;
    args.kv_heads = p_.kv_heads;
    args.head_dim = p_.head_dim;
    args.splits = p_.splits;
    args.mixed = p_.mixed;
    args.parts = p_.parts;
    args.stats = p_.stats;
    using Block = AttendBlock<T, kLanes, kGroup, kStepWarps>;
    auto& room = *reinterpret_cast<typename Block::Room*>(room_);
    const int of_kv = p_.heads / p_.kv_heads;
    const int items = p_.rows * p_.kv_heads * ((of_kv + kGroup - 1) / kGroup) * p_.splits;
    int i = static_cast<int>(blockIdx.x);
    if (i >= items) return barrier_.wait();
    for (bool first = true; i < items; i += static_cast<int>(gridDim.x), first = false) {
      Block block(args, i / p_.splits, i % p_.splits, room);
      if (first) {
        block.ask_first(1);
        barrier_.wait();
      }
      block.run();
      __syncthreads();
    }
  }

  /// middle = the stream + what attention gives.
  __device__ __forceinline__ void project_out(int l) {
    const int of_q = p_.heads * p_.head_dim;
    const auto before = [&](int row, int out) { return stream(l, row)[out]; };
    auto product = product_with(layers_[l].o, of_q, p_.hidden);
    product.begin(before);
    barrier_.wait();
    make_attended_rows<T, kRows, kStepThreads, 4>(
        {p_.mixed, p_.parts, p_.stats, p_.splits, p_.heads}, p_.rows, of_q, rows(),
        stride_of(of_q));
    __syncthreads();
    product.run(rows(), before,
                [&](int row, int out, float y) { p_.middle[row * p_.hidden + out] = y; });
  }

  /// x = middle + what the experts give.
  __device__ __forceinline__ void run_experts(int l) {
    const PersistentLayer& layer = layers_[l];
    const int top_k = choose(layer);
    const ExpertWeights experts = experts_of<T>(layer, p_.hidden);
    T* const inner = static_cast<T*>(p_.inner);
    gate_and_up<T, kRows>(experts, room_, padded_packs(experts.packs_in), shared_.choices, inner);
    barrier_.arrive();
    DownProduct<T, kRows> down(experts, shared_.choices);
    down.begin();
    const int outputs = down.outs() * p_.rows;
    const auto index_of = [&](int i, int& row, int& out) {
      row = i / down.outs();
      out = i - row * down.outs();
      return row * p_.hidden + down.first() + out;
    };
    int row = 0, out = 0;
    float before = thread() < outputs ? p_.middle[index_of(thread(), row, out)] : 0.0F;
    barrier_.wait();

    const int stride = padded_packs(experts.packs_inner), slots = p_.rows * top_k;
    fetch_inner(slots, experts.packs_inner, stride);
    float* const sums = reinterpret_cast<float*>(room_ + (slots + 1) * stride);
    __syncthreads();
    down.run(room_, stride, slots, sums);
    __syncthreads();
#pragma unroll 1
    for (int i = thread(); i < outputs; i += kStepThreads) {
      const int at = index_of(i, row, out);
      if (i != thread()) before = p_.middle[at];
      float sum = 0;
#pragma unroll 1
      for (int k = 0; k < top_k; ++k) {
        const int slot = row * top_k + k;
        const int used = shared_.choices.index[shared_.choices.expert[slot]];
        sum = fmaf(shared_.choices.share[slot], down.get(sums, used, out, row), sum);
      }
      T rounded;
      store(&rounded, sum);
      p_.x[at] = before + to_float(rounded);
    }
  }

  /// Inner rows into shared memory, and a row of zeros behind them.
  __device__ __forceinline__ void fetch_inner(int slots, int packs, int stride) {
    const int4* const from = static_cast<const int4*>(p_.inner);
#pragma unroll 1
    for (int slot = thread() / 32; slot <= slots; slot += kStepWarps) {
#pragma unroll 2
      for (int i = thread() % 32; i < packs; i += 32) {
        room_[slot * stride + i] = slot < slots ? from[slot * packs + i] : int4{};
      }
    }
  }

  /// The normed rows, and the experts of each. @returns How many a row has.
  __device__ __forceinline__ int choose(const PersistentLayer& layer) {
    const auto middle = [&](int row) { return p_.middle + row * p_.hidden; };
    Choices& choices = shared_.choices;
    if (layer.gate == nullptr) {
      clear_choices(choices, 1);
      normalise(layer.norm2, true, middle);
      if (thread() < p_.rows) {
        choices.expert[thread()] = 0;
        choices.share[thread()] = 1;
        choices.set(0, thread(), thread());
      }
      find_used(choices, 1);
      return 1;
    }
    const bool apart = 4 * p_.experts * p_.hidden > kGateOfBlock;
    const int warp = thread() / 32;
    RouterProduct<T> product(layer.gate, p_.experts, p_.hidden, apart ? warp_of_grid() : warp,
                             apart ? warps_of_grid() : kStepWarps);
    clear_choices(choices, p_.experts);
    normalise(layer.norm2, true, middle);
    product.run(rows(), stride_of(p_.hidden), p_.rows, [&](int row, int e, float logit) {
      float* const to = apart ? p_.router_logits : shared_.router_logits[0];
      to[row * (apart ? p_.experts : kMostRouted) + e] = logit;
    });
    if (apart) {
      barrier_.arrive();
      barrier_.wait();
      if (warp < p_.rows) {
        for (int e = thread() % 32; e < p_.experts; e += 32) {
          shared_.router_logits[warp][e] = p_.router_logits[warp * p_.experts + e];
        }
        __syncwarp();
      }
    } else {
      __syncthreads();
    }
    if (warp < p_.rows) {
      const ChoiceArgs args{layer.bias, p_.experts, p_.top_k, p_.renormalize, p_.scale};
      std::int32_t* const experts = choices.expert + warp * p_.top_k;
      float* const shares = choices.share + warp * p_.top_k;
      choose_experts(args, shared_.router_logits[warp], experts, shares);
      __syncwarp();
      const int k = thread() % 32;
      if (k < p_.top_k) choices.set(experts[k], warp, warp * p_.top_k + k);
    }
    find_used(choices, p_.experts);
    return p_.top_k;
  }

  /// Logits, and the best of this block's.
  __device__ __forceinline__ void head() {
    const auto nothing = [](int, int) { return 0.0F; };
    auto product = product_with(p_.head, p_.hidden, p_.vocabulary);
    product.begin(nothing);
    normalise(p_.norm, true, [&](int row) { return stream(p_.num_layers, row); });
    Best best = no_best();  // of a row: all of a thread's are of one
    product.run(rows(), nothing, [&](int row, int id, float logit) {
      p_.logits[std::int64_t{row} * p_.vocabulary + id] = logit;
      best = better(best, best_of(logit, id));
    });
    const int lane = thread() % 32;
    if constexpr (kMma) {
#pragma unroll
      for (int i = kRows; i < 32; i *= 2) {
        best = better(best, {__shfl_xor_sync(0xffffffffU, best.logit, i),
                             __shfl_xor_sync(0xffffffffU, best.id, i)});
      }
      if (lane < kRows) shared_.best[thread() / 32][lane] = best;
    } else {
      if (lane % (32 / kRows) == 0) shared_.best[thread() / 32][lane / (32 / kRows)] = best;
    }
    __syncthreads();
    if (thread() >= p_.rows) return;
    best = no_best();
#pragma unroll 1
    for (int w = 0; w < kStepWarps; ++w) best = better(best, shared_.best[w][thread()]);
    p_.best[static_cast<int>(blockIdx.x) * p_.rows + thread()] = best;
  }

  /// Blocks have a row each: the best of all blocks'.
  __device__ __forceinline__ void tell() const {
    for (int row = static_cast<int>(blockIdx.x); row < p_.rows;
         row += static_cast<int>(gridDim.x)) {
      Best best = no_best();
      for (int b = thread(); b < static_cast<int>(gridDim.x); b += kStepThreads) {
        best = better(best, p_.best[b * p_.rows + row]);
      }
      best = best_of_block(best);
      if (thread() == 0) {
        p_.ids[row] = max(best.id, 0);
        p_.told[position_ % p_.ring * p_.rows + row] = best.id;
      }
      __syncthreads();
    }
    if (blockIdx.x != 0 || thread() != 0) return;
    *p_.place = {position_, position_ + 1};
    barrier_.finish();
  }

  const PersistentStepArgs& p_;
  Shared& shared_;
  const PersistentLayer* layers_;
  int4* room_;
  GridBarrier barrier_;
  int position_;
};

template <typename T, int kRows, int kLanes, int kGroup>
__global__ void __launch_bounds__(kStepThreads, 1)
    persistent_step_kernel(const __grid_constant__ PersistentStepArgs p) {
  using Block = StepBlock<T, kRows, kLanes, kGroup>;
  extern __shared__ int4 room[];
  auto& shared = *reinterpret_cast<typename Block::Shared*>(room);
  Block(p, shared, room + sizeof(typename Block::Shared) / sizeof(int4)).run();
}

template <typename T, int kRows, int kLanes>
auto step_kernel(const PersistentStepArgs& args) {
  // Queries that share a key are attended to two by two.
  return args.heads == args.kv_heads ? persistent_step_kernel<T, kRows, kLanes, 1>
                                     : persistent_step_kernel<T, kRows, kLanes, 2>;
}
template <typename T, int kRows>
auto step_kernel(const PersistentStepArgs& args) {
  constexpr int kOf32 = 32 / kPack<T>;
  if (args.cache_row <= 32) return step_kernel<T, kRows, kOf32>(args);
  if (args.cache_row <= 64) return step_kernel<T, kRows, 2 * kOf32>(args);
  return step_kernel<T, kRows, 4 * kOf32>(args);
}
/// One row has kernels of its own in bf16.
template <typename T>
auto step_kernel(const PersistentStepArgs& args) {
  constexpr int kFewest = sizeof(T) == 2 ? 1 : kRowsOfStep;
  return args.rows == 1 ? step_kernel<T, kFewest>(args) : step_kernel<T, kRowsOfStep>(args);
}

template <typename T>
std::size_t shared_bytes_of_step(const PersistentStepArgs& args, int blocks) {
  const auto of = [](auto value) { return static_cast<std::size_t>(value); };
  const auto row = [&](std::size_t numbers) {
    return 16 * of(padded_packs(static_cast<int>(numbers) / kPack<T>));
  };
  const std::size_t normed =
      kRowsOfStep * row(std::max(of(args.hidden), of(args.heads) * of(args.head_dim)));
  const std::size_t attend = sizeof(AttendRoom<T, 128 / kPack<T>, 2, kStepWarps>);
  const std::size_t slots = of(args.rows) * of(std::max(args.top_k, 1));
  const std::size_t used = std::min(of(std::max(args.experts, 1)), slots);
  const std::size_t outs = ((of(args.hidden) + of(blocks) - 1) / of(blocks) + 7) / 8 * 8;
  using Down = DownProduct<T, kRowsOfStep>;
  const std::size_t parts = of(args.most_inner) / kPack<T> / Down::kPacks + 1;
  const std::size_t sums = sizeof(float) * kRowsOfStep * used * outs * parts;
  const std::size_t down = (slots + 1) * row(of(args.most_inner)) + sums;
  return sizeof(typename StepBlock<T, kRowsOfStep, 4, 1>::Shared) +
         sizeof(PersistentLayer) * of(args.num_layers) + std::max({normed, attend, down});
}

template <typename T>
bool step_fits(const PersistentStepArgs& args) {
  constexpr int kNumbers = kPack<T>;
  constexpr std::int64_t kMostRows = std::int64_t{1} << 31;  // of a matrix
  const bool sizes = args.rows <= kFewRows && args.experts <= kMostRouted &&
                     args.top_k <= kMostChosen && args.hidden % kNumbers == 0 &&
                     args.heads * args.head_dim % kNumbers == 0 && args.head_dim % 4 == 0 &&
                     std::int64_t{2} * std::max(args.experts, 1) * args.most_inner < kMostRows;
  if (!sizes || device_attribute(cudaDevAttrCooperativeLaunch) == 0) return false;
  const int most = allow_most_shared_memory(reinterpret_cast<const void*>(step_kernel<T>(args)));
  const std::size_t bytes = shared_bytes_of_step<T>(args, num_multiprocessors());
  return bytes <= static_cast<std::size_t>(most);
}

template <typename T>
void launch_step(const PersistentStepArgs& args) {
  const int blocks = num_multiprocessors();
  launch_together(step_kernel<T>(args), blocks, kStepThreads, shared_bytes_of_step<T>(args, blocks),
                  args.stream, args);
}

}  // namespace switchyard::models::gpu

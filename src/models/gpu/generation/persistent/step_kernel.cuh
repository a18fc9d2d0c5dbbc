#pragma once

#include <algorithm>

#include "models/gpu/generation/attend_rows.cuh"
#include "models/gpu/generation/likeliest.cuh"
#include "models/gpu/generation/persistent/barrier.cuh"
#include "models/gpu/generation/persistent/experts.cuh"
#include "models/gpu/generation/row_makers.cuh"

namespace switchyard::models::gpu {

/// Bytes of a router's gate that every block reads for itself; of a larger one a warp has an
/// expert, and the blocks meet once more.
inline constexpr int kGateOfBlock = 32 << 10;

/// Logits of experts first, first + stride, ...: a warp has one of all rows. begin() asks for the
/// first one's weights.
template <typename T, int kRows>
class RouterProduct {
 public:
  __device__ RouterProduct(const float* gate, int experts, int hidden, int first, int stride)
      : gate_(gate), experts_(experts), hidden_(hidden), expert_(first), stride_(stride) {}

  __device__ __forceinline__ void begin() { load(expert_, 0); }

  /// @param put  (row, expert, float), by one lane for each.
  template <class Put>
  __device__ __forceinline__ void run(const T* rows, int num_rows, const Put& put) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (; expert_ < experts_; expert_ += stride_) {
      float sum[kRows] = {};
      for (int base = 0; base < hidden_; base += kColumns) {
#pragma unroll
        for (int i = 0; i < kFours; ++i) {
          const int column = base + 4 * (lane + 32 * i);
          if (column >= hidden_) continue;
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            float x[4];
            load4(rows + r * hidden_ + column, x);
#pragma unroll
            for (int j = 0; j < 4; ++j) sum[r] = fmaf(ahead_[i][j], x[j], sum[r]);
          }
        }
        const bool last = base + kColumns >= hidden_;
        load(last ? expert_ + stride_ : expert_, last ? 0 : base + kColumns);
      }
      const float total = sums_of_warp(sum);
      const int row = lane / (32 / kRows);
      if (lane % (32 / kRows) == 0 && row < num_rows) put(row, expert_, total);
    }
  }

 private:
  static constexpr int kFours = 4, kColumns = 128 * kFours;

  __device__ __forceinline__ void load(int expert, int base) {
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const int column = base + 4 * (static_cast<int>(threadIdx.x) % 32 + 32 * i);
      if (expert >= experts_ || column >= hidden_) continue;
      load4(gate_ + std::int64_t{expert} * hidden_ + column, ahead_[i]);
    }
  }

  const float* gate_;
  int experts_, hidden_, expert_, stride_;
  float ahead_[kFours][4];
};

/// A block of the grid that goes through the layers.
template <typename T, int kRows, int kGroup>
class StepBlock {
 public:
  struct Shared {
    Choices<kRows> choices;
    float router_logits[kRows][kMostRouted];
    float sums[kStepWarps];
    Best best[kRows][kStepWarps];
  };

  __device__ StepBlock(const PersistentStepArgs& args, Shared& shared, int4* room)
      : p_(args),
        shared_(shared),
        layers_(reinterpret_cast<const PersistentLayer*>(room)),
        room_(room + kPacksOfLayer * args.num_layers),
        barrier_(args.barrier),
        position_(args.place->next) {
    const int4* const from = reinterpret_cast<const int4*>(args.layers);
    for (int i = thread(); i < kPacksOfLayer * args.num_layers; i += kStepThreads)
      room[i] = from[i];
    __syncthreads();
  }

  __device__ __forceinline__ void run() {
    for (int l = 0; l < p_.num_layers; ++l) {
      project(l);
      barrier_.arrive();
      barrier_.wait();
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
  /// The stream in front of layer l: the first one's lies in the table.
  [[nodiscard]] __device__ __forceinline__ const float* stream(int l, int row) const {
    if (l > 0) return p_.x + row * p_.hidden;
    return p_.table + std::int64_t{p_.ids[row]} * p_.hidden;
  }

  /// The normed rows into shared memory; waits for the stage before, but of a step's first.
  template <class RowAt>
  __device__ __forceinline__ void normalise(const float* weight, bool waits, const RowAt& row_at) {
    NormWeights<kRows, kStepThreads> weights;
    weights.load(weight, p_.hidden);
    if (waits) barrier_.wait();
    const auto load = [&](int row, int column, float(&to)[4]) { load4(row_at(row) + column, to); };
    make_normed_rows<T, kRows, kStepThreads>(load, p_.rows, p_.hidden, weights, weight, p_.epsilon,
                                             rows(), shared_.sums);
    __syncthreads();
  }

  /// Queries, keys and values.
  __device__ __forceinline__ void project(int l) {
    const PersistentLayer& layer = layers_[l];
    const int size = (p_.heads + 2 * p_.kv_heads) * p_.head_dim;
    const auto nothing = [](int, int) { return 0.0F; };
    RowProduct<T, kRows> product(layer.qkv, p_.hidden, size, p_.rows);
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
    constexpr int kLanesOf32 = 32 / kPack<T>;
    if (p_.cache_row <= 32) {
      attend_by<kLanesOf32>(args);
    } else if (p_.cache_row <= 64) {
      attend_by<2 * kLanesOf32>(args);
    } else {
      attend_by<4 * kLanesOf32>(args);
    }
  }
  template <int kLanes>
  __device__ __forceinline__ void attend_by(const AttendArgs& args) {
    auto& room = *reinterpret_cast<AttendRoom<T, kLanes, kGroup, kStepWarps>*>(room_);
    const int of_kv = p_.heads / p_.kv_heads;
    const int items = p_.rows * p_.kv_heads * ((of_kv + kGroup - 1) / kGroup);
    for (int i = static_cast<int>(blockIdx.x); i < items * p_.splits;
         i += static_cast<int>(gridDim.x)) {
      attend_item<T, kLanes, kGroup, kStepWarps>(args, i / p_.splits, i % p_.splits, room);
      __syncthreads();
    }
  }

  /// middle = the stream + what attention gives.
  __device__ __forceinline__ void project_out(int l) {
    const int of_q = p_.heads * p_.head_dim;
    const auto before = [&](int row, int out) { return stream(l, row)[out]; };
    RowProduct<T, kRows> product(layers_[l].o, of_q, p_.hidden, p_.rows);
    product.begin(before);
    barrier_.wait();
    float* const shares = reinterpret_cast<float*>(rows() + kRows * of_q);
    make_attended_rows<T, kRows, kStepThreads>({p_.mixed, p_.parts, p_.stats, p_.splits, p_.heads},
                                               p_.rows, of_q, rows(), shares);
    __syncthreads();
    product.run(rows(), before,
                [&](int row, int out, float y) { p_.middle[row * p_.hidden + out] = y; });
  }

  /// x = middle + what the experts give.
  __device__ __forceinline__ void run_experts(int l) {
    const PersistentLayer& layer = layers_[l];
    const int top_k = choose(layer);
    T* const inner = static_cast<T*>(p_.inner);
    gate_and_up<T, kRows>(layer, p_.hidden, rows(), shared_.choices, inner);
    DownProduct<T, kRows> down(layer, p_.hidden, shared_.choices);
    down.begin();
    barrier_.arrive();
    barrier_.wait();
    down.run(inner, p_.rows * top_k, p_.rows, top_k, p_.middle, p_.x, room_);
  }

  /// The normed rows, and the experts of each. @returns How many a row has.
  __device__ __forceinline__ int choose(const PersistentLayer& layer) {
    const auto middle = [&](int row) { return p_.middle + row * p_.hidden; };
    Choices<kRows>& choices = shared_.choices;
    if (layer.gate == nullptr) {
      normalise(layer.norm2, true, middle);
      if (thread() < kRows) {
        choices.expert[thread()] = 0;
        choices.share[thread()] = 1;
      }
      __syncthreads();
      find_used(choices, p_.rows, 1, 1);
      return 1;
    }
    const bool apart = 4 * p_.experts * p_.hidden > kGateOfBlock;
    const int warp = thread() / 32;
    RouterProduct<T, kRows> product(layer.gate, p_.experts, p_.hidden,
                                    apart ? warp_of_grid() : warp,
                                    apart ? warps_of_grid() : kStepWarps);
    product.begin();
    normalise(layer.norm2, true, middle);
    if (apart) {
      product.run(rows(), p_.rows, [&](int row, int e, float logit) {
        p_.router_logits[row * p_.experts + e] = logit;
      });
      barrier_.arrive();
      barrier_.wait();
      for (int i = thread(); i < p_.rows * p_.experts; i += kStepThreads) {
        shared_.router_logits[i / p_.experts][i % p_.experts] = p_.router_logits[i];
      }
    } else {
      product.run(rows(), p_.rows,
                  [&](int row, int e, float logit) { shared_.router_logits[row][e] = logit; });
    }
    __syncthreads();
    if (warp < p_.rows) {
      choose_experts({layer.bias, p_.experts, p_.top_k, p_.renormalize, p_.scale},
                     shared_.router_logits[warp], choices.expert + warp * p_.top_k,
                     choices.share + warp * p_.top_k);
    }
    __syncthreads();
    find_used(choices, p_.rows, p_.experts, p_.top_k);
    return p_.top_k;
  }

  /// Logits, and the best of this block's.
  __device__ __forceinline__ void head() {
    const auto nothing = [](int, int) { return 0.0F; };
    RowProduct<T, kRows> product(p_.head, p_.hidden, p_.vocabulary, p_.rows);
    product.begin(nothing);
    normalise(p_.norm, true, [&](int row) { return stream(p_.num_layers, row); });
    Best best = no_best();  // of a row, in the lanes that have its logits
    product.run(rows(), nothing, [&](int row, int id, float logit) {
      p_.logits[std::int64_t{row} * p_.vocabulary + id] = logit;
      best = better(best, best_of(logit, id));
    });
    const int lane = thread() % 32, row = lane / (32 / kRows);
    if (lane % (32 / kRows) == 0) shared_.best[row][thread() / 32] = best;
    __syncthreads();
    if (thread() >= p_.rows) return;
    best = no_best();
    for (int w = 0; w < kStepWarps; ++w) best = better(best, shared_.best[thread()][w]);
    p_.best[static_cast<int>(blockIdx.x) * p_.rows + thread()] = {best.logit, best.id};
  }

  /// Blocks have a row each: the best of all blocks'.
  __device__ __forceinline__ void tell() const {
    for (int row = static_cast<int>(blockIdx.x); row < p_.rows;
         row += static_cast<int>(gridDim.x)) {
      Best best = no_best();
      for (int b = thread(); b < static_cast<int>(gridDim.x); b += kStepThreads) {
        const PersistentBest of_block = p_.best[b * p_.rows + row];
        best = better(best, {of_block.logit, of_block.id});
      }
      best = best_of_block(best);
      if (thread() == 0) {
        p_.ids[row] = max(best.id, 0);
        p_.told[position_ % p_.ring * p_.rows + row] = best.id;
      }
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

template <typename T, int kRows, int kGroup>
__global__ void __launch_bounds__(kStepThreads, 1)
    persistent_step_kernel(const __grid_constant__ PersistentStepArgs p) {
  extern __shared__ int4 room[];
  __shared__ typename StepBlock<T, kRows, kGroup>::Shared shared;
  StepBlock<T, kRows, kGroup>(p, shared, room).run();
}

/// Calls body(the kernel, std::integral_constant<int, its rows>).
template <typename T, class Body>
auto with_step_kernel(const PersistentStepArgs& args, const Body& body) {
  const bool alone = args.heads == args.kv_heads;
  const auto by_rows = [&](auto rows) {
    constexpr int kRows = rows;
    return body(alone ? persistent_step_kernel<T, kRows, 1> : persistent_step_kernel<T, kRows, 2>,
                rows);
  };
  if (args.rows == 1) return by_rows(std::integral_constant<int, 1>{});
  if (args.rows <= 4) return by_rows(std::integral_constant<int, 4>{});
  return by_rows(std::integral_constant<int, 8>{});
}

/// Shared memory that grows with the model.
template <typename T, int kRows>
std::size_t room_of_step(const PersistentStepArgs& args, int blocks) {
  const auto of = [](auto value) { return static_cast<std::size_t>(value); };
  const std::size_t size = sizeof(T), rows = of(args.rows);
  const std::size_t of_q = of(args.heads) * of(args.head_dim);
  const std::size_t shares = args.splits == 1 ? 0 : 4 * rows * of(args.heads) * of(args.splits);
  const std::size_t normed = size * kRows * std::max(of(args.hidden), of_q) + shares;
  const std::size_t attend = sizeof(AttendRoom<T, 128 / kPack<T>, 2, kStepWarps>);
  const std::size_t top_k = of(std::max(args.top_k, 1)), used = of(std::max(args.experts, 1));
  const std::size_t pieces = (of(args.most_inner) / kPack<T> + kPiecePacks - 1) / kPiecePacks;
  const std::size_t outs = (of(args.hidden) + of(blocks) - 1) / of(blocks);
  const std::size_t down = size * rows * top_k * of(args.most_inner) +
                           4 * kRows * outs * std::min(used, rows * top_k) * pieces;
  return sizeof(PersistentLayer) * of(args.num_layers) + std::max({normed, attend, down});
}

template <typename T>
bool step_fits(const PersistentStepArgs& args) {
  constexpr int kNumbers = kPack<T>;
  const bool sizes = args.rows <= kFewRows && args.experts <= kMostRouted &&
                     args.top_k <= kMostChosen && args.hidden % kNumbers == 0 &&
                     args.heads * args.head_dim % kNumbers == 0;
  if (!sizes || device_attribute(cudaDevAttrCooperativeLaunch) == 0) return false;
  return with_step_kernel<T>(args, [&](auto kernel, auto rows) {
    const int most = allow_most_shared_memory(reinterpret_cast<const void*>(kernel));
    return room_of_step<T, rows>(args, num_multiprocessors()) <= static_cast<std::size_t>(most);
  });
}

template <typename T>
void launch_step(const PersistentStepArgs& args) {
  with_step_kernel<T>(args, [&](auto kernel, auto rows) {
    const int blocks = num_multiprocessors();
    launch_together(kernel, blocks, kStepThreads, room_of_step<T, rows>(args, blocks), args.stream,
                    args);
  });
}

}  // namespace switchyard::models::gpu

#pragma once

// First half of the experts of a few tokens: act[row] = activation(w13[e] x[token] + b13[e]).
//
// Bound by the memory that w13 lies in. An item is 8 * kTiles columns of the intermediate of one
// hit expert, that is as many gate rows and as many up rows, so that both halves of a column meet
// in the same lane (plain: 16 * kTiles rows). Blocks take items in turn.

#include "experts/gpu/activation.cuh"
#include "experts/gpu/streaming/args.hpp"
#include "experts/gpu/streaming/coded_consumer.cuh"
#include "experts/gpu/streaming/consumer.cuh"
#include "experts/gpu/streaming/producers.cuh"

namespace switchyard::streaming {

template <typename W, int kTiles>
struct UpWork {
  static constexpr int kMaxTokenTiles = kTiles <= 2 ? 4 : 8;
  using Crew = CrewOf<W, kMaxTokenTiles>;
  static constexpr int kSplit = Crew::kConsumers / kTiles;
  static constexpr int kRows = 16 * kTiles;
  const UpArgs& args;
  const Hit* hits;
  int columns;  // of an item
  int per_hit;  // items
  int num_items;

  __device__ UpWork(const UpArgs& a, const Hit* list, int num_hits) : args(a), hits(list) {
    columns = (a.gated ? 8 : 16) * kTiles;
    per_hit = (a.inner + columns - 1) / columns;
    num_items = per_hit * num_hits;
  }
  __device__ __forceinline__ Item item(int i) const {
    const int hit = i / per_hit;
    return {hits[hit], hit, (i - hit * per_hit) * columns};
  }
  __device__ __forceinline__ Chunks chunks(const Item& item) const {
    return chunks_of(args.pieces, item.hit);
  }
};

/// The items of a block of a kernel that ends with them: in turn.
struct ItemsInTurn {
  int num_items;
  /// Calls body(i, items of this block after it).
  template <typename Body>
  __device__ __forceinline__ void for_each(Body&& body) const {
    const int stride = static_cast<int>(gridDim.x);
    for (int i = static_cast<int>(blockIdx.x); i < num_items; i += stride) {
      body(i, (num_items - 1 - i) / stride);
    }
  }
};

template <typename W, int kTiles, bool kHopper, typename Items>
__device__ __forceinline__ void up_load_weights(const UpArgs& args, const UpWork<W, kTiles>& work,
                                                const Ring& ring, const Items& items,
                                                Cursor& cursor) {
  using T = TokenOf<W>;
  constexpr int kRows = UpWork<W, kTiles>::kRows;
  const int row_bytes = args.hidden * static_cast<int>(sizeof(T));
  WeightProducer<kHopper> producer{ring,  args.pieces, row_bytes, ptx::policy_evict_first(),
                                   false, cursor};
  items.for_each([&](int i, int later_items) {
    const Item item = work.item(i);
    const Chunks chunks = work.chunks(item);
    const int later = later_items * chunks.count;
    const int matrix = args.gated ? 2 * item.hit.expert() : item.hit.expert();
    if constexpr (Weights<W>::kCoded) {
      const auto bytes = static_cast<int>(coded::group_bytes(Weights<W>::kFormat, args.hidden));
      const int groups = args.inner / coded::kGroupRows;
      producer.coded_item(
          2 * kTiles, group_stride<W>(chunks.piece), bytes, chunks, later, [&](int r) {
            const bool is_up = args.gated && r >= kTiles;
            const int j = item.first / coded::kGroupRows + (is_up ? r - kTiles : r);
            const std::int64_t group =
                (static_cast<std::int64_t>(matrix) + (is_up ? 1 : 0)) * groups + min(j, groups - 1);
            return args.w13 + group * bytes;
          });
      return;
    }
    producer.item(&args.w13_map[item.hit.level()], item.first, matrix, kRows, chunks, later,
                  [&](int r) {
                    // Gate rows, then up rows; rows that do not exist repeat the last.
                    const bool is_up = args.gated && r >= kRows / 2;
                    const int j = item.first + (is_up ? r - kRows / 2 : r);
                    const std::int64_t row =
                        (static_cast<std::int64_t>(matrix) + (is_up ? 1 : 0)) * args.inner +
                        min(j, args.inner - 1);
                    return args.w13 + row * row_bytes;
                  });
  });
  cursor = producer.cursor;
}

template <typename W, int kTiles, bool kHopper, typename Items>
__device__ __forceinline__ void up_load_tokens(const UpArgs& args, const UpWork<W, kTiles>& work,
                                               const Ring& ring, const std::int32_t* tokens,
                                               const Items& items, Cursor& cursor) {
  const int row_bytes = args.hidden * static_cast<int>(sizeof(TokenOf<W>));
  TokenProducer<kHopper> producer{ring, row_bytes, cursor};
  items.for_each([&](int i, int) {
    const Item item = work.item(i);
    producer.item(item.hit.rows(), work.chunks(item), [&](int r) {
      const int row = item.hit.row + r;
      const int token = args.row_token != nullptr ? tokens[row] : row;
      return args.x + static_cast<std::int64_t>(token) * row_bytes;
    });
  });
  cursor = producer.cursor;
}

/// The scales of blocks of the groups of rows that begin at columns `upper`, `lower` of `matrix`,
/// the gate's of an expert.
template <typename W>
__device__ __forceinline__ ScalesOf<W> up_scales(const UpArgs& args, int matrix, int upper,
                                                 int lower) {
  if constexpr (std::is_same_v<ScalesOf<W>, BlockScales>) {
    constexpr int kBlock = kE4M3Block;
    const int across = (args.hidden + kBlock - 1) / kBlock;
    const int down = (args.inner + kBlock - 1) / kBlock;
    const float* of = args.scales13 + static_cast<std::int64_t>(matrix) * down * across;
    const auto row = [&](int column) {
      return of + static_cast<std::int64_t>(min(column, args.inner - 1) / kBlock) * across;
    };
    return {row(upper), row(lower) + (args.gated ? static_cast<std::int64_t>(down) * across : 0),
            across};
  } else if constexpr (std::is_same_v<ScalesOf<W>, MatrixScales>) {
    return {args.scales13 + matrix, args.scales13 + matrix + (args.gated ? 1 : 0)};
  } else {
    return {};
  }
}

template <typename W, int kTiles, typename Items>
__device__ __forceinline__ void up_multiply(const UpArgs& args, const UpWork<W, kTiles>& work,
                                            const Ring& ring, float4* parts, const Items& items,
                                            Cursor& cursor, Cursor& part) {
  using T = TokenOf<W>;
  constexpr int kSplit = UpWork<W, kTiles>::kSplit;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  [[maybe_unused]] const int group = static_cast<int>(threadIdx.x) % 32 / 4;
  [[maybe_unused]] constexpr int kRows = UpWork<W, kTiles>::kRows;
  Consumer<typename UpWork<W, kTiles>::Crew> consumer{
      ring, args.hidden * static_cast<int>(sizeof(T)), parts, cursor, part};
  if constexpr (Weights<W>::kCoded) {
    const int tile = warp / kSplit;
    items.for_each([&](int i, int) {
      const Item item = work.item(i);
      // A tile is a group of gate rows and the same of up rows; plain: two groups.
      const int column = item.first + tile * (args.gated ? 8 : 16);
      CodedRows<W> rows{{args.gated ? tile : 2 * tile, args.gated ? tile + kTiles : 2 * tile + 1},
                        2,
                        up_scales<W>(args, (args.gated ? 2 : 1) * item.hit.expert(), column,
                                     column + (args.gated ? 0 : 8))};
      coded_item<W, 2, kSplit>(consumer, warp % kSplit, rows, item.hit.rows(), work.chunks(item));
    });
  } else {
    // A lane's two rows are the gate and the up row of one column.
    const int tile = warp / kSplit;
    const int row0 = args.gated ? tile * 8 + group : tile * 16 + group;
    const int row1 = args.gated ? row0 + kRows / 2 : row0 + 8;
    items.for_each([&](int i, int) {
      const Item item = work.item(i);
      const int rows = item.hit.rows();
      consumer.template item<W, kSplit, kTiles <= 2 ? 4 : 8>(
          warp % kSplit, row0, row1, rows, work.chunks(item),
          [&](const auto& sums) { consumer.hand_over(sums, rows); });
    });
  }
  cursor = consumer.cursor;
  part = consumer.part;
}

/// The biases of a lane's two rows of a tile.
template <bool kGated>
__device__ __forceinline__ float2 up_bias(const UpArgs& args, const Item& item, int tile) {
  if (args.b13 == nullptr) return {};
  const int column = item.first + tile * (kGated ? 8 : 16) + static_cast<int>(threadIdx.x) % 32 / 4;
  const float* bias = args.b13 + static_cast<std::int64_t>(item.hit.expert()) *
                                     (kGated ? 2 * args.inner : args.inner);
  const auto of = [&](int i) { return __ldg(bias + min(i, args.inner - 1)); };
  if constexpr (kGated) return {of(column), __ldg(bias + args.inner + min(column, args.inner - 1))};
  return {of(column), of(column + 8)};
}

template <typename T, Activation kKind, bool kGated>
__device__ __forceinline__ void up_store(const UpArgs& args, const Item& item, int tile, int first,
                                         const float4& sum, const float2& bias) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = lane / 4;
  const ActivationParams params{args.activation, args.alpha, args.limit};
  T* act = static_cast<T*>(args.act);
#pragma unroll
  for (int half = 0; half < (kGated ? 1 : 2); ++half) {
    const int column = item.first + tile * (kGated ? 8 : 16) + 8 * half + group;
    if (column >= args.inner) continue;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int token = first + lane % 4 * 2 + c;
      if (token >= item.hit.rows()) continue;
      const float upper = c == 0 ? sum.x : sum.y;
      const float lower = c == 0 ? sum.z : sum.w;
      const float gate = kGated || half == 0 ? upper + bias.x : lower + bias.y;
      const float value = activate<kKind, kGated>(gate, lower + bias.y, params);
      store_as(act + static_cast<std::int64_t>(item.hit.row + token) * args.inner + column, value);
    }
  }
}

template <typename W, int kTiles, Activation kKind, bool kGated, typename Items, typename Done>
__device__ __forceinline__ void up_finish_as(const UpArgs& args, const UpWork<W, kTiles>& work,
                                             const Ring& ring, const float4* parts,
                                             const Items& items, Done&& done, Cursor& part) {
  Finisher<typename UpWork<W, kTiles>::Crew> finisher{ring, parts, part};
  items.for_each([&](int i, int) {
    const Item item = work.item(i);
    // Asked for before the sums are there.
    float2 bias[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) bias[tile] = up_bias<kGated>(args, item, tile);
    finisher.template item<UpWork<W, kTiles>::kSplit>(
        item.hit.rows(), [&](int tile, int first, const float4& sum) {
          up_store<TokenOf<W>, kKind, kGated>(args, item, tile, first, sum, bias[tile]);
        });
    done(item.index);
  });
  part = finisher.part;
}

/// `done(hit)`: all of an item is stored.
template <typename W, int kTiles, typename Items, typename Done>
__device__ __forceinline__ void up_finish(const UpArgs& args, const UpWork<W, kTiles>& work,
                                          const Ring& ring, const float4* parts, const Items& items,
                                          Done&& done, Cursor& part) {
  with_activation(args.activation, [&](auto kind) {
    if (args.gated) {
      up_finish_as<W, kTiles, kind(), true>(args, work, ring, parts, items, done, part);
    } else if constexpr (kind() != Activation::kClampedSwiglu) {
      up_finish_as<W, kTiles, kind(), false>(args, work, ring, parts, items, done, part);
    }
  });
}

template <typename W, int kTiles, bool kHopper>
__global__ void __launch_bounds__(UpWork<W, kTiles>::Crew::kThreads, kTiles <= 2 ? 2 : 1)
    streaming_up_kernel(const __grid_constant__ UpArgs args) {
  using Crew = typename UpWork<W, kTiles>::Crew;
  extern __shared__ __align__(128) unsigned char shared[];
  Hit* hits = reinterpret_cast<Hit*>(shared + args.hits_at);
  std::int32_t* tokens = reinterpret_cast<std::int32_t*>(shared + args.tokens_at);
  float4* parts = reinterpret_cast<float4*>(shared + args.parts_at);
  const Ring ring{shared + args.ring_at, ptx::shared_address(shared),
                  ptx::shared_address(shared + args.ring_at), args.pieces.num_stages,
                  args.pieces.stage_bytes};
  if (threadIdx.x == 0) init_ring<kHopper, Crew>(ring);
  if (!args.plan_is_older) ptx::wait_for_previous_kernel();
  if (args.row_token != nullptr) {
    for (int r = static_cast<int>(threadIdx.x); r < args.max_rows; r += Crew::kThreads) {
      tokens[r] = args.row_token[r];
    }
  }
  const int num_hits =
      list_hits<Crew>(args.expert_begin, args.expert_rows, args.num_experts, args.pass_rows,
                      args.pieces, hits, reinterpret_cast<int*>(shared + kTotalsAt));
  __syncthreads();
  const UpWork<W, kTiles> work(args, hits, num_hits);
  const ItemsInTurn items{work.num_items};
  Cursor cursor;
  Cursor part;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp == Crew::kWeightWarp) {
    up_load_weights<W, kTiles, kHopper>(args, work, ring, items, cursor);
    return;
  }
  // Only the weights may be fetched before the tokens are there and `act` is free.
  ptx::wait_for_previous_kernel();
  if (warp == Crew::kTokenWarp) {
    up_load_tokens<W, kTiles, kHopper>(args, work, ring, tokens, items, cursor);
  } else if (warp == Crew::kFinishWarp) {
    up_finish(
        args, work, ring, parts, items, [](int) {}, part);
  } else {
    up_multiply(args, work, ring, parts, items, cursor, part);
  }
}

}  // namespace switchyard::streaming

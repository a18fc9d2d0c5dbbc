#pragma once

// Second half of the experts of a few tokens, with the combine: y = w2[e] act[row] + b2[e] rounded
// to the compute type, then each token's weighted sum by the fixed order.
//
// Bound by the memory that w2 lies in. A block owns a range of H and walks over all hit experts, so
// that every block streams the same number of bytes, and the rows of y for its range stay in shared
// memory until all are there and each token's are added in order, without atomics.

#include "experts/gpu/streaming/args.hpp"
#include "experts/gpu/streaming/coded_consumer.cuh"
#include "experts/gpu/streaming/combine.cuh"
#include "experts/gpu/streaming/consumer.cuh"
#include "experts/gpu/streaming/producers.cuh"

namespace switchyard::streaming {

/// kByItem: the warps share the items, each tile of one by a warp that walks all of K, which suits
/// a short K; else they share K and the finish warp adds up.
template <typename W, int kTiles, bool kByItem, typename Crew_ = UsualCrew>
struct DownWork {
  using Crew = Crew_;
  static constexpr int kGroups = Crew::kConsumers / kTiles;
  static constexpr int kUnit = Weights<W>::kRowUnit;
  const DownArgs& args;
  const Hit* hits;
  int num_hits;
  int first_row;
  int rows;  // of H that this block owns
  int few;   // rows of a tile, or one more
  int more;  // tiles that have one more
  int tiles;

  __device__ DownWork(const DownArgs& a, const Hit* list, int count)
      : args(a), hits(list), num_hits(count) {
    const auto blocks = static_cast<std::int64_t>(gridDim.x);
    const std::int64_t units = a.hidden / kUnit;
    const auto first = static_cast<int>(blockIdx.x * units / blocks);
    const int here = static_cast<int>((blockIdx.x + 1) * units / blocks) - first;
    first_row = kUnit * first;
    rows = kUnit * here;
    // Of groups of rows that lie together a warp multiplies two for little more than one.
    tiles = kUnit > 1 ? (here + 2 * kTiles - 1) / (2 * kTiles) : a.tiles_per_block;
    few = here / tiles;
    more = here - few * tiles;
  }
  __device__ __forceinline__ int rows_of(int tile, int first) const {
    if constexpr (kUnit > 1) return min(2 * kTiles * kUnit, rows - first);
    return tile < more ? few + 1 : few;
  }
  /// Calls body(item, rows, chunks) for each tile of each hit: `item.first` counts from first_row.
  template <typename Body>
  __device__ __forceinline__ void for_each(Body&& body) const {
    for (int hit = 0; hit < num_hits; ++hit) {
      const Hit of = hits[hit];
      const Chunks chunks = chunks_of(args.pieces, of);
      int first = 0;
      for (int tile = 0; tile < tiles; ++tile) {
        const int size = rows_of(tile, first);
        body(Item{of, hit, first}, size, chunks);
        first += size;
      }
    }
  }
};

template <typename W, bool kHopper, typename Work>
__device__ __forceinline__ void down_load_weights(const DownArgs& args, const Work& work,
                                                  const Ring& ring, Cursor cursor) {
  const int row_bytes = args.inner * static_cast<int>(sizeof(TokenOf<W>));
  WeightProducer<kHopper> producer{ring,  args.pieces, row_bytes, ptx::policy_evict_first(),
                                   false, cursor};
  int later = work.num_hits * work.tiles;
  work.for_each([&](const Item& item, int rows, const Chunks& chunks) {
    --later;
    const int expert = item.hit.expert();
    const int first = work.first_row + item.first;
    if constexpr (Weights<W>::kCoded) {
      const auto bytes = static_cast<int>(coded::group_bytes(Weights<W>::kFormat, args.inner));
      producer.coded_item(
          rows / coded::kGroupRows, group_stride<W>(chunks.piece), bytes, chunks,
          later * chunks.count, [&](int r) {
            const std::int64_t group =
                (static_cast<std::int64_t>(expert) * args.hidden + first) / coded::kGroupRows + r;
            return args.w2 + group * bytes;
          });
      return;
    }
    producer.item(&args.w2_map[rows - args.few_rows][item.hit.level()], first, expert, rows, chunks,
                  later * chunks.count, [&](int r) {
                    const std::int64_t row =
                        static_cast<std::int64_t>(expert) * args.hidden + first + r;
                    return args.w2 + row * row_bytes;
                  });
  });
}

/// `wait_for(hit)`: until the rows of act of a hit are there.
template <typename W, bool kHopper, typename Work, typename WaitFor>
__device__ __forceinline__ void down_load_tokens(const DownArgs& args, const Work& work,
                                                 const Ring& ring, WaitFor&& wait_for,
                                                 Cursor cursor) {
  const int row_bytes = args.inner * static_cast<int>(sizeof(TokenOf<W>));
  TokenProducer<kHopper> producer{ring, row_bytes, cursor};
  work.for_each([&](const Item& item, int, const Chunks& chunks) {
    wait_for(item.index);
    producer.item(item.hit.rows(), chunks, [&](int r) {
      return args.act + static_cast<std::int64_t>(item.hit.row + r) * row_bytes;
    });
  });
}

/// The biases of a lane's two rows of a tile.
template <typename Work>
__device__ __forceinline__ float2 down_bias(const DownArgs& args, const Work& work,
                                            const Item& item, int rows, int tile) {
  if (args.b2 == nullptr) return {};
  const float* bias = args.b2 + static_cast<std::int64_t>(item.hit.expert()) * args.hidden +
                      work.first_row + item.first;
  const int row = tile * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
  return {__ldg(bias + min(row, rows - 1)), __ldg(bias + min(row + 8, rows - 1))};
}

/// The 16 x 8 sums of a tile to this block's y.
template <typename T, typename Work>
__device__ __forceinline__ void down_store(const DownArgs& args, const Work& work, const Item& item,
                                           int rows, int tile, int token, const float4& sum,
                                           const float2& bias, T* y) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int column = token + lane % 4 * 2;
  T* to = y + (item.hit.row + column) * work.rows + item.first;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = tile * 16 + 8 * half + lane / 4;
    if (row >= rows) continue;
    const float add = half == 0 ? bias.x : bias.y;
    if (column < item.hit.rows()) store_as(to + row, (half == 0 ? sum.x : sum.z) + add);
    if (column + 1 < item.hit.rows()) {
      store_as(to + work.rows + row, (half == 0 ? sum.y : sum.w) + add);
    }
  }
}

/// The scales of blocks of the groups of rows that begin at rows `upper`, `lower` of H.
template <typename W>
__device__ __forceinline__ ScalesOf<W> down_scales(const DownArgs& args, int expert, int upper,
                                                   int lower) {
  if constexpr (std::is_same_v<ScalesOf<W>, BlockScales>) {
    constexpr int kBlock = kE4M3Block;
    const int across = (args.inner + kBlock - 1) / kBlock;
    const int down = (args.hidden + kBlock - 1) / kBlock;
    const float* of = args.scales2 + static_cast<std::int64_t>(expert) * down * across;
    return {of + static_cast<std::int64_t>(upper / kBlock) * across,
            of + static_cast<std::int64_t>(lower / kBlock) * across, across};
  } else if constexpr (std::is_same_v<ScalesOf<W>, MatrixScales>) {
    return {args.scales2 + expert, args.scales2 + expert};
  } else {
    return {};
  }
}

template <typename W, int kTiles, int kMaxTokenTiles, bool kByItem, typename Crew>
__device__ __forceinline__ void down_multiply(const DownArgs& args,
                                              const DownWork<W, kTiles, kByItem, Crew>& work,
                                              const Ring& ring, float4* parts, TokenOf<W>* y,
                                              Cursor cursor, Cursor part) {
  using T = TokenOf<W>;
  constexpr int kGroups = DownWork<W, kTiles, kByItem, Crew>::kGroups;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane_row = static_cast<int>(threadIdx.x) % 32 / 4;
  const int tile = warp / kGroups;
  Consumer<Crew> consumer{ring, args.inner * static_cast<int>(sizeof(T)), parts, cursor, part};
  int turn = warp % kGroups;
  work.for_each([&](const Item& item, int rows, const Chunks& chunks) {
    const int tokens = item.hit.rows();
    // Rows that do not exist repeat the last that does; their sums are never stored.
    if constexpr (Weights<W>::kCoded) {
      const int groups = rows / coded::kGroupRows;
      const int upper = min(2 * tile, groups - 1);
      const int lower = min(2 * tile + 1, groups - 1);
      const int first = work.first_row + item.first;
      CodedRows<W> mine{{upper, lower},
                        min(max(groups - 2 * tile, 0), 2),
                        down_scales<W>(args, item.hit.expert(), first + upper * coded::kGroupRows,
                                       first + lower * coded::kGroupRows)};
      coded_item<W, 0, kGroups>(consumer, warp % kGroups, mine, tokens, chunks);
      return;
    }
    const int row0 = min(tile * 16 + lane_row, rows - 1);
    const int row1 = min(tile * 16 + 8 + lane_row, rows - 1);
    if constexpr (!kByItem) {
      consumer.template item<W, kGroups, kMaxTokenTiles>(
          warp % kGroups, row0, row1, tokens, chunks,
          [&](const auto& sums) { consumer.hand_over(sums, tokens); });
    } else if (turn == 0) {
      turn = kGroups - 1;
      consumer.template item<W, 1, kMaxTokenTiles>(
          0, row0, row1, tokens, chunks, [&](const auto& sums) {
            const float2 bias = down_bias(args, work, item, rows, tile);
#pragma unroll
            for (int n = 0; n < static_cast<int>(sizeof(sums) / sizeof(sums[0])); ++n) {
              down_store(args, work, item, rows, tile, 8 * n,
                         make_float4(sums[n][0], sums[n][1], sums[n][2], sums[n][3]), bias, y);
            }
          });
    } else {
      --turn;
      consumer.skip(chunks.count);
    }
  });
}

template <typename W, int kTiles, bool kByItem, typename Crew>
__device__ __forceinline__ void down_finish(const DownArgs& args,
                                            const DownWork<W, kTiles, kByItem, Crew>& work,
                                            const Ring& ring, const float4* parts, TokenOf<W>* y,
                                            Cursor part) {
  if constexpr (kByItem) return;
  Finisher<Crew> finisher{ring, parts, part};
  work.for_each([&](const Item& item, int rows, const Chunks&) {
    // Asked for before the sums are there.
    float2 bias[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) bias[tile] = down_bias(args, work, item, rows, tile);
    finisher.template item<DownWork<W, kTiles, kByItem, Crew>::kGroups>(
        item.hit.rows(), [&](int tile, int token, const float4& sum) {
          down_store(args, work, item, rows, tile, token, sum, bias[tile], y);
        });
  });
}

/// One thread calls it when the plan is made.
__device__ __forceinline__ void report_plan(const PlanReport& to, const DeviceStatus* status,
                                            int num_rows) {
  if (to.status == nullptr) return;
  to.status->nan_logit = __ldcg(reinterpret_cast<const unsigned long long*>(&status->nan_logit));
  to.status->bad_ids = __ldcg(&status->bad_ids);
  to.status->lost_rows = __ldcg(&status->lost_rows);
  to.status->bad_token_id =
      __ldcg(reinterpret_cast<const unsigned long long*>(&status->bad_token_id));
  *to.rows_used = num_rows;
  *to.rows_executed = num_rows;
}

template <typename W, int kTiles, int kMaxTokenTiles, bool kByItem, bool kHopper>
__global__ void __launch_bounds__(CrewOf<W, kMaxTokenTiles>::kThreads, kMaxTokenTiles == 4 ? 2 : 1)
    streaming_down_kernel(const __grid_constant__ DownArgs args) {
  using Crew = CrewOf<W, kMaxTokenTiles>;
  using T = TokenOf<W>;
  extern __shared__ __align__(128) unsigned char shared[];
  Hit* hits = reinterpret_cast<Hit*>(shared + args.hits_at);
  float4* parts = reinterpret_cast<float4*>(shared + args.parts_at);
  unsigned char* row_group = shared + args.groups_at;
  std::int32_t* begins = reinterpret_cast<std::int32_t*>(shared + args.begins_at);
  Term* terms = reinterpret_cast<Term*>(shared + args.terms_at);
  T* y = reinterpret_cast<T*>(shared + args.y_at);
  const Ring ring{shared + args.ring_at, ptx::shared_address(shared),
                  ptx::shared_address(shared + args.ring_at), args.pieces.num_stages,
                  args.pieces.stage_bytes};
  if (threadIdx.x == 0) init_ring<kHopper, Crew>(ring);
  // The plan is complete: the first kernel let this one start only after it had waited for it.
  const int num_hits =
      list_hits<Crew>(args.expert_begin, args.expert_rows, args.num_experts, args.pass_rows,
                      args.pieces, hits, reinterpret_cast<int*>(shared + kTotalsAt));
  __syncthreads();
  const DownWork<W, kTiles, kByItem, Crew> work(args, hits, num_hits);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp == Crew::kWeightWarp) {
    down_load_weights<W, kHopper>(args, work, ring, {});
    // The warp with the least to do from here on: the host's memory is far.
    if (blockIdx.x == 0 && threadIdx.x % 32 == 0) {
      report_plan(args.report, args.status, args.token_begin[args.num_tokens]);
    }
  } else if (warp == Crew::kTokenWarp) {
    ptx::wait_for_previous_kernel();  // for the first kernel's act
    down_load_tokens<W, kHopper>(args, work, ring, [](int) {}, {});
  } else if (warp == Crew::kFinishWarp) {
    down_finish(args, work, ring, parts, y, {});
  } else {
    list_terms<Crew>(args, hits, num_hits, row_group, begins, terms);
    down_multiply<W, kTiles, kMaxTokenTiles, kByItem>(args, work, ring, parts, y, {}, {});
  }
  // All kernels before this one are complete now, also those that read `sums`.
  ptx::wait_for_previous_kernel();
  __syncthreads();
  add_up<Crew>(args, Rows<T>{work.first_row, work.rows, begins, terms, y});
}

}  // namespace switchyard::streaming

#pragma once

// Weights' gradients on Hopper. One operand's rows are tokens and come by cp.async, the other's lie
// behind each other and come by TMA, but for a part's last rows, where zeros must follow.

#include "experts/gpu/backward/sm90/store.cuh"

namespace switchyard::backward::sm90 {

/// Who does what.
constexpr Roles kWeightRoles{.gather_warps = 2, .store_warps = 1, .multiply_from = 4};
using WeightContext = Context<kWeightRoles>;

/// A unit as it travels: {expert and part, first row, rows, tile}.
__device__ __forceinline__ int4 pack_unit(const GradientUnit& unit, std::int32_t first,
                                          std::int32_t count) {
  return {unit.part * kMaxBackwardExperts + unit.expert, first, count, unit.tile};
}
__device__ __forceinline__ GradientUnit unpack_unit(const int4& message) {
  return {message.x % kMaxBackwardExperts, message.x / kMaxBackwardExperts, message.w};
}

/// Of no rows too: that step is all zeros.
__device__ __forceinline__ int steps_of_unit(const int4& unit) {
  return unit.z == 0 ? 1 : (unit.z + kTileK - 1) / kTileK;
}

/// The operands as a kernel multiplies them: rows of tokens are the left one, the other's lie
/// behind each other. kTurned: they have changed places, and the gradient is stored as the
/// transpose.
template <bool kTurned>
struct Operands {
  const GradientOperand& left;
  const GradientOperand& right;
  explicit __device__ __forceinline__ Operands(const WeightGradient& args)
      : left(kTurned ? args.right : args.left), right(kTurned ? args.left : args.right) {}

  [[nodiscard]] __device__ __forceinline__ std::int64_t across() const {
    return (right.cols + kTileN - 1) / kTileN;
  }
  /// Units of a part: two tiles above each other.
  [[nodiscard]] __device__ __forceinline__ std::int64_t units() const {
    return (left.cols + 2 * kTileM - 1) / (2 * kTileM) * across();
  }
};

/// First columns of what a CTA has of a unit.
struct TileAt {
  std::int32_t left;
  std::int32_t right;
};
template <bool kTurned>
__device__ __forceinline__ TileAt tile_at(const WeightContext& context,
                                          const Operands<kTurned>& operands, std::int32_t tile) {
  const auto across = static_cast<std::int32_t>(operands.across());
  return {(tile / across * 2 + static_cast<std::int32_t>(context.cta)) * kTileM,
          tile % across * kTileN};
}

/// One thread: all full steps of the right operand.
__device__ __forceinline__ void load_unit(const WeightContext& context, const CUtensorMap* rows,
                                          const int4& unit, std::int32_t first_column,
                                          Cursor& cursor) {
  const int steps = steps_of_unit(unit);
  for (int step = 0; step < steps; ++step, cursor.advance()) {
    ptx::mbarrier_wait(context.empty(cursor), cursor.phase ^ 1);
    const std::uint32_t full = context.full(cursor);
    if ((step + 1) * kTileK > unit.z) {
      ptx::mbarrier_arrive(full);
      continue;
    }
    ptx::mbarrier_arrive_expect(full, kRightBytes);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int box = static_cast<int>(context.cta) * 2 + half;
      ptx::tma_load_2d_multicast(
          context.right(cursor) + static_cast<std::uint32_t>(box) * kBoxBytes, rows,
          first_column + box * 64, unit.y + step * kTileK, full, 3);
    }
  }
}

/// Warp 0: units as they come.
template <bool kTurned>
__device__ __forceinline__ void load_contiguous(const WeightContext& context,
                                                const CUtensorMap* rows,
                                                const WeightGradient& args) {
  const Operands<kTurned> operands(args);
  const std::int64_t tiles = operands.units();
  const std::int64_t items = __ldg(args.units.parts_before + args.rows.num_experts) * tiles;
  const auto announce = [&](std::uint32_t index, std::int64_t item) {
    if (item >= items) return context.announce(index, {-1, 0, 0, 0});
    const GradientUnit unit = unit_at(args, item, tiles);
    const RowRange range =
        rows_of_part(unit.part, __ldg(args.rows.rows + unit.expert), args.units.part_rows);
    context.announce(index, pack_unit(unit, __ldg(args.rows.begin + unit.expert) + range.begin,
                                      range.end - range.begin));
  };
  Cursor cursor;
  if (context.leads()) announce(0, blockIdx.x / 2);
  for (std::uint32_t index = 0;; ++index) {
    const int4 unit = context.receive(index);
    if (unit.x < 0) return;
    if (context.leads()) {
      std::int32_t drawn = 0;
      if (threadIdx.x == 0) drawn = atomicAdd(args.units.counter, 1);
      announce(index + 1, std::int64_t{gridDim.x / 2} + __shfl_sync(kAllLanes, drawn, 0));
    }
    if (threadIdx.x == 0) {
      context.rearm(index);
      load_unit(context, rows, unit, tile_at(context, operands, unit.w).right, cursor);
    }
    __syncwarp();
  }
}

/// A gathering warp's rows of a step's 64.
constexpr int kGatherRows = kTileK / kWeightRoles.gather_warps;

/// A gathering warp, for a step: kTileM columns of its rows, as boxes; zeros from row `count` on
/// and where a column does not exist. A lane has `from`, where the row of its number is, in chunks
/// of 16 bytes from `columns` on. (Five instructions a copy: with forty the copies, not the tensor
/// cores, set the time, 350 TFLOP/s.)
__device__ __forceinline__ void gather_step(std::uint32_t to, const char* columns, bool exists,
                                            std::int32_t count, std::uint32_t from) {
  constexpr int kRowsAtOnce = 2;  // sixteen threads a row
  constexpr int kPlaces = 8 / kRowsAtOnce;
  static_assert(kGatherRows == 32, "a lane a row");
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = lane / 16;
  const int chunk = lane % 16;
  const std::uint32_t to_box =
      to + static_cast<std::uint32_t>(chunk / 8 * kBoxBytes +
                                      WeightContext::gather_warp() * kGatherRows * 128);
  std::uint32_t places[kPlaces];
#pragma unroll
  for (int i = 0; i < kPlaces; ++i) {
    places[i] = to_box + swizzled_place_of_eight(row + i * kRowsAtOnce, chunk % 8);
  }
  const std::int32_t left = exists ? count - WeightContext::gather_warp() * kGatherRows - row : 0;
#pragma unroll
  for (int turn = 0; turn < kGatherRows / kRowsAtOnce; ++turn) {
    const std::uint32_t chunks = __shfl_sync(kAllLanes, from, turn * kRowsAtOnce + row);
    ptx::cp_async_16(places[turn % kPlaces] + static_cast<std::uint32_t>(turn / kPlaces * 1024),
                     add_chunks(columns, chunks), turn * kRowsAtOnce < left ? 16 : 0);
  }
}

/// A gathering warp: rows of tokens; in a part's last step the others too, if it is not full.
template <typename T, bool kTurned>
__device__ __forceinline__ void gather_tokens(const WeightContext& context,
                                              const WeightGradient& args) {
  const Operands<kTurned> operands(args);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto row_chunks = static_cast<std::uint32_t>(operands.left.cols / 8);
  Cursor cursor;
  Gathered gathered(context);
  for (std::uint32_t index = 0;; ++index) {
    const int4 unit = context.receive(index);
    if (unit.x < 0) break;
    const TileAt tile = tile_at(context, operands, unit.w);
    const std::int64_t column = tile.left + lane % 16 * 8;
    const bool exists = column < operands.left.cols;
    const char* const columns =
        static_cast<const char*>(operands.left.rows) + (exists ? column * 2 : 0);
    const int steps = steps_of_unit(unit);
    // Where a step's rows are, one a lane, asked for a step ahead.
    std::uint32_t next = 0;
    const auto fetch = [&](int step) {
      const std::int32_t row = step * kTileK + WeightContext::gather_warp() * kGatherRows + lane;
      const std::int32_t token = row < unit.z ? __ldg(operands.left.token + unit.y + row) : 0;
      next = static_cast<std::uint32_t>(token) * row_chunks;
    };
    fetch(0);
#pragma unroll 1
    for (int step = 0; step < steps; ++step, cursor.advance()) {
      const std::uint32_t here = next;
      fetch(step + 1);
      const std::int32_t count = unit.z - step * kTileK;
      ptx::mbarrier_wait(context.empty(cursor), cursor.phase ^ 1);
      gather_step(context.left(cursor), columns, exists, count, here);
      if (count < kTileK) {
        const std::int64_t first = std::int64_t{unit.y} + step * kTileK;
        gather_flat<kTileN / 64>(context, context.right(cursor),
                                 static_cast<const T*>(operands.right.rows), operands.right.cols,
                                 tile.right, count, [&](int row) { return first + row; });
      }
      gathered.asked(cursor);
    }
  }
  gathered.end();
}

/// Whether a unit's sums leave rounded, by the storing warps: they are the gradient itself, of
/// 16 bits, and nothing is added to them.
__device__ __forceinline__ bool hands_over(const WeightGradient& args, const int4& unit) {
  return !args.out_is_f32 && !args.accumulate &&
         parts_of(__ldg(args.rows.rows + unpack_unit(unit).expert), args.units.part_rows) == 1;
}

/// A storing warp: its share of a tile, 512 bytes at a time.
template <typename T, bool kTurned>
__device__ __forceinline__ void store_tile(const WeightContext& context, const WeightGradient& args,
                                           const int4& message, HandOver<WeightContext>& tile) {
  constexpr int kLanes = (kTurned ? kTileM : kTileN) / 8;  // of a row
  constexpr int kRowsAtOnce = 32 / kLanes;
  constexpr int kRows = kTurned ? kTileN : kTileM;
  const Operands<kTurned> operands(args);
  const TileAt at = tile_at(context, operands, message.w);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t first_row = kTurned ? at.right : at.left;
  const std::int64_t column = (kTurned ? at.left : at.right) + lane % kLanes * 8;
  const std::int64_t cols = args.right.cols;
  const auto rows = static_cast<int>(min(args.left.cols - first_row, std::int64_t{kRows}));
  T* const out = static_cast<T*>(args.out) +
                 (unpack_unit(message).expert * args.left.cols + first_row) * cols + column;
  tile.wait_put();
  if (column < cols) {
#pragma unroll 8
    for (int row = WeightContext::store_warp() * kRowsAtOnce + lane / kLanes; row < rows;
         row += kWeightRoles.store_warps * kRowsAtOnce) {
      ptx::store_global_16(out + row * cols, tile.get<kTurned>(row, lane % kLanes));
    }
  }
  tile.stored();
}

/// A multiplying warp, where the sums leave in fp32.
template <typename T, bool kTurned>
__device__ __forceinline__ void store_sums(const WeightContext& context, const WeightGradient& args,
                                           const OutBoxes& out, const int4& message,
                                           const float (&sums)[kTileN / 2]) {
  const GradientUnit unit = unpack_unit(message);
  const Operands<kTurned> operands(args);
  const TileAt tile = tile_at(context, operands, unit.tile);
#pragma unroll 1
  for (int box = 0; box < kTileN / 64; ++box) {
    const std::int64_t right = std::int64_t{tile.right} + box * 64;
    if (right >= operands.right.cols) return;
    out.put(sums, box);
#pragma unroll
    for (int turn = 0; turn < OutBoxes::kTurns; ++turn) {
      float values[8];
      if constexpr (kTurned) {
        out.get_turned(turn, values);
        store_chunk<T>(args, unit, right + out.turned_column(turn),
                       std::int64_t{tile.left} + out.turned_row(), values);
      } else {
        out.get(turn, values);
        store_chunk<T>(args, unit, std::int64_t{tile.left} + out.row(turn), right + out.column(),
                       values);
      }
    }
  }
}

template <typename T, bool kTurned>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kWeightRoles.threads(), 1)
    weight_gradient(const __grid_constant__ CUtensorMap rows,
                    const __grid_constant__ WeightGradient args) {
  extern __shared__ __align__(1024) char shared[];
  const WeightContext context{ptx::shared_address(shared), ptx::cluster_cta_rank()};
  HandOver tile(context);
  run_roles(
      context, [&] { load_contiguous<kTurned>(context, &rows, args); },
      [&] { gather_tokens<T, kTurned>(context, args); }, steps_of_unit,
      [&] {
        const OutBoxes out(shared, context.multiply_warp());
        run_multiply<T, false>(context, steps_of_unit,
                               [&](const int4& unit, const float(&sums)[kTileN / 2]) {
                                 if (hands_over(args, unit)) {
                                   tile.template put<T, kTurned>(sums);
                                   return;
                                 }
                                 tile.wait_stored();
                                 store_sums<T, kTurned>(context, args, out, unit, sums);
                                 OutBoxes::all_out();
                               });
      },
      [&] {
        run_store(context, [&](const int4& unit) {
          if (hands_over(args, unit)) store_tile<T, kTurned>(context, args, unit, tile);
        });
      });
}

}  // namespace switchyard::backward::sm90

#pragma once

// The two products on the way back that give rows, on Hopper. The weights lie as the forward has
// them and come by TMA, the rows by cp.async, gathered or not.

#include "experts/gpu/backward/sm90/pipeline.cuh"

namespace switchyard::backward::sm90 {

/// What the two products differ in before their stores.
template <typename T>
struct RowsOperands {
  const T* rows;
  const std::int32_t* token;  // of a row; null: itself
  std::int32_t depth;
  std::int32_t cols;
};
template <typename T>
__device__ __forceinline__ RowsOperands<T> operands_of(const DownGradient& args) {
  return {static_cast<const T*>(args.dout), args.rows.token, static_cast<std::int32_t>(args.hidden),
          static_cast<std::int32_t>(args.inner_cols)};
}
template <typename T>
__device__ __forceinline__ RowsOperands<T> operands_of(const RowsGradient& args) {
  return {static_cast<const T*>(args.in), nullptr, static_cast<std::int32_t>(args.depth),
          static_cast<std::int32_t>(args.cols)};
}

/// Which rows and columns a CTA has of a unit.
struct RowsUnit {
  std::int32_t expert;
  std::int32_t row;
  std::int32_t rows;  // perhaps none: then it only helps to load
  std::int32_t column_tile;
  bool share_weights;
};
__device__ __forceinline__ RowsUnit rows_unit(const Context& context, const int4& message) {
  const Work work = unpack_message(message, context.cta);
  return {work.expert, work.tile.row, work.tile.rows, work.tile.column_tile,
          work.tile.share_weights};
}

/// One thread: the weights of a unit.
__device__ __forceinline__ void load_unit(const Context& context, const CUtensorMap* weights,
                                          const RowsUnit& unit, int steps, Cursor& cursor) {
  for (int step = 0; step < steps; ++step, cursor.advance()) {
    ptx::mbarrier_wait(context.empty(cursor), cursor.phase ^ 1);
    ptx::mbarrier_arrive_expect(context.full(cursor), kRightBytes);
#pragma unroll
    for (int box = 0; box < kTileN / 64; ++box) {
      const std::uint32_t to = context.right(cursor) + box * kBoxBytes;
      const int column = unit.column_tile * kTileN + box * 64;
      if (!unit.share_weights) {
        ptx::tma_load_3d(to, weights, column, step * kTileK, unit.expert, context.full(cursor));
      } else if (box / 2 == static_cast<int>(context.cta)) {
        ptx::tma_load_3d_multicast(to, weights, column, step * kTileK, unit.expert,
                                   context.full(cursor), 3);
      }
    }
  }
}

/// Warp 0.
__device__ __forceinline__ void load_weights(const Context& context, const CUtensorMap* weights,
                                             const ScheduleParams& schedule, int steps) {
  UnitWalk<1> walk(schedule, static_cast<std::int32_t>(blockIdx.x / 2),
                   static_cast<std::int32_t>(gridDim.x / 2));
  Cursor cursor;
  if (context.leads()) context.announce(0, walk.next());
  for (std::uint32_t index = 0;; ++index) {
    const int4 message = context.receive(index);
    if (message.x < 0) return;
    if (context.leads()) context.announce(index + 1, walk.next());
    if (threadIdx.x == 0) {
      context.rearm(index);
      load_unit(context, weights, rows_unit(context, message), steps, cursor);
    }
    __syncwarp();
  }
}

/// Warps 2 and 3, before they gather a unit's rows: what its store will read comes into L2 while
/// the products run, for nobody multiplies while it stores.
template <typename T>
__device__ __forceinline__ void fetch_ahead(const DownGradient& args, const RowsUnit& unit) {
  constexpr int kLine = 128 / sizeof(T);
  constexpr int kLines = kTileN / kLine;
  const std::int64_t z_cols = (args.gated ? 2 : 1) * args.inner_cols;
  const std::int64_t column =
      std::int64_t{unit.column_tile} * kTileN + gather_thread() % kLines * kLine;
  if (column >= args.inner_cols) return;
  const T* const z = static_cast<const T*>(args.z) + column;
  for (int row = gather_thread() / kLines; row < unit.rows; row += kGatherThreads / kLines) {
    const T* const line = z + (unit.row + row) * z_cols;
    ptx::prefetch_l2(line);
    if (args.gated) ptx::prefetch_l2(line + args.inner_cols);
  }
}
template <typename T>
__device__ __forceinline__ void fetch_ahead(const RowsGradient&, const RowsUnit&) {}

/// Warps 2 and 3: eight threads bring the 128 bytes of a row; zeros behind its end.
template <typename T, typename Args>
__device__ __forceinline__ void gather_rows(const Context& context, const Args& args, int steps) {
  const RowsOperands<T> operands = operands_of<T>(args);
  constexpr int kPasses = kTileM / 8;
  const int chunk = gather_thread() % 8;
  const int first_row = gather_thread() / 8;
  const std::uint32_t to_offset = swizzled_place_of_eight(first_row, chunk);
  const std::int32_t depth_chunks = operands.depth / 8;
  const int4* const rows = reinterpret_cast<const int4*>(operands.rows);
  Cursor cursor;
  for (std::uint32_t index = 0;; ++index) {
    const int4 message = context.receive(index);
    if (message.x < 0) return;
    const RowsUnit unit = rows_unit(context, message);
    const bool has_rows = unit.rows > 0;
    fetch_ahead<T>(args, unit);
    std::uint32_t from[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      // Rows past the last repeat it and are never stored.
      const std::int32_t row = unit.row + max(min(first_row + 8 * pass, unit.rows - 1), 0);
      const std::int32_t at =
          operands.token == nullptr || !has_rows ? row : __ldg(operands.token + row);
      from[pass] = static_cast<std::uint32_t>(at) * static_cast<std::uint32_t>(depth_chunks);
    }
#pragma unroll 1
    for (int step = 0; step < steps; ++step, cursor.advance()) {
      ptx::mbarrier_wait(context.empty(cursor), cursor.phase ^ 1);
      const bool inside = step * 8 + chunk < depth_chunks;
      const int4* const step_rows = inside ? rows + step * 8 + chunk : rows;
      if (has_rows) {
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
          ptx::cp_async_16(context.left(cursor) + to_offset + pass * 1024, step_rows + from[pass],
                           inside ? 16 : 0);
        }
      }
      ptx::cp_async_arrive(context.gathered(cursor));
    }
  }
}

/// Through the activation, 64 columns at a time; their pre-activation is asked for before the sums
/// are looked at.
template <typename T>
__device__ __forceinline__ void store_unit(const DownGradient& args, const OutBoxes& out,
                                           const RowsUnit& unit, const float (&sums)[kTileN / 2]) {
  const std::int64_t tiles = tiles_along(args.inner_cols);
  with_kind(args, [&](auto kind, auto gated) {
    float dots[OutBoxes::kTurns] = {};
#pragma unroll 1
    for (int box = 0; box < kTileN / 64; ++box) {
      const std::int64_t first_column = std::int64_t{unit.column_tile} * kTileN + box * 64;
      if (first_column >= args.inner_cols) return;
      const std::int64_t column = first_column + out.column();
      ChunkBefore before[OutBoxes::kTurns];
#pragma unroll
      for (int turn = 0; turn < OutBoxes::kTurns; ++turn) {
        if (out.row(turn) < unit.rows) {
          before[turn] = load_before<T>(args, unit.row + out.row(turn), column);
        }
      }
      out.put(sums, box);
      // Two boxes are one of the sums that are kept.
      const bool second = first_column % kPartTile != 0;
      const bool last = second || first_column + 64 >= args.inner_cols;
#pragma unroll
      for (int turn = 0; turn < OutBoxes::kTurns; ++turn) {
        const std::int64_t row = unit.row + out.row(turn);
        const bool exists = out.row(turn) < unit.rows;
        float dot = 0;
        if (exists) {
          float da[8];
          out.get(turn, da);
          dot = store_chunk<T, decltype(kind)::value, decltype(gated)::value>(args, before[turn],
                                                                              row, column, da);
        }
#pragma unroll
        for (int distance = 1; distance < 8; distance *= 2) {
          dot += __shfl_xor_sync(kAllLanes, dot, distance);
        }
        dots[turn] = second ? dots[turn] + dot : dot;
        if (last && exists && out.column() == 0) {
          args.dots[row * tiles + first_column / kPartTile] = dots[turn];
        }
      }
    }
  });
}

template <typename T>
__device__ __forceinline__ void store_unit(const RowsGradient& args, const OutBoxes& out,
                                           const RowsUnit& unit, const float (&sums)[kTileN / 2]) {
#pragma unroll 1
  for (int box = 0; box < kTileN / 64; ++box) {
    const std::int64_t column = std::int64_t{unit.column_tile} * kTileN + box * 64 + out.column();
    out.put(sums, box);
#pragma unroll
    for (int turn = 0; turn < OutBoxes::kTurns; ++turn) {
      float values[8];
      out.get(turn, values);
      if (out.row(turn) < unit.rows) store_chunk<T>(args, unit.row + out.row(turn), column, values);
    }
  }
}

template <typename T, typename Args>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    rows_gradient(const __grid_constant__ CUtensorMap weights, const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char shared[];
  const Context context{ptx::shared_address(shared), ptx::cluster_cta_rank()};
  const RowsOperands<T> operands = operands_of<T>(args);
  const int steps = (operands.depth + kTileK - 1) / kTileK;
  const auto steps_of = [steps](const int4&) { return steps; };
  const ScheduleParams schedule{args.rows.begin, args.rows.rows, args.rows.num_experts,
                                (operands.cols + kTileN - 1) / kTileN, nullptr};
  run_roles(
      context, [&] { load_weights(context, &weights, schedule, steps); },
      [&] { gather_rows<T>(context, args, steps); }, [&] { run_fence(context, steps_of); },
      [&] {
        const OutBoxes out(shared);
        run_multiply<T, true>(context, steps_of,
                              [&](const int4& message, const float(&sums)[kTileN / 2]) {
                                const RowsUnit unit = rows_unit(context, message);
                                if (unit.rows > 0) store_unit<T>(args, out, unit, sums);
                              });
      });
}

}  // namespace switchyard::backward::sm90

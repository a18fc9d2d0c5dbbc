#pragma once

// The two products on the way back that give rows, on Hopper. The weights lie as the forward has
// them and come by TMA, the rows by cp.async, gathered or not.

#include "experts/gpu/backward/sm90/store.cuh"

namespace switchyard::backward::sm90 {

/// Who does what. Storing what goes through the activation is four warps' work.
template <typename Args>
constexpr Roles kRowsRoles{.gather_warps = 1, .store_warps = 2, .multiply_from = 4};
template <>
constexpr Roles kRowsRoles<DownGradient>{.gather_warps = 2, .store_warps = 4, .multiply_from = 8};

/// What the two products differ in before their stores.
struct RowsOperands {
  const int4* rows;
  const std::int32_t* token;  // of a row; null: itself
  std::int32_t depth;
  std::int32_t cols;
};
__device__ __forceinline__ RowsOperands operands_of(const DownGradient& args) {
  return {static_cast<const int4*>(args.dout), args.rows.token,
          static_cast<std::int32_t>(args.hidden), static_cast<std::int32_t>(args.inner_cols)};
}
__device__ __forceinline__ RowsOperands operands_of(const RowsGradient& args) {
  return {static_cast<const int4*>(args.in), nullptr, static_cast<std::int32_t>(args.depth),
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
template <typename Context>
__device__ __forceinline__ RowsUnit rows_unit(const Context& context, const int4& message) {
  const Work work = unpack_message(message, context.cta);
  return {work.expert, work.tile.row, work.tile.rows, work.tile.column_tile,
          work.tile.share_weights};
}

/// One thread: the weights of a unit.
template <typename Context>
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
template <typename Context>
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

/// A gathering warp: eight threads bring the 128 bytes of a row; zeros behind its end.
template <typename Context>
__device__ __forceinline__ void gather_rows(const Context& context, const RowsOperands& operands,
                                            int steps) {
  constexpr int kRowsAtOnce = 4;
  constexpr int kRows = kTileM / Context::kRoles.gather_warps;
  constexpr int kPasses = kRows / kRowsAtOnce;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int chunk = lane % 8;
  const int first_row = context.gather_warp() * kRows + lane / 8;
  const auto to_rows = static_cast<std::uint32_t>(context.gather_warp() * kRows * 128);
  const std::uint32_t to_offsets[2] = {
      to_rows + swizzled_place_of_eight(lane / 8, chunk),
      to_rows + swizzled_place_of_eight(lane / 8 + kRowsAtOnce, chunk)};
  const std::int32_t depth_chunks = operands.depth / 8;
  Cursor cursor;
  Gathered gathered(context);
  for (std::uint32_t index = 0;; ++index) {
    const int4 message = context.receive(index);
    if (message.x < 0) break;
    const RowsUnit unit = rows_unit(context, message);
    const bool has_rows = unit.rows > 0;
    std::uint32_t from[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      // Rows past the last repeat it and are never stored.
      const std::int32_t row =
          unit.row + max(min(first_row + kRowsAtOnce * pass, unit.rows - 1), 0);
      const std::int32_t at =
          operands.token == nullptr || !has_rows ? row : __ldg(operands.token + row);
      from[pass] = static_cast<std::uint32_t>(at) * static_cast<std::uint32_t>(depth_chunks);
    }
#pragma unroll 1
    for (int step = 0; step < steps; ++step, cursor.advance()) {
      ptx::mbarrier_wait(context.empty(cursor), cursor.phase ^ 1);
      const bool inside = step * 8 + chunk < depth_chunks;
      // (A choice of pointers, not of offsets: the compiler would add 64-bit offsets copy by copy,
      // five instructions each instead of three, and the copies would set the time.)
      const int4* const step_rows = inside ? operands.rows + step * 8 + chunk : operands.rows;
      if (has_rows) {
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
          ptx::cp_async_16(context.left(cursor) + to_offsets[pass % 2] +
                               static_cast<std::uint32_t>(pass / 2 * 1024),
                           step_rows + from[pass], inside ? 16 : 0);
        }
      }
      gathered.asked(cursor);
    }
  }
  gathered.end();
}

/// Whether a tile's sums leave rounded, by the storing warps.
__device__ __forceinline__ bool hands_over(const DownGradient&) { return true; }
__device__ __forceinline__ bool hands_over(const RowsGradient& args) { return !args.out_is_f32; }

/// A storing lane's eight columns of a tile's rows, on their way through the activation.
template <typename T, Activation kKind, bool kGated>
class ActivationRows {
 public:
  __device__ __forceinline__ ActivationRows(const DownGradient& args, const RowsUnit& unit)
      : args_(args), rows_(unit.rows) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const std::int64_t column = std::int64_t{unit.column_tile} * kTileN + lane * 8;
    exists_ = column < args.inner_cols;
    inner_bytes_ = static_cast<std::uint32_t>(args.inner_cols * 2);
    const std::int64_t z_at = unit.row * (kGated ? 2 : 1) * args.inner_cols + column;
    z_ = static_cast<const char*>(args.z) + z_at * 2;
    dz_ = static_cast<char*>(args.dz) + z_at * 2;
    inner_ = static_cast<char*>(args.inner) + (unit.row * args.inner_cols + column) * 2;
    weight_ = args.rows.weight + unit.row;
    num_dots_ = static_cast<std::uint32_t>(tiles_along(args.inner_cols));
    dots_ = args.dots + std::int64_t{unit.row} * num_dots_ + column / kPartTile;
  }

  /// The pre-activation of a row, if there is one.
  __device__ __forceinline__ void load(int row, ChunkBefore& before) const {
    if (row >= rows_ || !exists_) return;
    const char* const z = z_ + std::uint64_t{inner_bytes_} * z_row(row);
    before.weight = __ldg(weight_ + row);
    before.gate = *reinterpret_cast<const int4*>(z);
    if constexpr (kGated) before.up = *reinterpret_cast<const int4*>(z + inner_bytes_);
  }
  __device__ __forceinline__ ChunkAfter compute(const ChunkBefore& before, const int4& bits) const {
    float da[8];
    unpack16(bits, da, T{});
    return through_activation<T, kKind, kGated>(args_.activation, before, da);
  }
  __device__ __forceinline__ void store(int row, const ChunkAfter& after) const {
    const bool here = row < rows_ && exists_;
    char* const dz = dz_ + std::uint64_t{inner_bytes_} * z_row(row);
    ptx::store_global_16_if(here, inner_ + std::uint64_t{inner_bytes_} * row_bits(row),
                            after.inner);
    ptx::store_global_16_if(here, dz, after.gate);
    if constexpr (kGated) ptx::store_global_16_if(here, dz + inner_bytes_, after.up);
    if (here && threadIdx.x % 16 == 0) dots_[std::uint64_t{num_dots_} * row_bits(row)] = after.dot;
  }
  /// Sixteen lanes have the columns that a sum is kept of; one that does not exist adds nothing.
  template <int kRows>
  __device__ __forceinline__ void sum_dots(ChunkAfter (&after)[kRows]) const {
    static_assert(kPartTile == 16 * 8);
#pragma unroll
    for (int i = 0; i < kRows; ++i) after[i].dot = exists_ ? after[i].dot : 0.0F;
#pragma unroll
    for (int distance = 1; distance < 16; distance *= 2) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        after[i].dot += __shfl_xor_sync(kAllLanes, after[i].dot, distance);
      }
    }
  }

 private:
  static __device__ __forceinline__ std::uint32_t row_bits(int row) {
    return static_cast<std::uint32_t>(row);
  }
  static __device__ __forceinline__ std::uint32_t z_row(int row) {
    return row_bits(row) * (kGated ? 2 : 1);
  }

  const DownGradient& args_;
  int rows_;
  bool exists_;
  std::uint32_t inner_bytes_;
  std::uint32_t num_dots_;
  const char* z_;
  char* dz_;
  char* inner_;
  const float* weight_;
  float* dots_;
};

/// A storing warp: its share of a tile's rows, two of them side by side, for each by itself is a
/// chain of instructions that wait for each other. The pre-activation of the first rows is asked
/// for before the tile is there, that of others a turn ahead.
template <typename T, typename Context>
__device__ __forceinline__ void store_tile(const DownGradient& args, const RowsUnit& unit,
                                           HandOver<Context>& tile) {
  constexpr int kStoreWarps = Context::kRoles.store_warps;
  constexpr int kAtOnce = 2;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  with_kind(args, [&](auto kind, auto gated) {
    const ActivationRows<T, decltype(kind)::value, decltype(gated)::value> rows(args, unit);
    ChunkBefore next[kAtOnce];
    const auto load = [&](int first) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) rows.load(first + i * kStoreWarps, next[i]);
    };
    load(Context::store_warp());
    tile.wait_put();
#pragma unroll 1
    for (int first = Context::store_warp(); first < unit.rows; first += kAtOnce * kStoreWarps) {
      ChunkAfter after[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = min(first + i * kStoreWarps, kTileM - 1);
        after[i] = rows.compute(next[i], tile.template get<false>(row, lane));
      }
      load(first + kAtOnce * kStoreWarps);
      rows.sum_dots(after);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) rows.store(first + i * kStoreWarps, after[i]);
    }
  });
  tile.stored();
}

template <typename T, typename Context>
__device__ __forceinline__ void store_tile(const RowsGradient& args, const RowsUnit& unit,
                                           HandOver<Context>& tile) {
  constexpr int kStoreWarps = Context::kRoles.store_warps;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t column = std::int64_t{unit.column_tile} * kTileN + lane * 8;
  T* const out = static_cast<T*>(args.out) + unit.row * args.cols + column;
  tile.wait_put();
  if (column < args.cols) {
#pragma unroll 8
    for (int row = Context::store_warp(); row < unit.rows; row += kStoreWarps) {
      ptx::store_global_16(out + row * args.cols, tile.template get<false>(row, lane));
    }
  }
  tile.stored();
}

/// A multiplying warp, where the sums leave as they are.
__device__ __forceinline__ void store_sums(const DownGradient&, const OutBoxes&, const RowsUnit&,
                                           const float (&)[kTileN / 2]) {}
__device__ __forceinline__ void store_sums(const RowsGradient& args, const OutBoxes& out,
                                           const RowsUnit& unit, const float (&sums)[kTileN / 2]) {
#pragma unroll 1
  for (int box = 0; box < kTileN / 64; ++box) {
    const std::int64_t column = std::int64_t{unit.column_tile} * kTileN + box * 64 + out.column();
    out.put(sums, box);
#pragma unroll
    for (int turn = 0; turn < OutBoxes::kTurns; ++turn) {
      float values[8];
      out.get(turn, values);
      if (out.row(turn) < unit.rows && column < args.cols) {
        store_floats(
            static_cast<float*>(args.out) + (unit.row + out.row(turn)) * args.cols + column,
            values);
      }
    }
  }
}

template <typename T, typename Args>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kRowsRoles<Args>.threads(), 1)
    rows_gradient(const __grid_constant__ CUtensorMap weights, const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char shared[];
  const Context<kRowsRoles<Args>> context{ptx::shared_address(shared), ptx::cluster_cta_rank()};
  const RowsOperands operands = operands_of(args);
  const int steps = (operands.depth + kTileK - 1) / kTileK;
  const auto steps_of = [steps](const int4&) { return steps; };
  const ScheduleParams schedule{args.rows.begin, args.rows.rows, args.rows.num_experts,
                                (operands.cols + kTileN - 1) / kTileN, nullptr};
  HandOver tile(context);
  run_roles(
      context, [&] { load_weights(context, &weights, schedule, steps); },
      [&] { gather_rows(context, operands, steps); }, steps_of,
      [&] {
        const OutBoxes out(shared, context.multiply_warp());
        run_multiply<T, true>(context, steps_of,
                              [&](const int4& message, const float(&sums)[kTileN / 2]) {
                                const RowsUnit unit = rows_unit(context, message);
                                if (unit.rows <= 0) return;
                                if (hands_over(args)) {
                                  tile.template put<T, false>(sums);
                                } else {
                                  store_sums(args, out, unit, sums);
                                }
                              });
      },
      [&] {
        if (!hands_over(args)) return;
        run_store(context, [&](const int4& message) {
          const RowsUnit unit = rows_unit(context, message);
          if (unit.rows > 0) store_tile<T>(args, unit, tile);
        });
      });
}

}  // namespace switchyard::backward::sm90

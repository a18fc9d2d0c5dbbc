#pragma once

// The multiplying warpgroups of the Hopper grouped GEMM.

#include "experts/gpu/grouped/sm90/gemm.cuh"

namespace switchyard {

/// One multiplying warpgroup.
template <typename Shape>
class Multiplier {
 public:
  using T = typename Shape::T;
  using Cursor = StageCursor<Shape::kStages>;
  static constexpr int kN = Shape::kTileN;
  using Pack = Packer<T, Shape::kEpilogue, kN>;
  using Tall = TallTile<T>;

  __device__ Multiplier(const Sm90Context<Shape>& context, int group)
      : context_(context),
        group_(group),
        staging_{context.shared + Shape::kStagingAt +
                     static_cast<std::uint32_t>(group) * Shape::Out::kBytes,
                 1 + group} {}

  /// Both warpgroups take 64 rows of every tile. Packed sums stay in registers and leave box by box
  /// while the next tile's first products run: only the conversion stops the tensor cores.
  __device__ __forceinline__ void run_cooperative() {
    float sums[kN / 2];
    uint2 packed[kBoxes * kBlocksPerBox];
    RowBlock block;
    Work work = context_.ring.receive(0);
    for (std::uint32_t index = 1; work.expert >= 0; ++index) {
      if constexpr (Shape::kTalls) {
        if (work.tile.tall) {
          const Cursor last = tall_steps(sums, packed, block, work.tile.rows);
          const Work next = context_.ring.receive(index);
          ptx::wgmma_wait<0>();
          hold(sums);
          release(last);
          block = {work.tile.row, work.tile.rows,
                   work.tile.column_tile * Shape::kOutColumns +
                       static_cast<std::int32_t>(context_.cta) * (Shape::kOutColumns / 2),
                   true};
          Tall::pack(sums, packed, context_.params.epilogue, work.expert, block.column, group_);
          work = next;
          continue;
        }
      }
      const std::int32_t rows = min(work.tile.rows - group_ * kHalfRows, kHalfRows);
      if (rows <= 0) {
        send_boxes(packed, block);
        block.rows = 0;
        pass_by();
        work = context_.ring.receive(index);
        continue;
      }
      const Cursor last = steps(packed, block, [&](bool clear) { multiply_step(sums, clear); });
      const Work next = context_.ring.receive(index);
      ptx::wgmma_wait<0>();
      hold(sums);
      release(last);
      block = {work.tile.row + group_ * kHalfRows, rows,
               work.tile.column_tile * Shape::kOutColumns};
      const Pack pack(context_.params.epilogue, work.expert, block.column);
      pack.add_bias(sums);
      if constexpr (Shape::kKeeps) keep(sums, block);
      pack.with_kind([&](auto kind) {
#pragma unroll
        for (int i = 0; i < Pack::kBlocks; ++i) {
          packed[i] = pack.template block<decltype(kind)::value>(sums, i);
        }
      });
      work = next;
    }
    send_boxes(packed, block);
    ptx::bulk_wait<0>();
  }

  /// The warpgroups take whole tiles in turn. One may look at the stages only once the other has
  /// seen its last: a wait for a phase cannot tell the next use of a stage from a later one.
  __device__ __forceinline__ void run_ping_pong() {
    float sums[2][kN / 2];
    for (std::uint32_t index = 0;; ++index) {
      const Work work = context_.ring.receive(index);
      if (work.expert < 0) break;
      if (index % 2 != static_cast<std::uint32_t>(group_)) {
        cursor_.advance(static_cast<std::uint32_t>(context_.num_steps));
        continue;
      }
      if (index > 0) ptx::mbarrier_wait(turn(group_), (index - 1) / 2 % 2);
      if (work.tile.rows > kHalfRows) {
        multiply_tile<2>(sums);
      } else if (work.tile.rows > 0) {
        multiply_tile<1>(sums);
      } else {
        pass_by();
        give_turn();
      }
      const std::int32_t column = work.tile.column_tile * Shape::kOutColumns;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::int32_t rows = min(work.tile.rows - half * kHalfRows, kHalfRows);
        if (rows <= 0) continue;
        const Pack pack(context_.params.epilogue, work.expert, column);
        pack.add_bias(sums[half]);
        const RowBlock block{work.tile.row + half * kHalfRows, rows, column};
        if constexpr (Shape::kKeeps) keep(sums[half], block);
        pack.with_kind([&](auto kind) {
          constexpr Activation kKind = decltype(kind)::value;
#pragma unroll
          for (int box = 0; box < kBoxes; ++box) {
            staging_.send(box, block, context_.params.epilogue, context_.out, [&](int i) {
              const int first = box * kBlocksPerBox + i;
              return join(pack.template block<kKind>(sums[half], first),
                          pack.template block<kKind>(sums[half], first + 1));
            });
          }
        });
      }
    }
    ptx::bulk_wait<0>();
  }

 private:
  static constexpr int kBoxes = Shape::kOutColumns / Shape::kBoxColumns;
  static constexpr int kBlocksPerBox = Shape::kBoxColumns / 8;

  /// A block's columns before the activation leave: gate ones, then up ones.
  __device__ __forceinline__ void keep(const float (&sums)[kN / 2], const RowBlock& block) {
    const std::int32_t columns = context_.params.epilogue.columns;
#pragma unroll
    for (int part = 0; part < (Shape::kGated ? 2 : 1); ++part) {
      const OutRows rows{
          static_cast<char*>(context_.params.preactivation) + std::int64_t{part} * columns * 2,
          columns, context_.params.weight_rows};
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        staging_.send(box, block, rows, nullptr, [&](int i) {
          const int first = part * Pack::kBlocks + box * kBlocksPerBox + i;
          return join(Pack::block_before(sums, first), Pack::block_before(sums, first + 1));
        });
      }
    }
  }

  /// All steps of a tile, the first of them beside the last tile's boxes on their way out. Returns
  /// the stage that the last step still reads.
  template <typename Step>
  __device__ __forceinline__ Cursor steps(const uint2 (&packed)[kBoxes * kBlocksPerBox],
                                          const RowBlock& block, Step&& multiply) {
    multiply(true);
    send_box(packed, block, 0);
    Cursor last = cursor_;
    cursor_.advance();
    int step = 1;
#pragma unroll
    for (int box = 1; box < kBoxes; ++box) {
      if (step < context_.num_steps) {
        multiply(false);
        send_box(packed, block, box);
        ++step;
        let_go(last);
      } else {
        send_box(packed, block, box);
      }
    }
    for (; step < context_.num_steps; ++step) {
      multiply(false);
      let_go(last);
    }
    return last;
  }

  /// The same of a tall tile: as many columns of the products as there are rows, in steps of 16.
  __device__ __forceinline__ Cursor tall_steps(float (&sums)[kN / 2],
                                               const uint2 (&packed)[kBoxes * kBlocksPerBox],
                                               const RowBlock& block, std::int32_t rows) {
    if (rows <= 144) return tall_steps_of<144>(sums, packed, block);
    if (rows <= 160) return tall_steps_of<160>(sums, packed, block);
    if (rows <= 176) return tall_steps_of<176>(sums, packed, block);
    return tall_steps_of<192>(sums, packed, block);
  }
  template <int kRows>
  __device__ __forceinline__ Cursor tall_steps_of(float (&sums)[kN / 2],
                                                  const uint2 (&packed)[kBoxes * kBlocksPerBox],
                                                  const RowBlock& block) {
    auto& used = reinterpret_cast<float(&)[kRows / 2]>(sums);
    return steps(packed, block, [&](bool clear) {
      ptx::mbarrier_wait(context_.full(cursor_), cursor_.phase);
      const std::uint32_t rows = context_.rows_at(cursor_);
      const std::uint64_t b = ptx::wgmma_operand(rows);
      const std::uint64_t a =
          ptx::wgmma_operand(rows + Shape::kTallWeightsAt +
                             static_cast<std::uint32_t>(group_) * Shape::kTallWeightsBytes / 2);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < Shape::kTileK / 16; ++k) {
        ptx::wgmma<T, kRows>(used, a + 2 * k, b + 2 * k, k > 0 || !clear);
      }
      ptx::wgmma_commit();
    });
  }

  /// The products of one step, of `kHalves` x 64 rows; the wait is the caller's.
  template <int kHalves>
  __device__ __forceinline__ void multiply_halves(float (&sums)[kHalves][kN / 2],
                                                  std::uint32_t first_row, bool clear) {
    ptx::mbarrier_wait(context_.full(cursor_), cursor_.phase);
    const std::uint64_t rows =
        ptx::wgmma_operand(context_.rows_at(cursor_) + first_row * Shape::kTileK * 2);
    const std::uint64_t weights = ptx::wgmma_operand(context_.weights_at(cursor_));
    constexpr std::uint64_t kNextHalf = kHalfRows * Shape::kTileK * 2 >> 4;
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Shape::kTileK / 16; ++k) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        ptx::wgmma<T, kN>(sums[half], rows + half * kNextHalf + 2 * k, weights + 2 * k,
                          k > 0 || !clear);
      }
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void multiply_step(float (&sums)[kN / 2], bool clear) {
    multiply_halves<1>(reinterpret_cast<float(&)[1][kN / 2]>(sums),
                       static_cast<std::uint32_t>(group_) * kHalfRows, clear);
  }

  template <int kHalves>
  __device__ __forceinline__ void multiply_tile(float (&sums)[2][kN / 2]) {
    auto& used = reinterpret_cast<float(&)[kHalves][kN / 2]>(sums);
    multiply_halves<kHalves>(used, 0, true);
    Cursor last = cursor_;
    cursor_.advance();
    for (int step = 1; step < context_.num_steps; ++step) {
      multiply_halves<kHalves>(used, 0, false);
      let_go(last);
    }
    give_turn();
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int half = 0; half < kHalves; ++half) hold(sums[half]);
    release(last);
  }

  /// The compiler may not move reads of the sums above the wait.
  static __device__ __forceinline__ void hold(float (&sums)[kN / 2]) {
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) asm volatile("" : "+f"(sums[i])::"memory");
  }

  /// A tile in which this warpgroup has no rows: its stages are let go as they come.
  __device__ __forceinline__ void pass_by() {
    for (int step = 0; step < context_.num_steps; ++step, cursor_.advance()) {
      ptx::mbarrier_wait(context_.full(cursor_), cursor_.phase);
      release(cursor_);
    }
  }

  __device__ std::uint32_t turn(int group) const {
    return context_.shared + Shape::kTurnAt + static_cast<std::uint32_t>(group) * 8;
  }
  __device__ __forceinline__ void give_turn() {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(turn(1 - group_));
  }

  /// This warp has read the stage: both CTAs may fill it again.
  __device__ __forceinline__ void release(const Cursor& cursor) {
    const std::uint32_t lane = threadIdx.x % 32;
    if (lane < 2) ptx::mbarrier_arrive_cluster(ptx::map_to_cta(context_.empty(cursor), lane));
  }

  /// The last step but one is done with its stage; `last` becomes the step just begun.
  __device__ __forceinline__ void let_go(Cursor& last) {
    ptx::wgmma_wait<1>();
    release(last);
    last = cursor_;
    cursor_.advance();
  }

  static __device__ __forceinline__ uint4 join(uint2 left, uint2 right) {
    return {left.x, left.y, right.x, right.y};
  }

  __device__ __forceinline__ void send_box(const uint2 (&packed)[kBoxes * kBlocksPerBox],
                                           const RowBlock& block, int box) {
    if (block.rows <= 0) return;
    if constexpr (Shape::kTalls) {
      if (block.tall) {
        Tall::send(packed, block, context_.params.epilogue, staging_.address, 1 + group_, group_,
                   box);
        return;
      }
    }
    staging_.send(box, block, context_.params.epilogue, context_.out, [&](int i) {
      const int first = box * kBlocksPerBox + i;
      return join(packed[first], packed[first + 1]);
    });
  }
  __device__ __forceinline__ void send_boxes(const uint2 (&packed)[kBoxes * kBlocksPerBox],
                                             const RowBlock& block) {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) send_box(packed, block, box);
  }

  const Sm90Context<Shape>& context_;
  std::int32_t group_;
  typename Shape::Out staging_;
  Cursor cursor_;
};

}  // namespace switchyard

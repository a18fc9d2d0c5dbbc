#pragma once

// How the portable grouped GEMM's operands come to shared memory: 16-byte cp.async of all threads,
// stages ahead of the products and across the ends of tiles, and the tile walk they follow.

#include "experts/gpu/grouped/epilogue.cuh"
#include "experts/gpu/grouped/scheduler.cuh"

namespace switchyard {

struct Sm80Params {
  ScheduleParams schedule;
  EpilogueParams epilogue;
  const void* rows;               // [N or S, depth]
  const std::int32_t* row_token;  // [S], or null
  const void* weights;            // [E * weight_rows, depth]
  std::int32_t depth;
  std::int32_t weight_rows;  // of one expert
  void* preactivation;       // [S, weight_rows], of the epilogues that keep it
};

/// Static shape of the 16-bit kernel: stages of kTileK values of 128 rows and of 256 rows of
/// weights (128 gate and 128 up ones when gated).
template <int kTileK_, int kStages_>
struct Sm80Shape {
  static constexpr int kTileK = kTileK_;
  static constexpr int kStages = kStages_;
  static constexpr int kThreads = 256;
  static constexpr int kTileN = 256;
  static constexpr int kRowBytes = kTileK * 2;
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kRowsBytes = kTileRows * kRowBytes;
  static constexpr int kStageBytes = kRowsBytes + kTileN * kRowBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;

  static constexpr int kGroups = kTileK / 16;       // of 16 values
  static constexpr int kPass = kThreads / kChunks;  // rows that one copy of all threads brings
  static constexpr int kRowCopies = kTileRows / kPass;
  static constexpr int kWeightCopies = kTileN / kPass;
  static constexpr int kCopies = kRowCopies + kWeightCopies;  // of a thread, for one stage
  static constexpr int kCopiesPerGroup = kCopies / kGroups;
  static_assert(kStages >= 3 && (kChunks == 4 || kChunks == 8));
  static_assert(kPass % 32 == 0, "the swizzles repeat every 32 rows");

  /// Where 16-byte chunk `chunk` of a row lies: eight rows as Sm80Operands reads them (two
  /// neighbours in each of four blocks of eight) meet all banks.
  static __device__ __forceinline__ std::uint32_t place(int row, int chunk) {
    const int swizzle = kChunks == 8 ? (row >> 3 & 3) * 2 + (row & 1) : row >> 3 & 3;
    return static_cast<std::uint32_t>(row * kRowBytes + ((chunk ^ swizzle) << 4));
  }
};

/// A work item as all threads see it; -1: no more.
__device__ __forceinline__ Work read_work(const int4* ring, std::uint32_t index) {
  const int4 m = ring[index % kRingSlots];
  return {m.x, {m.y, m.z, m.w, false}};
}

/// The next item with rows, for all threads, from one warp. False: no more.
__device__ __forceinline__ bool write_work(UnitWalk<2>& walk, int4* ring, std::uint32_t index) {
  int4 message = walk.next();
  Work work = unpack_message(message, static_cast<std::uint32_t>(walk.part()));
  while (work.expert >= 0 && work.tile.rows == 0) {
    message = walk.next();
    work = unpack_message(message, static_cast<std::uint32_t>(walk.part()));
  }
  if (threadIdx.x == 0) {
    ring[index % kRingSlots] = {work.expert, work.tile.row, work.tile.rows, work.tile.column_tile};
  }
  return work.expert >= 0;
}

/// Warp 0's walk over the items, in shared memory while nobody asks for one: registers are what the
/// products are short of.
struct Sm80Walk {
  int4 ring[kRingSlots];
  WalkState lanes[32];

  __device__ __forceinline__ void begin(const ScheduleParams& params) {
    UnitWalk<2> walk(params, static_cast<std::int32_t>(blockIdx.x),
                     static_cast<std::int32_t>(gridDim.x));
    if (write_work(walk, ring, 0)) write_work(walk, ring, 1);
    lanes[threadIdx.x] = walk.state();
  }
  __device__ __forceinline__ void write(const ScheduleParams& params, std::uint32_t index) {
    UnitWalk<2> walk(params, lanes[threadIdx.x], static_cast<std::int32_t>(gridDim.x));
    write_work(walk, ring, index);
    lanes[threadIdx.x] = walk.state();
  }
};

/// base + 16 * chunks. In C++ the compiler would keep a pointer of two registers for each place
/// that a loop over `base` reads, and spill others.
__device__ __forceinline__ const char* add_chunks(const char* base, std::uint32_t chunks) {
  const char* sum;
  asm("mad.wide.u32 %0, %1, 16, %2;" : "=l"(sum) : "r"(chunks), "l"(base));
  return sum;
}

/// One thread's part of every stage: which chunks it copies, tile after tile. Behind the last tile
/// its copies read nothing and write zeros.
template <typename Shape, bool kGated>
class Sm80Loader {
 public:
  __device__ Sm80Loader(const Sm80Params& params, const int4* ring, int num_steps)
      : params_(params),
        ring_(ring),
        num_steps_(num_steps),
        to_(Shape::place(static_cast<int>(threadIdx.x) / Shape::kChunks,
                         static_cast<int>(threadIdx.x) % Shape::kChunks)) {
    begin();
  }

  /// Copy number `i` of the step at hand, into `stage`.
  __device__ __forceinline__ void copy(int i, std::uint32_t stage) const {
    ptx::cp_async_16(stage + to_ + static_cast<std::uint32_t>(i * Shape::kPass * Shape::kRowBytes),
                     add_chunks(i < Shape::kRowCopies ? rows_ : weights_, offset_[i]),
                     chunks_left_ > 0 ? 16 : 0);
  }

  /// All copies of a step have been asked for.
  __device__ __forceinline__ void end_step() {
    ptx::cp_async_commit();
    rows_ += Shape::kRowBytes;
    weights_ += Shape::kRowBytes;
    chunks_left_ -= Shape::kChunks;
  }

  /// Steps until pass() has to be called.
  [[nodiscard]] __device__ __forceinline__ int steps_left() const { return steps_left_; }

  /// Behind `steps` steps: at a tile's end, on to the next. True: then it takes the last item that
  /// the ring has, and before it ends, the ring needs number `next_item()`.
  __device__ __forceinline__ bool pass(int steps) {
    steps_left_ -= steps;
    if (steps_left_ > 0) return false;
    ++index_;
    return begin();
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t next_item() const { return index_ + 1; }

 private:
  __device__ __forceinline__ bool begin() {
    const Work work = read_work(ring_, index_);
    if (work.expert < 0) {
      steps_left_ = 1 << 30;
      chunks_left_ = 0;
      return false;
    }
    const std::uint32_t depth_chunks = static_cast<std::uint32_t>(params_.depth) / 8;
    const int chunk = static_cast<int>(threadIdx.x) % Shape::kChunks;
    const int row = static_cast<int>(threadIdx.x) / Shape::kChunks;
    steps_left_ = num_steps_;
    chunks_left_ = static_cast<int>(depth_chunks) - chunk;
    const std::int64_t row_bytes = std::int64_t{params_.depth} * 2;
    const bool gather = params_.row_token != nullptr;
    rows_ = static_cast<const char*>(params_.rows) + chunk * 16 +
            (gather ? 0 : work.tile.row * row_bytes);
#pragma unroll
    for (int i = 0; i < Shape::kRowCopies; ++i) {
      const std::int32_t at = min(row + Shape::kPass * i, work.tile.rows - 1);
      offset_[i] = static_cast<std::uint32_t>(gather ? params_.row_token[work.tile.row + at] : at) *
                   depth_chunks;
    }
    // Columns past the end repeat the last one and are never stored.
    const std::int32_t columns = params_.epilogue.columns;
    const std::int32_t first = work.tile.column_tile * (kGated ? Shape::kTileN / 2 : Shape::kTileN);
    const std::int32_t last = columns - 1 - first;
    weights_ = static_cast<const char*>(params_.weights) + chunk * 16 +
               (std::int64_t{work.expert} * params_.weight_rows + first) * row_bytes;
#pragma unroll
    for (int i = 0; i < Shape::kWeightCopies; ++i) {
      const bool up = kGated && i >= Shape::kWeightCopies / 2;
      const std::int32_t column = row + Shape::kPass * (up ? i - Shape::kWeightCopies / 2 : i);
      offset_[Shape::kRowCopies + i] =
          static_cast<std::uint32_t>(min(column, last) + (up ? columns : 0)) * depth_chunks;
    }
    return true;
  }

  const Sm80Params& params_;
  const int4* ring_;
  int num_steps_;
  std::uint32_t to_;  // in a stage
  std::uint32_t index_ = 0;
  int steps_left_ = 0;
  int chunks_left_ = 0;  // of a row, from this thread's on
  const char* rows_ = nullptr;
  const char* weights_ = nullptr;
  std::uint32_t offset_[Shape::kCopies] = {};  // in chunks: 2^35 values
};

}  // namespace switchyard

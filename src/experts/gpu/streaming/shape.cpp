// Tiles and rings of the streaming kernels, from the problem and the chip: no tuning at run time.
// Also where the pieces lie in a block's shared memory.

#include "experts/gpu/streaming/shape.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "experts/gpu/coded/layout.hpp"
#include "plan/gpu/few.hpp"

namespace switchyard::streaming {
namespace {

constexpr int kReservedPerBlock = 1024;  // the driver's, of each block
// Of the shared memory of an SM; the rest is the second kernel's, which starts beside the first.
constexpr double kUpShare = 0.46;
// A layer of more weight runs for so long that a deeper ring is worth more than the overlap of its
// two kernels (f32 takes longer to multiply).
constexpr double kSoloBytes = 3e8;
constexpr double kSoloBytesF32 = 1.2e8;
constexpr double kSoloBytesF32Whole = 2.5e8;  // of one kernel for both
// Larger stages come too seldom.
constexpr int kMaxStage = 48 * 1024;

struct Load {
  double hits;          // experts expected to have rows
  double rows_per_hit;  // of those
};

Load expected_load(const StreamingProblem& p) {
  const double experts = p.num_experts;
  const auto assignments = static_cast<double>(std::max<std::int64_t>(p.max_assignments, 1));
  const double hits =
      std::min(assignments, experts * (1.0 - std::pow(1.0 - 1.0 / experts, assignments)));
  return {hits, assignments / hits};
}

// Token rows that a stage has room for at its largest pieces.
int token_rows(const StreamingProblem& p, const Load& load) {
  return static_cast<int>(std::min({64.0, std::ceil(load.rows_per_hit * 1.3),
                                    static_cast<double>(std::max<std::int64_t>(1, p.num_tokens))}));
}

// A box of a tensor copy has at most 256 elements, of 8 bytes here, along memory; runs of codes are
// copied whole.
constexpr int kMaxPiece = 2048;
constexpr int kMaxPieceOfCodes = 16 * 1024;
constexpr int kStep = 64;
constexpr int kTurn = 256;  // of codes: two units, which one warp multiplies

int step_of(WeightFormat format) { return format == WeightFormat::kExact ? kStep : kTurn; }

// Bytes of weights for a byte of a token row.
double share_of_weights(WeightFormat format) {
  return static_cast<double>(weight_bytes(format, 8, kTurn)) / (8.0 * kTurn);
}

/// Of the experts that are likely hit.
double hit_bytes(const StreamingProblem& p) {
  return expected_load(p).hits * share_of_weights(p.format) *
         static_cast<double>((p.gated ? 3 : 2) * p.hidden * p.inner * size_of(p.dtype));
}

// As much of each row as lets at least three stages stand in the ring, and the same in every chunk.
void fill_ring(StreamingKernelShape& shape, const StreamingProblem& p, int weight_rows, int tokens,
               std::int64_t row_bytes, int ring) {
  const WeightFormat format = p.format;
  const int step = step_of(format);
  const std::int64_t steps = (row_bytes + step - 1) / step;
  const bool exact = format == WeightFormat::kExact;
  // Stages of codes hold more weights, and are multiplied for longer: one more of them.
  const int least_stages = exact ? 3 : 4;
  int piece =
      static_cast<int>(std::min<std::int64_t>(steps * step, exact ? kMaxPiece : kMaxPieceOfCodes));
  const auto stage_of = [&](int bytes, int token_rows) {
    return static_cast<int>(weight_bytes(format, weight_rows, bytes)) +
           token_rows * (bytes | kStep);
  };
  const auto stage = [&] { return stage_of(piece, tokens); };
  while (piece > step && (stage() > ring / least_stages || stage() > kMaxStage)) {
    piece = next_piece(format, piece);
  }
  shape.piece_bytes = piece;
  // The last level must take the most rows that are multiplied at a time.
  int last = piece;
  for (int level = 1; level < kPieceLevels; ++level) last = next_piece(format, last);
  const int most_rows = exact ? 64 : static_cast<int>(std::clamp<std::int64_t>(p.max_rows, 1, 32));
  const int least = stage_of(last, most_rows);
  shape.stage_bytes = (std::max(stage(), least) + 127) / 128 * 128;
  shape.num_stages = std::min(kMaxRingStages, ring / shape.stage_bytes);
  shape.lead_stages = shape.num_stages + 2;
}

// What a stage costs beside its weights: token rows come from the L2 once per tile, and short runs
// of memory are slower to read.
double overhead(const StreamingKernelShape& shape, const StreamingProblem& p, double rows_per_hit,
                int weight_rows, std::int64_t row_bytes) {
  const double dense = share_of_weights(p.format);
  const double run = dense * static_cast<double>(shape.piece_bytes) *
                     (shape.piece_bytes >= row_bytes ? weight_rows : row_unit(p.format));
  // From a dozen rows on the products take as long as the weights, and larger tiles share more.
  const double compute = std::max(0.0, rows_per_hit - 12.0 * dense) / (weight_rows * dense);
  // f32 also takes longer to multiply.
  const double share = (p.dtype == DType::kF32 ? 0.8 : 0.3) / dense;
  return (1.0 + share * rows_per_hit / weight_rows + compute) * (1.0 + 64.0 / run);
}

// Items of 64 columns a block, from which a block takes a whole SM where weights are codes, as
// measured. (Not by the plan's age: a row's bits depend on the tiles.)
constexpr double kLeastItemsOfCodes = 0.5;

StreamingKernelShape choose_up(const StreamingProblem& p, const StreamingChip& chip,
                               const Load& load, int tokens, int pair_ring, int solo_ring,
                               bool solo) {
  StreamingKernelShape best;
  double best_cost = std::numeric_limits<double>::max();
  const std::int64_t row_bytes = p.hidden * size_of(p.dtype);
  for (const int tiles : {1, 2, 4, 8}) {
    if (!chip.hopper && tiles != 1 && tiles != 4) continue;  // not built
    if (p.up_tiles != 0 && tiles != p.up_tiles) continue;
    // Codes take so many instructions that the registers of a whole SM pay, where a block has some
    // of eight tiles' 64 columns.
    if (p.format != WeightFormat::kExact && p.up_tiles == 0 && tiles < 4 &&
        load.hits * static_cast<double>(p.inner) > kLeastItemsOfCodes * 64 * chip.num_sms) {
      continue;
    }
    StreamingKernelShape shape;
    shape.tiles = tiles;
    shape.num_blocks = chip.num_sms;
    // From 4 tiles on, a block takes the registers of a whole SM.
    fill_ring(shape, p, 16 * tiles, tokens, row_bytes, solo || tiles > 2 ? solo_ring : pair_ring);
    const double columns = (p.gated ? 8.0 : 16.0) * tiles;
    const double items =
        load.hits * std::ceil(static_cast<double>(p.inner) / columns) / chip.num_sms;
    const double cost = std::max(1.0, std::ceil(items - 0.05)) / items *
                        overhead(shape, p, load.rows_per_hit, 16 * tiles, row_bytes);
    if (shape.num_stages >= 2 && cost < best_cost * 0.98) {
      best_cost = cost;
      best = shape;
    }
    if (p.batch_invariant) break;
  }
  return best;
}

// Most rows of H that one of the blocks owns.
std::int64_t rows_of_block(const StreamingProblem& p, int num_blocks) {
  const std::int64_t unit = row_unit(p.format);
  return (p.hidden / unit + num_blocks - 1) / num_blocks * unit;
}

// Up to this many bytes of a row, one warp walks over all of it: handing sums over costs more.
constexpr std::int64_t kByItemBytes = 512;

StreamingKernelShape choose_down(const StreamingProblem& p, const Load& load, int tokens,
                                 int num_blocks, int ring, bool hopper, bool many_rows) {
  StreamingKernelShape best;
  double best_cost = std::numeric_limits<double>::max();
  const std::int64_t row_bytes = p.inner * size_of(p.dtype);
  const auto rows = static_cast<int>(rows_of_block(p, num_blocks));
  const bool by_item = hopper && row_bytes <= kByItemBytes && p.format == WeightFormat::kExact;
  for (const int tiles : {1, 2, 4}) {
    const bool two = !by_item && (p.format != WeightFormat::kExact || (hopper && !many_rows));
    if (tiles == (by_item ? 1 : two ? 0 : 2)) continue;  // not built
    if (p.down_tiles != 0 && tiles != p.down_tiles) continue;
    const int per_block = (rows + 16 * tiles - 1) / (16 * tiles);
    const int of_tile = down_tile_rows(p, num_blocks, tiles);
    StreamingKernelShape shape;
    shape.tiles = tiles;
    shape.by_item = by_item;
    shape.num_blocks = num_blocks;
    fill_ring(shape, p, of_tile, tokens, row_bytes, by_item ? ring / 2 : ring);
    if (by_item) shape.num_stages = std::min(kMaxRingStages, ring / shape.stage_bytes);
    shape.lead_stages = shape.num_stages + 2;
    // With a fixed tile for all batches the token rows do not count.
    const double cost =
        overhead(shape, p, p.batch_invariant ? 0 : load.rows_per_hit, of_tile, row_bytes);
    if (shape.num_stages >= 2 && cost < best_cost) {
      best_cost = cost;
      best = shape;
    }
    if (per_block == 1) break;
  }
  return best;
}

StreamingShape choose_two(const StreamingProblem& p, const StreamingChip& chip, const Load& load,
                          bool solo) {
  const int per_sm = chip.shared_bytes_per_sm;
  const int most = chip.shared_bytes_per_block;
  const int tokens = token_rows(p, load);
  const int up_budget = static_cast<int>(kUpShare * per_sm) - kReservedPerBlock;
  StreamingShape shape;
  const int up_fixed = up_layout(p).ring;
  shape.up = choose_up(p, chip, load, tokens, up_budget - up_fixed, most - up_fixed, solo);

  const std::int64_t per_wave = std::int64_t{128} * chip.num_sms;
  const int num_blocks = static_cast<int>(std::min<std::int64_t>(
      p.hidden / row_unit(p.format), chip.num_sms * ((p.hidden + per_wave - 1) / per_wave)));
  const int down_fixed = down_layout(p, num_blocks).ring;
  int down_ring = std::min(most, per_sm - up_budget - 2 * kReservedPerBlock) - down_fixed;
  // Many rows of results: rather give up the overlap than the depth of the ring.
  if (solo || shape.up.tiles > 2 || down_ring < 64 * 1024) down_ring = most - down_fixed;
  shape.down = choose_down(p, load, tokens, num_blocks, std::max(down_ring, 0), chip.hopper,
                           shape.up.tiles > 2);
  shape.fits = shape.up.num_stages >= 2 && shape.down.num_stages >= 2;
  return shape;
}

constexpr int kLeastWholeStages = 3;
// 16-bit weights come so fast that counting items and hits costs more than what lies between two
// kernels, but where a block has few items of short rows.
constexpr double kWholeBytes = 1.2e8;

bool few_enough(const StreamingProblem& p, const StreamingChip& chip, double weight_bytes) {
  const bool pays = p.dtype == DType::kF32 ||
                    (p.inner * size_of(p.dtype) <= kByItemBytes && weight_bytes <= kWholeBytes);
  return pays && p.format == WeightFormat::kExact && p.blocks_meet && chip.hopper &&
         !p.batch_invariant && p.max_assignments <= planning::kMostFew &&
         max_hits(p) <= StreamingSync::kMostHits && (!p.makes_plan || !p.x_is_packed);
}

// One kernel for both, where few hits make what lies between two kernels count.
void choose_whole(const StreamingProblem& p, const StreamingChip& chip, bool solo,
                  StreamingShape& shape) {
  if (!shape.fits || shape.up.tiles != 1 || shape.up.num_blocks != shape.down.num_blocks ||
      (!shape.down.by_item && (shape.down.tiles == 4 || p.dtype != DType::kF32))) {  // not built
    return;
  }
  const int tokens = token_rows(p, expected_load(p));
  const int fixed = whole_layout(p, shape.down.num_blocks).ring;
  const auto rows =
      static_cast<int>((p.hidden + shape.down.num_blocks - 1) / shape.down.num_blocks);
  const int per_block = (rows + 16 * shape.down.tiles - 1) / (16 * shape.down.tiles);
  const int of_tile = (rows + per_block - 1) / per_block;
  const auto stage = [&](int piece) { return of_tile * piece + tokens * (piece | kStep); };
  StreamingKernelShape down = shape.down;
  while (stage(down.piece_bytes) > shape.up.stage_bytes && down.piece_bytes > 256) {
    down.piece_bytes = next_piece(p.format, down.piece_bytes);
  }
  int last = down.piece_bytes;
  for (int level = 1; level < kPieceLevels; ++level) last = next_piece(p.format, last);
  const int least = of_tile * last + 64 * (last | kStep);
  shape.ring.stage_bytes =
      (std::max({shape.up.stage_bytes, stage(down.piece_bytes), least}) + 127) / 128 * 128;
  const auto stages_in = [&](int bytes) {
    return std::min(kMaxRingStages, (bytes - fixed) / shape.ring.stage_bytes);
  };
  const int half = chip.shared_bytes_per_sm / 2 - kReservedPerBlock;
  shape.ring.num_stages = stages_in(half);
  // Two blocks of the next kernel on one SM would take twice as long: it is let in before any block
  // of this one can have left, where it has weights to fetch somewhat later.
  shape.ring.lead_stages = p.plan_is_older ? 2 * shape.ring.num_stages : 1 << 20;
  if (solo || shape.ring.num_stages < kLeastWholeStages) {
    shape.ring.num_stages = stages_in(chip.shared_bytes_per_block);
    shape.ring.lead_stages = shape.ring.num_stages + 2;
  }
  shape.ring.num_blocks = shape.down.num_blocks;
  shape.whole = shape.ring.num_stages >= kLeastWholeStages;
  if (shape.whole) shape.down = down;
}

// Of sums on their way to the warp that finishes.
int part_bytes(WeightFormat format) {
  return kRingPartBytes * (format == WeightFormat::kExact ? kFewConsumers : kManyConsumers);
}

int align(std::int64_t bytes) { return static_cast<int>((bytes + 127) / 128 * 128); }

}  // namespace

std::int64_t weight_bytes(WeightFormat format, std::int64_t rows, std::int64_t piece) {
  if (format == WeightFormat::kExact) return rows * piece;
  const std::int64_t units = piece / 2 / coded::kUnitValues;
  return rows / coded::kGroupRows * units * coded::unit_bytes(format);
}

int next_piece(WeightFormat format, int piece) {
  const int step = step_of(format);
  return piece <= step ? step : (piece / 2 + step - 1) / step * step;
}

int down_tile_rows(const StreamingProblem& p, int num_blocks, int tiles) {
  const auto rows = static_cast<int>(rows_of_block(p, num_blocks));
  if (row_unit(p.format) > 1) return std::min(rows, 16 * tiles);
  const int per_block = (rows + 16 * tiles - 1) / (16 * tiles);
  return (rows + per_block - 1) / per_block;
}

int row_unit(WeightFormat format) { return format == WeightFormat::kExact ? 1 : coded::kGroupRows; }

std::int64_t max_hits(const StreamingProblem& p) {
  return std::min<std::int64_t>(p.num_experts, p.max_rows) + p.max_rows / 32;
}

UpLayout up_layout(const StreamingProblem& p) {
  UpLayout at{};
  at.hits = kRingBarrierBytes;
  at.tokens = at.hits + align(max_hits(p) * 8);
  at.parts = at.tokens + align(p.x_is_packed ? 0 : p.max_rows * 4);
  at.ring = at.parts + part_bytes(p.format);
  return at;
}

DownLayout down_layout(const StreamingProblem& p, int num_blocks) {
  const std::int64_t rows = rows_of_block(p, num_blocks);
  DownLayout at{};
  at.hits = kRingBarrierBytes;
  at.parts = at.hits + align(max_hits(p) * 8);
  at.groups = at.parts + part_bytes(p.format);
  at.begins = at.groups + align(p.max_rows);
  at.terms = at.begins + align((p.num_tokens + 1) * 4);
  at.y = at.terms + align(p.max_assignments * 8);
  // More rows than any block can hold: report a size that no block has.
  const std::int64_t y_bytes = p.max_rows * rows * size_of(p.dtype);
  at.ring = at.y + align(std::min<std::int64_t>(y_bytes, 1 << 28));
  return at;
}

WholeLayout whole_layout(const StreamingProblem& p, int num_blocks) {
  // Closer together: a stage more may fit.
  const auto align_16 = [](std::int64_t bytes) { return static_cast<int>((bytes + 15) / 16 * 16); };
  const std::int64_t rows = (p.hidden + num_blocks - 1) / num_blocks;
  WholeLayout at{};
  at.parts = kRingBarrierBytes;
  at.claims = at.parts + part_bytes(p.format);
  at.experts = at.claims + kClaimBytes;
  at.up_hits = at.experts + align_16(p.makes_plan ? p.max_assignments * 4 : 0);
  at.down_hits = at.up_hits + align_16(max_hits(p) * 8);
  at.tokens = at.down_hits + align_16(max_hits(p) * 8);
  at.groups = at.tokens + align_16(p.x_is_packed ? 0 : p.max_rows * 4);
  at.begins = at.groups + align_16(p.max_rows);
  at.terms = at.begins + align_16((p.num_tokens + 1) * 4);
  at.y = at.terms + align_16(p.max_assignments * 8);
  at.ring = align(at.y + p.max_rows * rows * size_of(p.dtype));
  return at;
}

}  // namespace switchyard::streaming

namespace switchyard {

bool worth_streaming(const StreamingProblem& p, const StreamingChip& chip) {
  // On Hopper the grouped GEMM reads weights at 0.9 of the streaming kernels' rate however many
  // rows share them; these multiply by mma.sync, which takes longer than the weights from 6 rows
  // on. Products of f32 rows are six times as dear; before Hopper their grouped GEMM is no faster.
  constexpr std::int64_t kMostRows = 4;
  constexpr std::int64_t kMostRowsPortable = 24;
  constexpr std::int64_t kMostRowsF32 = 8;
  // From these on grouped/coded/ decodes a weight once for all rows of its expert. Where codes of
  // MXFP4 are numbers of e5m2 to it, it is faster from 46 us of an H200's memory on.
  constexpr std::int64_t kRowsOfCodes = 2;
  constexpr double kFoldedBytes = 200e6;
  if (p.format == WeightFormat::kMxfp4 && p.scales_fold && streaming::hit_bytes(p) > kFoldedBytes) {
    return false;
  }
  if (p.format != WeightFormat::kExact) {
    return p.max_assignments < kRowsOfCodes * std::max(p.total_experts, p.num_experts);
  }
  if (p.dtype == DType::kF32) {
    return !chip.hopper || p.max_assignments <= kMostRowsF32 * p.num_experts;
  }
  if (!chip.hopper) return p.max_assignments <= kMostRowsPortable * p.num_experts;
  return p.max_assignments <= kMostRows * std::max(p.total_experts, p.num_experts);
}

StreamingShape choose_streaming(const StreamingProblem& p, const StreamingChip& chip) {
  using namespace streaming;
  const Load load = expected_load(p);
  const double weight_bytes = hit_bytes(p);
  const bool is_f32 = p.dtype == DType::kF32;
  if (few_enough(p, chip, weight_bytes)) {
    const bool solo = weight_bytes > (is_f32 ? kSoloBytesF32Whole : kSoloBytes);
    StreamingShape shape = choose_two(p, chip, load, solo);
    choose_whole(p, chip, solo, shape);
    if (shape.whole) return shape;
  }
  const bool solo = !chip.hopper || weight_bytes > (is_f32 ? kSoloBytesF32 : kSoloBytes);
  return choose_two(p, chip, load, solo);
}

}  // namespace switchyard

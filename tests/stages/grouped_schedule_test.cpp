// The device-side schedule of the grouped GEMM and its choice of tile, on the host.

#include "experts/gpu/grouped/schedule.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "experts/gpu/grouped/tile_config.hpp"

namespace switchyard {
namespace {

/// How often each row of an expert meets each column tile, once for each CTA of a tall unit.
template <bool kTalls = false>
std::vector<int> visits(std::int32_t rows, std::int32_t tiles) {
  std::vector<int> count(static_cast<std::size_t>(rows * tiles), 0);
  for (std::int32_t index = 0; index < units_of<kTalls>(rows, tiles); ++index) {
    const Unit unit = unit_at<kTalls>(index, rows, tiles);
    for (std::int32_t cta = 0; cta < 2; ++cta) {
      const CtaTile tile = tile_of(unit, cta);
      EXPECT_GE(tile.rows, 0);
      EXPECT_LE(tile.rows, tile.tall ? kTallRows : kTileRows);
      EXPECT_EQ(tile.tall, unit.kind == UnitKind::kTall);
      if (tile.tall && cta == 1) continue;  // the other half of the same columns
      for (std::int32_t row = tile.row; row < tile.row + tile.rows; ++row) {
        ++count.at(static_cast<std::size_t>(row * tiles + tile.column_tile));
      }
    }
  }
  return count;
}

TEST(GroupedSchedule, EveryRowMeetsEveryColumnTileOnce) {
  for (const std::int32_t tiles : {1, 2, 3, 6, 7}) {
    for (std::int32_t rows = 0; rows < 700; rows += (rows < 260 ? 1 : 37)) {
      const std::vector<int> count = visits(rows, tiles);
      EXPECT_EQ(count, std::vector<int>(count.size(), 1)) << rows << " rows, " << tiles;
    }
  }
  for (const std::int32_t rows : {2048, 2049, 4097, 6400}) {  // more than one group of stacks
    const std::vector<int> count = visits(rows, 5);
    EXPECT_EQ(count, std::vector<int>(count.size(), 1)) << rows;
  }
}

TEST(GroupedSchedule, WithTallBlocksToo) {
  for (const std::int32_t tiles : {1, 2, 3, 6, 7}) {
    for (std::int32_t rows = 0; rows < 900; rows += (rows < 600 ? 1 : 37)) {
      const std::vector<int> count = visits<true>(rows, tiles);
      EXPECT_EQ(count, std::vector<int>(count.size(), 1)) << rows << " rows, " << tiles;
    }
  }
  for (const std::int32_t rows : {2048, 2049, 2112, 2113, 2240, 4097, 6400}) {
    const std::vector<int> count = visits<true>(rows, 5);
    EXPECT_EQ(count, std::vector<int>(count.size(), 1)) << rows;
  }
}

TEST(GroupedSchedule, ATallBlockTakesThePlaceOfAHalfEmptyOne) {
  for (std::int32_t rows = 1; rows < 1200; ++rows) {
    std::int32_t talls = 0;
    for (std::int32_t index = 0; index < units_of<true>(rows, 2); ++index) {
      const Unit unit = unit_at<true>(index, rows, 2);
      if (unit.kind != UnitKind::kTall) continue;
      ++talls;
      EXPECT_GT(unit.rows, kTileRows) << rows;
      EXPECT_LE(unit.rows, kTallRows) << rows;
    }
    const std::int32_t left = rows % kTileRows;
    EXPECT_EQ(talls, rows > kTileRows && 0 < left && left <= kHalfRows ? 2 : 0) << rows;
  }
}

TEST(GroupedSchedule, ATileHasAtMost63RowsOfPaddingInAnExpert) {
  for (std::int32_t rows = 1; rows < 1200; ++rows) {
    std::int32_t computed = 0;  // rows of half tiles that are multiplied, over two column tiles
    for (std::int32_t index = 0; index < units_of(rows, 2); ++index) {
      for (std::int32_t cta = 0; cta < 2; ++cta) {
        const std::int32_t used = tile_of(unit_at(index, rows, 2), cta).rows;
        computed += (used + kHalfRows - 1) / kHalfRows * kHalfRows;
      }
    }
    EXPECT_LT(computed - 2 * rows, 2 * kHalfRows) << rows;
  }
}

TEST(GroupedSchedule, HalvesOfAUnitAreItsRowsAndHalfTilesOnly) {
  for (const std::int32_t rows : {1, 64, 65, 128, 129, 192, 193, 255, 256, 300, 500}) {
    for (const std::int32_t tiles : {1, 2, 5}) {
      for (std::int32_t index = 0; index < units_of(rows, tiles); ++index) {
        const Unit unit = unit_at(index, rows, tiles);
        std::vector<int> whole(static_cast<std::size_t>(rows * tiles), 0);
        std::vector<int> halves = whole;
        for (std::int32_t cta = 0; cta < 2; ++cta) {
          const auto mark = [&](std::vector<int>& count, const CtaTile& tile) {
            for (std::int32_t row = tile.row; row < tile.row + tile.rows; ++row) {
              ++count.at(static_cast<std::size_t>(row * tiles + tile.column_tile));
            }
          };
          mark(whole, tile_of(unit, cta));
          for (std::int32_t half = 0; half < 2; ++half) {
            const CtaTile tile = tile_of(half_of(unit, half), cta);
            EXPECT_LE(tile.rows, kHalfRows);
            EXPECT_EQ(tile.share_weights, tile_of(unit, cta).share_weights);
            mark(halves, tile);
          }
        }
        EXPECT_EQ(halves, whole) << rows << " rows, " << tiles << " tiles, unit " << index;
        EXPECT_GT(half_of(unit, 0).rows, 0);
      }
    }
  }
}

TEST(GroupedSchedule, HalvesOfATallUnitShareWeightsAndAreItsRows) {
  for (const std::int32_t rows : {129, 150, 192, 257, 320, 400}) {
    for (std::int32_t index = 0; index < units_of<true>(rows, 3); ++index) {
      const Unit unit = unit_at<true>(index, rows, 3);
      if (unit.kind != UnitKind::kTall) continue;
      std::int32_t next = unit.row;
      for (std::int32_t half = 0; half < 2; ++half) {
        for (std::int32_t cta = 0; cta < 2; ++cta) {
          const CtaTile tile = tile_of(half_of(unit, half), cta);
          EXPECT_TRUE(tile.share_weights);
          EXPECT_LE(tile.rows, kHalfRows);
          EXPECT_EQ(tile.column_tile, unit.column_tile);
          if (tile.rows > 0) {
            EXPECT_EQ(tile.row, next);
          }
          next += tile.rows;
        }
      }
      EXPECT_EQ(next, unit.row + unit.rows) << rows;
    }
  }
}

TEST(GroupedSchedule, StripsMeetEveryColumnTileOnceAndDifferByAtMostOneRow) {
  for (const std::int32_t tiles : {1, 2, 7}) {
    for (const std::int32_t rows : {0, 1, 63, 64, 65, 94, 128, 129, 500, 2048, 2049, 4200}) {
      std::vector<int> count(static_cast<std::size_t>(rows * tiles), 0);
      for (std::int32_t index = 0; index < StripCut::units_of(rows, tiles); ++index) {
        const Unit unit = StripCut::unit_at(index, rows, tiles);
        EXPECT_LE(unit.rows, StripCut::kRows);
        EXPECT_GE(unit.rows, rows / StripCut::strips(rows));
        for (std::int32_t row = unit.row; row < unit.row + unit.rows; ++row) {
          ++count.at(static_cast<std::size_t>(row * tiles + unit.column_tile));
        }
      }
      EXPECT_EQ(count, std::vector<int>(count.size(), 1)) << rows << " rows, " << tiles;
    }
  }
}

TEST(GroupedSchedule, BothCtasOfAUnitAgreeOnSharingWeights) {
  for (const std::int32_t rows : {1, 64, 65, 128, 129, 192, 193, 256, 300}) {
    for (const std::int32_t tiles : {1, 2, 5}) {
      for (std::int32_t index = 0; index < units_of(rows, tiles); ++index) {
        const Unit unit = unit_at(index, rows, tiles);
        const CtaTile first = tile_of(unit, 0);
        const CtaTile second = tile_of(unit, 1);
        EXPECT_EQ(first.share_weights, second.share_weights);
        EXPECT_EQ(first.share_weights, first.column_tile == second.column_tile);
        EXPECT_LT(second.column_tile, tiles);
      }
    }
  }
}

TEST(GroupedSchedule, NoRowsNoUnits) { EXPECT_EQ(units_of(0, 7), 0); }

// Measured on an H200: with many rows an expert ping-pong gains up to 1% on Qwen3-30B and loses 2
// to 13% on these others.
TEST(TileConfig, NarrowTilesOnlyWhereTheyDivideTheWidthAndSumsAreShortAndRowsMany) {
  EXPECT_EQ(choose_tile({2048, 768}), TileShape::kPingPong);
  EXPECT_EQ(choose_tile({2048, 768, 2048}), TileShape::kPingPong);
  EXPECT_EQ(choose_tile({2048, 768, 512}), TileShape::kCooperative);
  EXPECT_EQ(choose_tile({2048, 768, 1}), TileShape::kCooperative);
  EXPECT_EQ(choose_tile({4096, 256}), TileShape::kCooperative);
  EXPECT_EQ(choose_tile({4096, 512}), TileShape::kCooperative);
  EXPECT_EQ(choose_tile({2048, 1024}), TileShape::kCooperative);
  EXPECT_EQ(choose_tile({1536, 256}), TileShape::kCooperative);
  EXPECT_EQ(choose_tile({4096, 1536}), TileShape::kCooperative);
  EXPECT_EQ(choose_tile({7168, 2048}), TileShape::kCooperative);
}

TEST(TileConfig, TilesCoverTheWidth) {
  for (std::int64_t inner = 8; inner < 1000; inner += 8) {
    for (const TileShape shape : {TileShape::kCooperative, TileShape::kPingPong}) {
      const std::int64_t tiles = column_tiles(shape, inner);
      EXPECT_GE(tiles * tile_columns(shape), inner);
      EXPECT_LT((tiles - 1) * tile_columns(shape), inner);
    }
  }
}

}  // namespace
}  // namespace switchyard

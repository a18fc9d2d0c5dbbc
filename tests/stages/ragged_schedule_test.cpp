// How a weights' gradient on the GPU is cut into parts of an expert's rows.

#include <gtest/gtest.h>

#include "experts/gpu/backward/schedule.hpp"

namespace switchyard {
namespace {

TEST(RaggedSchedule, PartsCoverEveryRowOnceInOrderAndNoneIsLargerThanAllowed) {
  for (const std::int32_t most : {64, 128, 192, 256, 1024}) {
    for (std::int32_t rows = 0; rows < 3000; ++rows) {
      const std::int32_t parts = parts_of(rows, most);
      ASSERT_GE(parts, 1);
      std::int32_t next = 0;
      for (std::int32_t part = 0; part < parts; ++part) {
        const RowRange range = rows_of_part(part, rows, most);
        ASSERT_EQ(range.begin, next) << rows << " rows, most " << most;
        ASSERT_TRUE(rows == 0 || range.end > range.begin) << rows << " rows, most " << most;
        ASSERT_LE(range.end - range.begin, most);
        next = range.end;
      }
      ASSERT_EQ(next, rows);
    }
  }
}

TEST(RaggedSchedule, PartsOfSplitExpertsNeverExceedTheirRoom) {
  for (const std::int64_t max_rows : {0, 1, 256, 257, 512, 513, 5000, 262144}) {
    for (const std::int64_t cols : {8, 128, 768, 4096}) {
      const RaggedProblem problem{max_rows, cols, 2048};
      const std::int32_t most = part_rows(problem);
      EXPECT_EQ(most % kPartRows, 0);
      // The worst case: as many experts as there can be that are just too large for one part.
      const std::int64_t experts = max_rows / (most + 1);
      EXPECT_LE(experts * parts_of(most + 1, most), max_split_parts(problem));
      EXPECT_LE(max_rows > most ? parts_of(static_cast<std::int32_t>(max_rows), most) : 0,
                max_split_parts(problem));
    }
  }
}

TEST(RaggedSchedule, RoomForPartsIsBoundedWhateverTheLayer) {
  for (const std::int64_t cols : {512, 2048, 28672}) {
    EXPECT_LE(split_bytes({262144, cols, 4096}), 4 * kPartWorkers * kPartTileBytes) << cols;
  }
}

TEST(RaggedSchedule, NoPartIsMoreThanHalfOfWhatAWorkerHasWhereRowsAreMany) {
  const RaggedProblem problem{65536, 1024, 512};
  EXPECT_LE(part_rows(problem), 65536 * tiles_of(problem) / (2 * kPartWorkers) + kPartRows);
  EXPECT_EQ(parts_of(8192, part_rows(problem)), 3);
}

}  // namespace
}  // namespace switchyard

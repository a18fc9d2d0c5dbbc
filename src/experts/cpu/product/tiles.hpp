#pragma once

// What products by tiles of AMX share. For the file that is compiled for them.

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace switchyard::cpu::amx {

inline constexpr std::int64_t kRows = 16;       ///< Of a tile.
inline constexpr std::int64_t kTileDepth = 32;  ///< Values along the reduction in a tile.
inline constexpr std::int64_t kPanelCols = 32;
inline constexpr std::int64_t kTileElements = kRows * kTileDepth;
inline constexpr std::int64_t kStepBytes = kTileDepth * kPanelCols * 2;  ///< Of a panel in bf16.

struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

/// gcc 12 declares neither that ldtilecfg reads 64 bytes nor that tile loads and stores touch
/// memory: so the configuration is an operand, and this stands around every use of tiles.
inline void memory_barrier() { asm volatile("" ::: "memory"); }

inline void configure() {
  const TileConfig config;
  asm volatile("ldtilecfg %0" ::"m"(config));
}

}  // namespace switchyard::cpu::amx

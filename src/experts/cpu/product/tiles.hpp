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

/// Fetches the next panel into the second-level cache while this one is multiplied, as eight
/// streams side by side: memory gives 28 to 38 GB/s to eight and 22 to 25 to one (two cores of a
/// Xeon, prototype of 2026-11-21).
class Fetch {
 public:
  Fetch(const std::byte* panel, std::int64_t panel_bytes, std::int64_t lines_per_step)
      : from_(panel), part_(panel_bytes / kStreams), lines_(lines_per_step) {}
  void step() {
    for (std::int64_t i = 0; i < lines_; ++i) {
      _mm_prefetch(from_ + stream_ * part_, _MM_HINT_T1);
      if (++stream_ == kStreams) {
        stream_ = 0;
        from_ += 64;
      }
    }
  }

 private:
  static constexpr std::int64_t kStreams = 8;
  const std::byte* from_;
  std::int64_t part_;
  std::int64_t lines_;
  std::int64_t stream_ = 0;
};

}  // namespace switchyard::cpu::amx

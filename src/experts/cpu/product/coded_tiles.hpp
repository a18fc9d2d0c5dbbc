#pragma once

// Stored weights times rows by tiles of AMX, each output one chain in ascending depth as the tiles
// have it: the bits of exact weights.

#include <algorithm>

#include "experts/cpu/product/rounding_pairs.hpp"
#include "experts/cpu/product/tiles.hpp"
#include "experts/cpu/product/widen.hpp"

namespace switchyard::cpu::amx {

/// Codes are widened while others are multiplied: what is made of 32 depths lies in the first-level
/// cache until the tiles take it, a step later. A piece of the depth after the other, the vector
/// units wait for the tiles and these for the vector units, and memory for both. Two blocks of rows
/// pass by a panel at a time, from the second time on one that is in a cache; a single block by two
/// panels.
template <class V, class Reader>
class CodedTiles {
 public:
  CodedTiles(const ProductArgs& args, const Int4Form& int4) : args_(args), int4_(int4) {}

  void run() {
    const std::int64_t count = args_.blocks.count();
    std::int64_t panel = 0;
    if (count == 1) {
      for (; panel + 2 <= args_.panels; panel += 2) multiply<1, 2>(panel, 0);
    }
    for (; panel < args_.panels; ++panel) {
      for (std::int64_t b = 0; b + 2 <= count; b += 2) multiply<2, 1>(panel, b);
      if (count % 2 != 0) multiply<1, 1>(panel, count - 1);
    }
  }

 private:
  static constexpr int kStride = kPanelCols * 4;

  [[nodiscard]] const std::byte* panel_at(std::int64_t panel) const {
    return args_.weights + panel * args_.panel_bytes;
  }

  /// Of the panel that the reader is of.
  [[gnu::always_inline]] void widen(Reader& reader, std::int64_t panel, std::int64_t step,
                                    std::byte* out) {
    const std::int64_t end = (step + 1) * kTileDepth;
    for (std::int64_t k = step * kTileDepth; k < end;) {
      const std::int64_t depth = std::min(reader.go_to(k), end - k);
      if (reader.usual) {
        const std::byte* codes = reader.codes;
        for (std::int64_t i = 0; i < depth; i += 4, codes += Reader::kFourBytes) {
          Widening<V>::template put_four<DType::kBF16>(reader, codes, i, out);
        }
      } else {
        widen_exactly(
            Reader::kStorage, DType::kBF16, kPanelCols,
            {.panel = panel_at(panel), .first = k, .depth = depth, .out = out, .int4 = int4_});
      }
      k += depth;
      out += depth * kPanelCols * 2;
    }
  }

  /// kBlocks blocks of rows from `block` on times kPanels panels: two sums or four.
  template <int kBlocks, int kPanels>
  void multiply(std::int64_t panel, std::int64_t block) {
    // What comes behind these panels is fetched over all steps that their rows take, a line of
    // each of some streams a step.
    const std::int64_t bytes = kPanels * args_.panel_bytes;
    const std::int64_t passes = (args_.blocks.count() + 1) / 2;
    const std::int64_t lines = (bytes / 64 / passes + args_.steps - 1) / args_.steps;
    const std::byte* next = panel_at(panel + kPanels) + block / 2 * (bytes / passes / 64 * 64);
    const std::int64_t apart = args_.steps * 64;
    Reader first(panel_at(panel), int4_), second(panel_at(panel + kPanels - 1), int4_);
    widen(first, panel, 0, made_[0][0]);
    if constexpr (kPanels == 2) widen(second, panel + 1, 0, made_[1][0]);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const std::int64_t block_elements = args_.steps * kTileElements;
    const auto* a = static_cast<const std::uint16_t*>(args_.a) + block * block_elements;
    for (std::int64_t step = 0; step < args_.steps; ++step, a += kTileElements) {
      const bool more = step + 1 < args_.steps;
      for (std::int64_t i = 0; i < lines; ++i) V::prefetch(next + i * apart);
      next += 64;
      if (more) widen(first, panel, step + 1, made_[0][(step + 1) % 2]);
      const std::byte* made = made_[0][step % 2];
      memory_barrier();
      _tile_loadd(4, a, 64);
      _tile_loadd(6, made, kStride);
      _tile_loadd(7, made + 64, kStride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (kBlocks == 2) {
        _tile_loadd(5, a + block_elements, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      } else if constexpr (kPanels == 2) {
        if (more) widen(second, panel + 1, step + 1, made_[1][(step + 1) % 2]);
        made = made_[1][step % 2];
        memory_barrier();
        _tile_loadd(5, made, kStride);
        _tile_loadd(6, made + 64, kStride);
        _tile_dpbf16ps(2, 4, 5);
        _tile_dpbf16ps(3, 4, 6);
      }
    }
    float* const out = args_.out + (panel * args_.blocks.count() + block) * kRows * kPanelCols;
    _tile_stored(0, out, kStride);
    _tile_stored(1, out + kRows, kStride);
    if constexpr (kBlocks == 2 || kPanels == 2) {  // the next block's, or panel's
      _tile_stored(2, out + kRows * kPanelCols, kStride);
      _tile_stored(3, out + kRows * kPanelCols + kRows, kStride);
    }
    memory_barrier();
  }

  const ProductArgs& args_;
  const Int4Form& int4_;
  alignas(64) std::byte made_[2][2][kStepBytes];  ///< Of a panel, of a step and the next.
};

}  // namespace switchyard::cpu::amx

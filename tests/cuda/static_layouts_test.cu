// Static tests: what the kernels compute as addresses is what the CuTe layouts say, and these
// compose and divide as the kernels' tiles do. If this file compiles, they hold.
#include "core/gpu/swizzle.hpp"
#include "core/gpu/wgmma.cuh"
#include "experts/gpu/grouped/schedule.hpp"
#include "experts/gpu/static_layouts.hpp"

namespace switchyard::layouts {
namespace {

/// What swizzle.hpp computes is the swizzle of the tile at the chunk's first byte.
template <int kRows, int kRowBytes>
constexpr bool places_are_those_of_the_tile() {
  for (int row = 0; row < kRows; ++row) {
    for (int chunk = 0; chunk < kRowBytes / 16; ++chunk) {
      const auto byte = static_cast<int>(SharedTile<kRows, kRowBytes>{}(row, chunk * 16));
      if (static_cast<int>(swizzled_place<kRowBytes>(row, chunk)) != byte) return false;
      const bool one_of_eight = kRowBytes == 128 && row < 8;
      if (one_of_eight && static_cast<int>(swizzled_place_of_eight(row, chunk)) != byte) {
        return false;
      }
    }
  }
  return true;
}
static_assert(places_are_those_of_the_tile<kTileRows, 128>());
static_assert(places_are_those_of_the_tile<kHalfRows, 128>());
static_assert(places_are_those_of_the_tile<kHalfRows, 64>());

/// A chunk of 16 bytes stays whole, and no two bytes of a tile share a place.
template <int kRows, int kRowBytes>
constexpr bool is_a_permutation_of_chunks() {
  bool seen[kRows * kRowBytes / 16] = {};
  for (int row = 0; row < kRows; ++row) {
    for (int chunk = 0; chunk < kRowBytes / 16; ++chunk) {
      const auto first = static_cast<int>(SharedTile<kRows, kRowBytes>{}(row, chunk * 16));
      const auto last = static_cast<int>(SharedTile<kRows, kRowBytes>{}(row, chunk * 16 + 15));
      if (first % 16 != 0 || last != first + 15 || seen[first / 16]) return false;
      seen[first / 16] = true;
    }
  }
  return true;
}
static_assert(is_a_permutation_of_chunks<kTileRows, 128>());
static_assert(is_a_permutation_of_chunks<kHalfRows, 64>());

/// The eight rows of a matrix of ldmatrix, stmatrix or wgmma meet no bank twice.
template <int kRowBytes>
constexpr bool eight_rows_lie_in_eight_banks() {
  for (int chunk = 0; chunk < kRowBytes / 16; ++chunk) {
    unsigned banks = 0;
    for (int row = 0; row < 8; ++row) {
      banks |= 1U << (SharedTile<8, kRowBytes>{}(row, chunk * 16) / 16 % 8);
    }
    if (banks != 0xFF) return false;
  }
  return true;
}
static_assert(eight_rows_lie_in_eight_banks<128>());
static_assert(eight_rows_lie_in_eight_banks<64>());

/// Composition: the second warpgroup's 64 rows of a tile are a tile of 64 rows 8 KB further, and
/// 16 values along k are 32 bytes by xor, which is how a wgmma descriptor is advanced.
constexpr bool halves_and_steps_compose() {
  using Tile = SharedTile<kTileRows, 128>;
  using Half = SharedTile<kHalfRows, 128>;
  for (int row = 0; row < kHalfRows; ++row) {
    for (int chunk = 0; chunk < 8; ++chunk) {
      const auto upper = static_cast<int>(Half{}(row, chunk * 16));
      if (static_cast<int>(Tile{}(kHalfRows + row, chunk * 16)) != kHalfRows * 128 + upper) {
        return false;
      }
      const auto step = static_cast<int>(Half{}(row, chunk / 2 * 32));
      if ((static_cast<int>(Half{}(row, 0)) ^ chunk / 2 * 32) != step) return false;
    }
  }
  return true;
}
static_assert(halves_and_steps_compose());

/// wgmma's registers: each element of the product is one value of one thread, where wgmma_row() and
/// wgmma_column() say. Every kStep-th thread: what a compiler evaluates has a limit.
template <int kN, int kStep = 1>
constexpr bool registers_are_those_of_wgmma() {
  for (int thread = 0; thread < 128; thread += kStep) {
    for (int value = 0; value < kN / 2; ++value) {
      const int element = ptx::wgmma_row(thread, value) + 64 * ptx::wgmma_column(thread, value);
      if (static_cast<int>(WgmmaProduct<kN>{}(thread, value)) != element) return false;
    }
  }
  return true;
}
static_assert(registers_are_those_of_wgmma<64>());
static_assert(registers_are_those_of_wgmma<256, 5>());
static_assert(cute::size(WgmmaProduct<256>{}) == 64 * 256);
static_assert(cute::cosize(WgmmaProduct<256>{}) == 64 * 256, "onto: no element is left out");

/// Division: a matrix of 512 rows of 4096 values by tiles of 128 x 64, as the grouped GEMM walks
/// it. The rest says where a tile begins, the tile which element follows.
using Matrix512 = RowMajor<512, 4096>;
using Tiles = decltype(cute::zipped_divide(Matrix512{}, Shape<Int<kTileRows>, Int<64>>{}));
static_assert(cute::size<0>(Tiles{}) == kTileRows * 64);
static_assert(cute::size<1>(Tiles{}) == 512 / kTileRows * (4096 / 64));
constexpr bool tiles_begin_where_the_kernel_reads() {
  for (int i = 0; i < 512 / kTileRows; ++i) {
    for (int k = 0; k < 4096 / 64; ++k) {
      const auto begin = Tiles{}(cute::make_coord(cute::make_coord(0, 0), cute::make_coord(i, k)));
      if (begin != i * kTileRows * 4096 + k * 64) return false;
      const auto next = Tiles{}(cute::make_coord(cute::make_coord(5, 7), cute::make_coord(i, k)));
      if (next != begin + 5 * 4096 + 7) return false;
    }
  }
  return true;
}
static_assert(tiles_begin_where_the_kernel_reads());

/// A cluster's 256 rows are two CTAs' tiles above each other, each two warpgroups' halves.
using Cluster = decltype(cute::logical_divide(Layout<Int<kStackRows>>{}, Int<kTileRows>{}));
static_assert(cute::size<0>(Cluster{}) == kTileRows && cute::size<1>(Cluster{}) == 2);
constexpr bool pairs_halves_and_rows_divide() {
  using Rows = Layout<Shape<Int<kHalfRows>, Int<2>, Int<2>>>;  // (row, warpgroup, CTA) -> row
  for (int cta = 0; cta < 2; ++cta) {
    const CtaTile tile = tile_of({.rows = kStackRows}, cta);
    for (int group = 0; group < 2; ++group) {
      if (static_cast<int>(Rows{}(0, group, cta)) != tile.row + group * kHalfRows) return false;
    }
  }
  return true;
}
static_assert(pairs_halves_and_rows_divide());

/// padded: [E, C, H] coalesces to rows without a gap, so a batched GEMM is one matrix of E * C
/// rows; divided by tiles of rows, no tile has rows of two experts where they divide C.
using Padded = PaddedRows<16, 256, 4096>;
static_assert(cute::cosize(Padded{}) == cute::size(Padded{}), "no gap");
constexpr bool padded_rows_are_those_of_one_matrix() {
  using Rows = Layout<Shape<Int<16>, Int<256>>, Stride<Int<256>, Int<1>>>;  // (expert, slot) -> row
  using PerExpert = decltype(cute::logical_divide(Layout<Int<256>>{}, Int<kTileRows>{}));
  static_assert(cute::size<1>(PerExpert{}) == 2);
  for (int expert = 0; expert < 16; ++expert) {
    for (int slot = 0; slot < 256; slot += 17) {
      const int row = Rows{}(expert, slot);
      if (Padded{}(expert, slot, 3) != row * 4096 + 3) return false;
      if (row / 256 != expert) return false;
      const auto in_tile = PerExpert{}(slot % kTileRows, slot / kTileRows);
      if (in_tile != slot) return false;
    }
  }
  return true;
}
static_assert(padded_rows_are_those_of_one_matrix());

/// aligned: dividing the rows by the alignment gives blocks, each of one expert, without a gap.
using Blocks = decltype(cute::logical_divide(Layout<Int<1024>>{}, Int<64>{}));
static_assert(std::is_same_v<decltype(cute::coalesce(Blocks{})),
                             decltype(cute::coalesce(AlignedBlocks<64, 16>{}))>);
static_assert(AlignedBlocks<64, 16>{}(63, 2) + 1 == AlignedBlocks<64, 16>{}(0, 3));

}  // namespace
}  // namespace switchyard::layouts

#pragma once

// The static layouts of the kernels and of the experts' rows as CuTe layouts: what places the
// addresses in the kernels, said in one algebra, so that composition and division can be checked
// when compiling (tests/cuda/static_layouts_test.cu). Needs CuTe's headers (scripts/cute); nothing
// in the library includes it.

#include <cute/layout.hpp>
#include <cute/layout_composed.hpp>
#include <cute/swizzle_layout.hpp>

namespace switchyard::layouts {

using cute::Int;
using cute::Layout;
using cute::Shape;
using cute::Stride;

/// A row-major matrix, its rows `ld` elements apart.
template <int kRows, int kColumns, int kLd = kColumns>
using RowMajor = Layout<Shape<Int<kRows>, Int<kColumns>>, Stride<Int<kLd>, Int<1>>>;

/// The pattern of TMA and wgmma for rows of 128 or 64 bytes, on byte addresses.
template <int kRowBytes>
using TmaSwizzle = cute::Swizzle<kRowBytes == 128 ? 3 : 2, 4, 3>;

/// A tile in shared memory as TMA fills it: (row, byte) -> byte.
template <int kRows, int kRowBytes>
using SharedTile =
    decltype(cute::composition(TmaSwizzle<kRowBytes>{}, RowMajor<kRows, kRowBytes>{}));

/// What wgmma leaves in the registers of a warpgroup: (thread, value) -> row + 64 * column of the
/// 64 x kN product. Threads are (4 along columns, 8 rows, 4 warps), values (2 columns, 2 times 8
/// rows, blocks of 8 columns).
template <int kN>
using WgmmaProduct =
    Layout<Shape<Shape<Int<4>, Int<8>, Int<4>>, Shape<Int<2>, Int<2>, Int<kN / 8>>>,
           Stride<Stride<Int<128>, Int<1>, Int<16>>, Stride<Int<64>, Int<8>, Int<512>>>>;

/// Rows of the layout `padded`: (expert, slot, column) -> element of [E, C, H].
template <int kExperts, int kSlots, int kHidden>
using PaddedRows = Layout<Shape<Int<kExperts>, Int<kSlots>, Int<kHidden>>,
                          Stride<Int<kSlots * kHidden>, Int<kHidden>, Int<1>>>;

/// Rows of the layout `aligned`: (row of the block, block) -> row; a block has rows of one expert.
template <int kAlignment, int kBlocks>
using AlignedBlocks = Layout<Shape<Int<kAlignment>, Int<kBlocks>>, Stride<Int<1>, Int<kAlignment>>>;

}  // namespace switchyard::layouts

// Operands of the products on the way back. Bound by the caches: each value is moved once or twice
// for tens of multiply-adds.
#include "experts/cpu/backward/operands.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/check.hpp"
#include "core/cpu/memory.hpp"
#include "experts/cpu/weights/transpose.hpp"

namespace switchyard::cpu {
namespace {

/// [depth][columns] of each panel.
template <class T>
void pack_single(const PanelsOfRowsArgs& args) {
  constexpr std::int64_t kRowsAhead = 8;  // that are fetched into the cache
  constexpr std::int64_t kSize = sizeof(T);
  const std::int64_t width = args.kernels->panel_cols;
  const std::int64_t depth = packed_depth(*args.kernels, args.num_rows);
  for (std::int64_t r = 0; r < depth; ++r) {
    const bool is_row = r < args.num_rows;
    const std::byte* from = is_row ? args.rows[r] + args.first_col * kSize : nullptr;
    if (is_row) {
      const std::byte* const ahead = args.rows[std::min(r + kRowsAhead, args.num_rows - 1)];
      fetch_lines(ahead + args.first_col * kSize, args.cols * kSize, kRead);
    }
    std::byte* out = args.out + r * width * kSize;
    for (std::int64_t col = 0; col < args.cols; col += width, out += args.panel_bytes) {
      const std::int64_t cols = is_row ? std::min(width, args.cols - col) : 0;
      if (cols > 0) copy_bytes(from + col * kSize, cols * kSize, out);
      std::memset(out + cols * kSize, 0, static_cast<std::size_t>((width - cols) * kSize));
    }
  }
}

/// [depth / 2][columns][2] of one panel.
void pack_pairs(const PanelsOfRowsArgs& args, std::int64_t first_col, std::int64_t cols,
                std::byte* panel) {
  const std::int64_t width = args.kernels->panel_cols;
  const std::int64_t depth = packed_depth(*args.kernels, args.num_rows);
  auto* out = reinterpret_cast<std::uint16_t*>(panel);
  for (std::int64_t r = 0; r < depth; r += 2, out += 2 * width) {
    if (cols < width || r + 1 >= args.num_rows) std::fill_n(out, 2 * width, std::uint16_t{0});
    for (std::int64_t half = 0; half < 2 && r + half < args.num_rows; ++half) {
      const auto* row = reinterpret_cast<const std::uint16_t*>(args.rows[r + half]) + first_col;
      for (std::int64_t c = 0; c < cols; ++c) out[2 * c + half] = row[c];
    }
  }
}

/// What is turned of the next panel lies on another page, which the hardware does not see coming:
/// with each square of this one, which has the bytes of a line or two, a line of it is fetched.
/// (All lines at once have to wait for each other and gain nothing.)
const std::byte* next_panel(const TransposedPanelArgs& args, std::int64_t panel,
                            const std::byte* here) {
  return panel + 1 < args.shape.panels ? here + args.shape.panel_bytes : here;
}

/// From [depth][columns] to the same of the transpose.
template <class T>
void transpose_single(const TransposedPanelArgs& args) {
  constexpr std::int64_t kUnits = Vector16<T>::kUnits;
  const std::int64_t width = args.kernels->panel_cols;
  const std::int64_t row_bytes = width * std::int64_t{sizeof(T)};
  const std::int64_t count = std::min(width, args.shape.depth - args.first);
  const std::int64_t squares = count / kUnits * kUnits;
  for (std::int64_t q = 0; q < args.shape.panels; ++q) {
    const std::byte* from = args.panels + q * args.shape.panel_bytes + args.first * row_bytes;
    const std::byte* next = next_panel(args, q, from);
    std::byte* to = args.out + q * width * row_bytes;
    for (std::int64_t d = 0; d < squares; d += kUnits) {
      const TransposeArgs square{.rows = from + d * row_bytes,
                                 .row_bytes = row_bytes,
                                 .out = to + d * std::int64_t{sizeof(T)},
                                 .out_bytes = row_bytes};
      for (std::int64_t k = 0; k < width; k += kUnits) {
        __builtin_prefetch(next + d * row_bytes + 16 * k);
        transpose_square<T>(square, k);
      }
    }
    const T* values = reinterpret_cast<const T*>(from);
    T* out = reinterpret_cast<T*>(to);
    for (std::int64_t d = squares; d < width; ++d) {
      for (std::int64_t c = 0; c < width; ++c) {
        out[c * width + d] = d < count ? values[d * width + c] : T{0};
      }
    }
  }
}

/// [4 pairs of d][4 c] into [2 pairs of c][8 d].
inline void transpose_pair_square(const std::uint32_t* from, std::int64_t width,
                                  std::uint32_t* to) {
  using Units = Vector16<std::uint32_t>::Type;
  using Words = Vector16<std::uint16_t>::Type;
  Units square[4];
#pragma GCC unroll 4
  for (std::int64_t i = 0; i < 4; ++i) std::memcpy(&square[i], from + i * width, 16);
  transpose(square);  // [c], eight along d each
#pragma GCC unroll 2
  for (std::int64_t i = 0; i < 2; ++i) {
    const auto a = std::bit_cast<Words>(square[2 * i]);
    const auto b = std::bit_cast<Words>(square[2 * i + 1]);
    const Words first = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
    const Words last = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
    std::memcpy(to + i * width, &first, 16);
    std::memcpy(to + i * width + 4, &last, 16);
  }
}

/// From [depth / 2][columns][2] to the same of the transpose.
void transpose_pairs(const TransposedPanelArgs& args) {
  const std::int64_t width = args.kernels->panel_cols;
  const std::int64_t count = std::min(width, args.shape.depth - args.first);
  const std::int64_t pairs = (count + 1) / 2;
  const std::int64_t squares = pairs / 4 * 4;
  for (std::int64_t q = 0; q < args.shape.panels; ++q) {
    const auto* from =
        reinterpret_cast<const std::uint32_t*>(args.panels + q * args.shape.panel_bytes) +
        args.first / 2 * width;
    const std::byte* next = next_panel(args, q, reinterpret_cast<const std::byte*>(from));
    auto* to = reinterpret_cast<std::uint32_t*>(args.out) + q * width / 2 * width;
    for (std::int64_t d = 0; d < squares; d += 4) {
      for (std::int64_t c = 0; c < width; c += 4) {
        __builtin_prefetch(next + 4 * d * width + 16 * c);
        transpose_pair_square(from + d * width + c, width, to + c / 2 * width + 2 * d);
      }
    }
    for (std::int64_t d = squares; d < width / 2; ++d) {
      for (std::int64_t c = 0; c < width / 2; ++c) {
        const std::uint32_t a = d < pairs ? from[d * width + 2 * c] : 0;
        const std::uint32_t b = d < pairs ? from[d * width + 2 * c + 1] : 0;
        to[c * width + 2 * d] = (a & 0xffffU) | (b << 16);
        to[c * width + 2 * d + 1] = (a >> 16) | (b & 0xffff0000U);
      }
    }
  }
}

template <class T>
void transpose_elements(const TransposeRowsArgs& args) {
  constexpr std::int64_t kUnits = Vector16<T>::kUnits;
  using V = typename Vector16<T>::Type;
  T* const out = reinterpret_cast<T*>(args.out);
  const std::int64_t squares_end = args.first + (args.end - args.first) / kUnits * kUnits;
  std::int64_t r = 0;
  for (; r + kUnits <= args.num_rows; r += kUnits) {
    for (std::int64_t c = args.first; c < squares_end; c += kUnits) {
      V square[kUnits];
#pragma GCC unroll 8
      for (std::int64_t i = 0; i < kUnits; ++i) {
        std::memcpy(&square[i], reinterpret_cast<const T*>(args.rows[r + i]) + c, 16);
      }
      transpose(square);
#pragma GCC unroll 8
      for (std::int64_t i = 0; i < kUnits; ++i) {
        std::memcpy(out + (c - args.first + i) * args.out_elements + r, &square[i], 16);
      }
    }
    for (std::int64_t c = squares_end; c < args.end; ++c) {
      for (std::int64_t i = r; i < r + kUnits; ++i) {
        out[(c - args.first) * args.out_elements + i] = reinterpret_cast<const T*>(args.rows[i])[c];
      }
    }
  }
  for (; r < args.num_rows; ++r) {
    for (std::int64_t c = args.first; c < args.end; ++c) {
      out[(c - args.first) * args.out_elements + r] = reinterpret_cast<const T*>(args.rows[r])[c];
    }
  }
}

}  // namespace

void pack_blocks(const PackBlocksArgs& args) {
  const Kernels& kernels = *args.kernels;
  for (std::int64_t b = args.begin; b < args.end; ++b) {
    const std::int64_t begin = args.blocks.begin(b);
    kernels.pack_rows({.rows = args.rows + begin,
                       .count = args.blocks.size(b),
                       .cols = args.cols,
                       .depth = args.depth,
                       .out = args.out + begin * args.depth * kernels.element_bytes});
  }
}

void transpose_rows(const TransposeRowsArgs& args) {
  if (args.element == 4) {
    transpose_elements<std::uint32_t>(args);
  } else {
    transpose_elements<std::uint16_t>(args);
  }
}

void pack_panels_of_rows(const PanelsOfRowsArgs& args) {
  const std::int64_t width = args.kernels->panel_cols;
  switch (args.kernels->storage) {
    case Storage::kF32: return pack_single<std::uint32_t>(args);
    case Storage::kF16: return pack_single<std::uint16_t>(args);
    case Storage::kBF16:
      for (std::int64_t col = 0; col < args.cols; col += width) {
        pack_pairs(args, args.first_col + col, std::min(width, args.cols - col),
                   args.out + col / width * args.panel_bytes);
      }
      return;
    default: break;
  }
  fail(ErrorCode::kUnsupported, "no backward of quantised weights");
}

void transpose_panels(const TransposedPanelArgs& args) {
  switch (args.kernels->storage) {
    case Storage::kF32: transpose_single<std::uint32_t>(args); break;
    case Storage::kF16: transpose_single<std::uint16_t>(args); break;
    case Storage::kBF16: transpose_pairs(args); break;
    default: fail(ErrorCode::kUnsupported, "no backward of quantised weights");
  }
  // Beyond the forward's columns the sum has nothing.
  const std::int64_t sum = args.shape.panels * args.kernels->panel_cols;
  const std::int64_t bytes = panel_bytes(*args.kernels, sum);
  std::memset(args.out + bytes, 0,
              static_cast<std::size_t>(
                  panel_bytes(*args.kernels, packed_depth(*args.kernels, sum)) - bytes));
}

}  // namespace switchyard::cpu

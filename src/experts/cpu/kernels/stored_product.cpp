// Products with stored weights: widened piece by piece into the first-level cache, where the
// product of exact weights takes them up.
#include <algorithm>

#include "core/half.hpp"
#include "experts/cpu/kernels/stored_panel.hpp"

namespace switchyard::cpu {
namespace {

constexpr std::int64_t kTileBytes = 16 << 10;
constexpr std::int64_t kMostTileBytes = 32 << 10;
/// Panels that are widened together, for products that go through them side by side: with so few
/// rows that one alone would wait for the latency of its sums. Else one is widened deeper.
std::int64_t side_by_side(const Kernels& kernels, const RowBlocks& blocks) {
  if (kernels.fixed_blocks || blocks.rows() > 3) return 1;
  return blocks.rows() == 3 ? 2 : 4;
}

constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

template <DType kTo, Storage kStorage>
void portable(const WidenArgs& args) {
  constexpr std::int64_t kPortableCols = 8;
  widen_exactly(kStorage, kTo, kPortableCols, args);
}

}  // namespace

void widen_exactly(Storage storage, DType dtype, std::int64_t cols, const WidenArgs& args) {
  const StoredPanel panel(storage, cols, args.int4);
  for (std::int64_t k = 0; k < args.depth; ++k) {
    const std::int64_t row = dtype == DType::kBF16 ? k / 2 * 2 * cols + k % 2 : k * cols;
    const std::int64_t step = dtype == DType::kBF16 ? 2 : 1;
    for (std::int64_t col = 0; col < cols; ++col) {
      store_float(args.out, dtype, row + col * step, panel.value(args.panel, args.first + k, col));
    }
  }
}

WidenFunction portable_widening(DType dtype, Storage storage) {
  const auto of = [dtype]<Storage kStorage>() -> WidenFunction {
    switch (dtype) {
      case DType::kF32: return portable<DType::kF32, kStorage>;
      case DType::kBF16: return portable<DType::kBF16, kStorage>;
      default: return portable<DType::kF16, kStorage>;
    }
  };
  switch (storage) {
    case Storage::kE4M3: return of.operator()<Storage::kE4M3>();
    case Storage::kInt4: return of.operator()<Storage::kInt4>();
    case Storage::kNvfp4: return of.operator()<Storage::kNvfp4>();
    default: return of.operator()<Storage::kMxfp4>();
  }
}

void multiply(const Kernels& kernels, const ProductArgs& args) {
  if (kernels.widen == nullptr) return kernels.product(args);
  if (args.blocks.rows() <= kernels.coded_rows.most_rows) {
    return kernels.coded_rows.product(kernels.storage, args, kernels.int4);
  }
  alignas(64) std::byte tile[kMostTileBytes];
  const StoredPanel panel(kernels);
  const std::int64_t side = std::min(side_by_side(kernels, args.blocks), args.panels);
  const std::int64_t depth_bytes = kernels.panel_cols * size_of(kernels.dtype);
  const std::int64_t room = kernels.fixed_blocks ? kMostTileBytes : kTileBytes;
  const std::int64_t piece = room / (side * depth_bytes) / kWidenDepth * kWidenDepth;
  const std::int64_t depth = args.steps * kernels.depth_multiple;
  ProductArgs part = args;
  part.weights = tile;
  part.panel_bytes = piece * depth_bytes;
  for (std::int64_t p = 0; p < args.panels; p += side) {
    part.panels = std::min(side, args.panels - p);
    part.out = args.out + p * args.blocks.places() * kernels.panel_cols;
    const std::byte* weights = args.weights + p * args.panel_bytes;
    for (std::int64_t first = 0; first < depth; first += piece) {
      const std::int64_t length = std::min(piece, depth - first);
      for (std::int64_t i = 0; i < part.panels; ++i) {
        kernels.widen({.panel = weights + i * args.panel_bytes,
                       .first = first,
                       .depth = round_up(length, panel.depth_multiple()),
                       .out = tile + i * part.panel_bytes,
                       .int4 = kernels.int4});
      }
      part.first_step = first / kernels.depth_multiple;
      part.part_steps = length / kernels.depth_multiple;
      const std::byte* next = weights + panel.bytes(first + length / kWidenDepth * kWidenDepth);
      part.next = {next, panel.bytes(kE4M3Block) * length / kE4M3Block};
      kernels.product(part);
    }
  }
}

}  // namespace switchyard::cpu

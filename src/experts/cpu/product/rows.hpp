#pragma once

// What happens to rows before, between and after the products: packing, activation, weighted sums.

#include "experts/cpu/kernels/kernels.hpp"
#include "experts/cpu/product/gradients.hpp"
#include "experts/cpu/product/math.hpp"
#include "experts/cpu/product/product.hpp"
#include "experts/cpu/product/q8.hpp"
#include "experts/cpu/roofs/loops.hpp"

namespace switchyard::cpu {

/// The compute type of rows that are packed as float units: how an element is read, and rounded.
template <class V, DType kType>
struct RowType {
  static constexpr DType kDType = kType;

  static float read(const std::byte* row, std::int64_t i) {
    if constexpr (kType == DType::kF32) {
      return reinterpret_cast<const float*>(row)[i];
    } else {
      return V::widen_one(reinterpret_cast<const std::uint16_t*>(row)[i], kType);
    }
  }
  static typename V::Reg round(typename V::Reg x) {
    if constexpr (kType == DType::kBF16) return V::round_bf16(x);
    if constexpr (kType == DType::kF16) return V::round_f16(x);
    return x;
  }
};

/// Blocks of float units: [depth][rows].
template <class V, class Type>
struct FloatRows {
  static constexpr bool kFloats = true;  ///< Of this form, where a type says so: pack_squares().
  static std::int64_t block(const RowBlocks& blocks, std::int64_t b, std::int64_t depth) {
    return blocks.begin(b) * depth;
  }
  static void put(void* out, std::int64_t block, std::int64_t k, std::int64_t r, std::int64_t rows,
                  std::int64_t, float value) {
    static_cast<float*>(out)[block + k * rows + r] = value;
  }
};

/// Blocks of rows as they are: [rows][depth] float.
template <class V, class Type>
struct PlainRows {
  static std::int64_t block(const RowBlocks& blocks, std::int64_t b, std::int64_t depth) {
    return blocks.begin(b) * depth;
  }
  static void put(void* out, std::int64_t block, std::int64_t k, std::int64_t r, std::int64_t,
                  std::int64_t depth, float value) {
    static_cast<float*>(out)[block + r * depth + k] = value;
  }
};

/// Four rows at a time of a block of floats, in squares of 4 x 4 in registers: a value by itself
/// would cost a store. @returns how many columns of depth are done. The last four rows may be done
/// twice.
template <class V>
std::int64_t pack_squares(const PackRowsArgs& args) {
  typedef float Four __attribute__((vector_size(16)));
  if (args.count < 4) return 0;
  for (std::int64_t r = 0; r < args.count; ++r) {
    if (args.rows[r] == nullptr) return 0;
  }
  const std::int64_t end = args.cols / 4 * 4;
  for (std::int64_t next = 0; next < args.count; next += 4) {
    const std::int64_t r = next + 4 <= args.count ? next : args.count - 4;
    const auto* const row0 = reinterpret_cast<const float*>(args.rows[r]);
    const auto* const row1 = reinterpret_cast<const float*>(args.rows[r + 1]);
    const auto* const row2 = reinterpret_cast<const float*>(args.rows[r + 2]);
    const auto* const row3 = reinterpret_cast<const float*>(args.rows[r + 3]);
    float* out = static_cast<float*>(args.out) + r;
    const std::byte* ahead[4];  // rows lie anywhere: the next four are fetched meanwhile
    for (std::int64_t i = 0; i < 4; ++i) {
      const std::int64_t row = next + 4 + i;
      ahead[i] = args.rows[row < args.count ? row : args.count - 1];
    }
    for (std::int64_t k = 0; k < end; k += 4, out += 4 * args.count) {
      if (k % 16 == 0) {
        for (const std::byte* row : ahead) __builtin_prefetch(row + 4 * k);
      }
      Four v0, v1, v2, v3;
      __builtin_memcpy(&v0, row0 + k, 16);
      __builtin_memcpy(&v1, row1 + k, 16);
      __builtin_memcpy(&v2, row2 + k, 16);
      __builtin_memcpy(&v3, row3 + k, 16);
      const Four a = __builtin_shufflevector(v0, v1, 0, 4, 1, 5);
      const Four b = __builtin_shufflevector(v2, v3, 0, 4, 1, 5);
      const Four c = __builtin_shufflevector(v0, v1, 2, 6, 3, 7);
      const Four d = __builtin_shufflevector(v2, v3, 2, 6, 3, 7);
      v0 = __builtin_shufflevector(a, b, 0, 1, 4, 5);
      v1 = __builtin_shufflevector(a, b, 2, 3, 6, 7);
      v2 = __builtin_shufflevector(c, d, 0, 1, 4, 5);
      v3 = __builtin_shufflevector(c, d, 2, 3, 6, 7);
      __builtin_memcpy(out, &v0, 16);
      __builtin_memcpy(out + args.count, &v1, 16);
      __builtin_memcpy(out + 2 * args.count, &v2, 16);
      __builtin_memcpy(out + 3 * args.count, &v3, 16);
    }
  }
  return end;
}

template <class V, class Type, class Rows>
void pack_rows(const PackRowsArgs& args) {
  std::int64_t done = 0;
  if constexpr (requires { requires Rows::kFloats && Type::kDType == DType::kF32; }) {
    done = pack_squares<V>(args);
  }
  for (std::int64_t r = 0; r < args.count; ++r) {
    const std::byte* row = args.rows[r];
    const std::int64_t cols = row == nullptr ? 0 : args.cols;
    for (std::int64_t k = done; k < cols; ++k) {
      Rows::put(args.out, 0, k, r, args.count, args.depth, Type::read(row, k));
    }
    for (std::int64_t k = cols; k < args.depth; ++k) {
      Rows::put(args.out, 0, k, r, args.count, args.depth, 0.0F);
    }
  }
}

template <class V, class Type, class Rows>
void activate(const ActivateArgs& args) {
  using Reg = typename V::Reg;
  constexpr int kWidth = V::kWidth;
  const bool is_gated = args.config->gated;
  const int cols = is_gated ? kWidth : 2 * kWidth;
  const Reg bias0 = args.bias == nullptr ? V::zero() : V::load(args.bias);
  const Reg bias1 = args.bias == nullptr ? V::zero() : V::load(args.bias + kWidth);
  const std::int64_t left = args.depth - args.first_col;
  const std::int64_t used = left < cols ? left : cols;
  float h[2 * kWidth];
  for (std::int64_t b = 0; b < args.blocks.count(); ++b) {
    const std::int64_t rows = args.blocks.size(b);
    const std::int64_t block = Rows::block(args.blocks, b, args.depth);
    const float* product = args.product + args.blocks.begin(b) * 2 * kWidth;
    for (std::int64_t r = 0; r < rows; ++r, product += 2 * kWidth) {
      Reg first = V::load(product);
      Reg second = V::load(product + kWidth);
      if (args.bias != nullptr) {
        first = V::add(first, bias0);
        second = V::add(second, bias1);
      }
      if (is_gated) {
        V::store(h, Type::round(gated<V>(*args.config, first, second)));
      } else {
        V::store(h, Type::round(activation<V>(args.config->activation, first)));
        V::store(h + kWidth, Type::round(activation<V>(args.config->activation, second)));
      }
      if constexpr (requires { Rows::put_run(args.out, block, args.first_col, r, h, used); }) {
        Rows::put_run(args.out, block, args.first_col, r, h, used);
      } else {
        for (std::int64_t j = 0; j < used; ++j) {
          Rows::put(args.out, block, args.first_col + j, r, rows, args.depth, h[j]);
        }
      }
      for (std::int64_t j = used; args.last && j < left; ++j) {
        Rows::put(args.out, block, args.first_col + j, r, rows, args.depth, 0.0F);
      }
    }
  }
}

template <class V>
void reduce(const ReduceArgs& args) {
  using Reg = typename V::Reg;
  constexpr int kWidth = V::kWidth;
  for (std::int64_t row = 0; row < args.rows; ++row) {
    if (args.token[row] < 0) continue;
    const Reg weight = V::broadcast(args.weight + row);
    float* sums = args.sums + (args.token[row] - args.first_token) * 2 * kWidth;
    const float* product = args.product + row * 2 * kWidth;
    for (int half = 0; half < 2; ++half) {
      Reg y = V::load(product + half * kWidth);
      if (args.bias != nullptr) y = V::add(y, V::load(args.bias + half * kWidth));
      V::store(sums + half * kWidth, V::exact_fma(weight, y, V::load(sums + half * kWidth)));
    }
  }
}

/// Rows as float units whatever the compute type; the kernels' entry for one form of weights.
template <class V, class W, DType kType>
constexpr Kernels float_kernels(CpuIsa isa) {
  using Type = RowType<V, kType>;
  using Rows = FloatRows<V, Type>;
  using Tile = SumTile<V, W>;
  return {.isa = isa,
          .dtype = kType,
          .storage = W::kStorage,
          .panel_cols = 2 * V::kWidth,
          .max_rows = V::kMaxRows,
          .fixed_blocks = false,
          .depth_multiple = W::kUnitDepth * W::kStepUnits,
          .element_bytes = 4,
          .step_row_bytes = Tile::kStepRowBytes,
          .pack_rows = pack_rows<V, Type, Rows>,
          .product = product<V, Tile>,
          .activate = activate<V, Type, Rows>,
          .quantize_rows = nullptr,
          .reduce = reduce<V>,
          .gradient = activation_gradient<V>,
          .spin = spin<V, F32Weights<V>>,
          .spin_flops = spin_flops<V, F32Weights<V>>(),
          .read = read_bytes<V>,
          .writes_rows = true};
}

/// The same with 8-bit weights.
template <class V, DType kType>
constexpr Kernels q8_kernels(CpuIsa isa) {
  using Type = RowType<V, kType>;
  Kernels kernels = float_kernels<V, F32Weights<V>, kType>(isa);
  kernels.storage = Storage::kQ8;
  kernels.depth_multiple = kQ8Group;
  kernels.step_row_bytes = Q8Tile<V>::kStepRowBytes;
  kernels.pack_rows = pack_rows<V, Type, PlainRows<V, Type>>;
  kernels.product = product<V, Q8Tile<V>>;
  kernels.activate = activate<V, Type, PlainRows<V, Type>>;
  kernels.quantize_rows = quantize_rows<V>;
  kernels.writes_rows = false;
  return kernels;
}

/// The six kernels that work on float units: three compute types, plain or with q8 weights.
template <class V>
const Kernels* find_float_kernels(CpuIsa isa, DType dtype, bool q8) {
  static const Kernels kF32 = float_kernels<V, F32Weights<V>, DType::kF32>(isa);
  static const Kernels kBF16 = float_kernels<V, Bf16Weights<V>, DType::kBF16>(isa);
  static const Kernels kF16 = float_kernels<V, F16Weights<V>, DType::kF16>(isa);
  static const Kernels kF32Q8 = q8_kernels<V, DType::kF32>(isa);
  static const Kernels kBF16Q8 = q8_kernels<V, DType::kBF16>(isa);
  static const Kernels kF16Q8 = q8_kernels<V, DType::kF16>(isa);
  switch (dtype) {
    case DType::kF32: return q8 ? &kF32Q8 : &kF32;
    case DType::kBF16: return q8 ? &kBF16Q8 : &kBF16;
    case DType::kF16: return q8 ? &kF16Q8 : &kF16;
    default: return nullptr;
  }
}

}  // namespace switchyard::cpu

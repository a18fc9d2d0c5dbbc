#pragma once

// What becomes of 16 bytes' worth of a tile's sums, whichever kernel has made them: through the
// activation, or out to memory.

#include "core/gpu/pack16.cuh"
#include "experts/gpu/backward/activation_gradient.cuh"
#include "experts/gpu/backward/products.hpp"

namespace switchyard::backward {

/// Rounded to T, by stores of 16 bytes (some values fewer than that: of what they take).
template <typename T, int kCount>
__device__ __forceinline__ void store_values(T* to, const float (&values)[kCount]) {
  if constexpr (sizeof(T) == 2 && kCount == kPack<T>) {
    ptx::store_global_16(to, pack16(values, T{}));
  } else {
    store_floats(to, values);
  }
}

/// The pre-activation of a chunk, asked for before its sums are looked at.
struct ChunkBefore {
  int4 gate = {};
  int4 up = {};
  float weight = 0;
};

/// Of columns `column`.. of row `row`; nothing where the column does not exist.
template <typename T>
__device__ __forceinline__ ChunkBefore load_before(const DownGradient& args, std::int64_t row,
                                                   std::int64_t column) {
  ChunkBefore before;
  if (column >= args.inner_cols) return before;
  const std::int64_t z_cols = (args.gated ? 2 : 1) * args.inner_cols;
  const T* const z = static_cast<const T*>(args.z) + row * z_cols + column;
  before.weight = __ldg(args.rows.weight + row);
  before.gate = *reinterpret_cast<const int4*>(z);
  if (args.gated) before.up = *reinterpret_cast<const int4*>(z + args.inner_cols);
  return before;
}

/// What comes of the gradients of a chunk's activation, as it is stored, and their product with it.
struct ChunkAfter {
  int4 inner;
  int4 gate;
  int4 up;  ///< Gated ones only.
  float dot;
};
template <typename T, Activation kKind, bool kGated>
__device__ __forceinline__ ChunkAfter through_activation(const ActivationParams& activation,
                                                         const ChunkBefore& before,
                                                         const float (&da)[kPack<T>]) {
  float gate[kPack<T>];
  float up[kPack<T>] = {};
  unpack16(before.gate, gate, T{});
  if constexpr (kGated) unpack16(before.up, up, T{});
  float inner[kPack<T>];
  float dot = 0;
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) {
    const ActivationSlopes slopes = activation_slopes<kKind, kGated>(gate[i], up[i], activation);
    dot = fmaf(da[i], slopes.value, dot);
    inner[i] = before.weight * slopes.value;
    gate[i] = before.weight * da[i] * slopes.gate;
    up[i] = before.weight * da[i] * slopes.up;
  }
  return {pack16(inner, T{}), pack16(gate, T{}), pack16(up, T{}), dot};
}

/// Stores what comes of the gradients `da` of the activation; returns their product with it.
template <typename T, Activation kKind, bool kGated>
__device__ __forceinline__ float store_chunk(const DownGradient& args, const ChunkBefore& before,
                                             std::int64_t row, std::int64_t column,
                                             const float (&da)[kPack<T>]) {
  if (column >= args.inner_cols) return 0;
  const ChunkAfter after = through_activation<T, kKind, kGated>(args.activation, before, da);
  T* const dz = static_cast<T*>(args.dz) + row * (kGated ? 2 : 1) * args.inner_cols + column;
  ptx::store_global_16(static_cast<T*>(args.inner) + row * args.inner_cols + column, after.inner);
  ptx::store_global_16(dz, after.gate);
  if constexpr (kGated) ptx::store_global_16(dz + args.inner_cols, after.up);
  return after.dot;
}

/// Calls body(activation, gated), both as constants.
template <typename Body>
__device__ __forceinline__ void with_kind(const DownGradient& args, Body&& body) {
  with_activation(args.activation.kind, [&](auto kind) {
    if constexpr (decltype(kind)::value == Activation::kClampedSwiglu) {
      body(kind, std::true_type{});
    } else if (args.gated) {
      body(kind, std::true_type{});
    } else {
      body(kind, std::false_type{});
    }
  });
}

template <typename T, int kCount>
__device__ __forceinline__ void store_chunk(const RowsGradient& args, std::int64_t row,
                                            std::int64_t column, const float (&values)[kCount]) {
  if (column >= args.cols) return;
  const std::int64_t at = row * args.cols + column;
  if (args.out_is_f32) {
    store_values(static_cast<float*>(args.out) + at, values);
  } else {
    store_values(static_cast<T*>(args.out) + at, values);
  }
}

/// Some gradients' values, written or added once.
template <typename Out, int kCount>
__device__ __forceinline__ void write_gradient(Out* to, float (&values)[kCount], bool accumulate) {
  if (accumulate) {
    float before[kPack<Out>];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i % kPack<Out> == 0) {
        unpack16(*reinterpret_cast<const int4*>(to + i), before, Out{});
      }
      values[i] += before[i % kPack<Out>];
    }
  }
  store_values(to, values);
}

template <typename T, int kCount>
__device__ __forceinline__ void write_gradient(const WeightGradient& args, std::int64_t at,
                                               float (&values)[kCount]) {
  if (args.out_is_f32) {
    write_gradient(static_cast<float*>(args.out) + at, values, args.accumulate);
  } else {
    write_gradient(static_cast<T*>(args.out) + at, values, args.accumulate);
  }
}

/// One part of one expert's rows, and a tile of the gradient.
struct GradientUnit {
  std::int32_t expert;
  std::int32_t part;
  std::int32_t tile;
};

/// Values [left, right..) of a part's sums: to the gradient itself where there is one part only.
template <typename T, int kCount>
__device__ __forceinline__ void store_chunk(const WeightGradient& args, const GradientUnit& unit,
                                            std::int64_t left, std::int64_t right,
                                            float (&values)[kCount]) {
  if (left >= args.left.cols || right >= args.right.cols) return;
  if (parts_of(__ldg(args.rows.rows + unit.expert), args.units.part_rows) == 1) {
    write_gradient<T>(args, (unit.expert * args.left.cols + left) * args.right.cols + right,
                      values);
  } else {
    const std::int64_t part = __ldg(args.units.split_parts_before + unit.expert) + unit.part;
    store_values(args.split_sums + (part * args.left.cols + left) * args.right.cols + right,
                 values);
  }
}

/// Unit `item` of all: parts in order, each one's tiles behind each other.
__device__ __forceinline__ GradientUnit unit_at(const WeightGradient& args, std::int64_t item,
                                                std::int64_t tiles) {
  const auto part = static_cast<std::int32_t>(item / tiles);
  std::int32_t low = 0;
  std::int32_t high = args.rows.num_experts - 1;
  while (low < high) {
    const std::int32_t middle = (low + high + 1) / 2;
    if (__ldg(args.units.parts_before + middle) <= part) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return {low, part - __ldg(args.units.parts_before + low),
          static_cast<std::int32_t>(item % tiles)};
}

}  // namespace switchyard::backward

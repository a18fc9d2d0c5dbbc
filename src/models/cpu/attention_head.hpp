#pragma once

// One head of keys and values in the forms that the kernels multiply.
//
// Scores are made transposed: a panel of them is [keys][panel_cols queries], so that the softmax
// runs down the columns, a query a lane, and the panel is the second operand of the next product as
// it is. Keys and values of a head are packed once for all queries.

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "core/cpu/memory.hpp"
#include "models/cpu/attention.hpp"
#include "models/cpu/linear.hpp"

namespace switchyard::models {

inline constexpr std::int64_t kMostWidth = 64;  ///< Of a panel.

inline std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// Packed operands of one head of keys, in the calling thread's memory.
class AttentionHead {
 public:
  AttentionHead(const AttentionArgs& args, std::int64_t task)
      : args_(args),
        kernels_(product_kernels(DType::kF32)),
        width_(kernels_.panel_cols),
        b_(task / args.shape.kv_heads),
        m_(task % args.shape.kv_heads),
        keys_(args.shape.keys),
        dim_(args.shape.head_dim),
        scale_(1.0F / std::sqrt(static_cast<float>(dim_))),
        dim_blocks_(kernels_.blocks(dim_)) {}

  [[nodiscard]] std::int64_t group() const { return args_.shape.heads / args_.shape.kv_heads; }
  [[nodiscard]] std::int64_t width() const { return width_; }
  [[nodiscard]] std::int64_t dim() const { return dim_; }
  [[nodiscard]] std::int64_t keys() const { return keys_; }
  [[nodiscard]] std::int64_t sequence() const { return b_; }
  [[nodiscard]] std::int64_t kv_head() const { return m_; }
  [[nodiscard]] float scale() const { return scale_; }
  [[nodiscard]] const cpu::Kernels& kernels() const { return kernels_; }
  /// Floats that key rows or value columns take when packed.
  [[nodiscard]] std::int64_t packed_floats() const {
    return round_up(keys_, kernels_.max_rows) * dim_;
  }

  /// Blocks of max_rows keys, the last one of what is left: [D][keys of the block] each.
  void pack_rows(const HeadRows<const float>& rows, float* out) const {
    const std::byte* pointers[kMostWidth];
    for (std::int64_t first = 0; first < keys_; first += kernels_.max_rows) {
      const std::int64_t count = std::min(kernels_.max_rows, keys_ - first);
      for (std::int64_t r = 0; r < count; ++r) {
        pointers[r] = reinterpret_cast<const std::byte*>(rows.at(b_, first + r) + m_ * dim_);
      }
      kernels_.pack_rows({.rows = pointers,
                          .count = count,
                          .cols = dim_,
                          .depth = dim_,
                          .out = out + first * dim_});
    }
  }
  /// Blocks of dimensions: [keys][dimensions of the block] each.
  void pack_columns(const HeadRows<const float>& rows, float* out) const {
    for (std::int64_t block = 0; block < dim_blocks_.count(); ++block) {
      const std::int64_t first = dim_blocks_.begin(block);
      const std::int64_t size = dim_blocks_.size(block);
      float* to = out + first * keys_;
      for (std::int64_t key = 0; key < keys_; ++key, to += size) {
        std::copy_n(rows.at(b_, key) + m_ * dim_ + first, size, to);
      }
    }
  }

  /// Keys that queries up to `last` see, and those beside them in their block.
  [[nodiscard]] std::int64_t keys_for(std::int64_t last) const {
    return std::min(keys_, round_up(last + 1, kernels_.max_rows));
  }
  /// out [keys][width] = packed rows times a panel [D][width].
  void times_rows(const float* packed, std::int64_t keys, const float* panel, float* out) const {
    const cpu::RowBlocks blocks(keys, kernels_.max_rows, true);
    kernels_.product({.a = packed,
                      .blocks = blocks,
                      .steps = dim_,
                      .weights = reinterpret_cast<const std::byte*>(panel),
                      .panel_bytes = 0,
                      .panels = 1,
                      .out = out});
  }
  /// out [D][width] = packed columns times a panel [keys][width].
  void times_columns(const float* packed, std::int64_t keys, const float* panel, float* out) const {
    for (std::int64_t block = 0; block < dim_blocks_.count(); ++block) {
      const std::int64_t first = dim_blocks_.begin(block);
      kernels_.product({.a = packed + first * keys_,
                        .blocks = kernels_.blocks(dim_blocks_.size(block)),
                        .steps = keys,
                        .weights = reinterpret_cast<const std::byte*>(panel),
                        .panel_bytes = 0,
                        .panels = 1,
                        .out = out + first * width_});
    }
  }
  /// Transposes `count` rows of a head into [D][width], missing ones as zeros.
  void panel_of(const HeadRows<const float>& rows, std::int64_t head, std::int64_t first,
                std::int64_t count, float* out) const {
    if (count < width_) std::fill_n(out, dim_ * width_, 0.0F);
    for (std::int64_t q = 0; q < count; ++q) {
      const float* const row = rows.at(b_, first + q) + head * dim_;
      for (std::int64_t d = 0; d < dim_; ++d) out[d * width_ + q] = row[d];
    }
  }
  /// And back, each row times a factor of its own.
  void rows_of(const float* panel, const float* factor, std::int64_t head, std::int64_t first,
               std::int64_t count, const HeadRows<float>& out) const {
    for (std::int64_t q = 0; q < count; ++q) {
      float* const row = out.at(b_, first + q) + head * dim_;
      for (std::int64_t d = 0; d < dim_; ++d) row[d] = panel[d * width_ + q] * factor[q];
    }
  }

 private:
  const AttentionArgs& args_;
  const cpu::Kernels& kernels_;
  std::int64_t width_;
  std::int64_t b_, m_;
  std::int64_t keys_, dim_;
  float scale_;
  cpu::RowBlocks dim_blocks_;
};

/// By the panels' width, which the instruction set decides.
template <template <int> class Function, class Args>
void for_width(std::int64_t width, const Args& args) {
  switch (width) {
    case 32: return Function<32>::run(args);
    case 16: return Function<16>::run(args);
    default: return Function<8>::run(args);
  }
}
/// Pieces of one buffer, in lines of 64 bytes.
class Memory {
 public:
  Memory(cpu::HugeBuffer& buffer, std::initializer_list<std::int64_t> sizes) {
    std::int64_t all = 0;
    for (const std::int64_t size : sizes) all += round_up(size, 16);
    buffer.reserve(static_cast<std::size_t>(4 * all));
    next_ = reinterpret_cast<float*>(buffer.data());
  }
  float* take(std::int64_t size) {
    float* const here = next_;
    next_ += round_up(size, 16);
    return here;
  }

 private:
  float* next_;
};

inline cpu::HugeBuffer& buffer_of_thread() {
  thread_local cpu::HugeBuffer buffer;
  return buffer;
}

}  // namespace switchyard::models

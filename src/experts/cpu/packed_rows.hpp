#pragma once

#include "core/cpu/memory.hpp"
#include "experts/cpu/work_list.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard::cpu {

/// The rows of all active experts in blocks, on their way into a product. Kernels that quantize
/// rows write them plainly first.
class PackedRows {
 public:
  void reserve(const Kernels& kernels, std::int64_t places, std::int64_t depth) {
    kernels_ = &kernels;
    depth_ = depth;
    written_.reserve(static_cast<std::size_t>(places * depth * kernels.element_bytes));
    if (kernels.quantize_rows != nullptr) {
      quantized_.reserve(static_cast<std::size_t>(places * quantized_row_bytes()));
    }
  }
  [[nodiscard]] std::int64_t depth() const { return depth_; }
  [[nodiscard]] std::int64_t steps() const { return depth_ / kernels_->depth_multiple; }

  /// Where pack_rows() and activate() write the row at `place`.
  [[nodiscard]] std::byte* written(std::int64_t place) const {
    return written_.data() + place * depth_ * kernels_->element_bytes;
  }
  /// What product() takes.
  [[nodiscard]] const std::byte* ready(std::int64_t place) const {
    return kernels_->quantize_rows == nullptr ? written(place) : quantized(place);
  }
  /// Between writing and the product; does nothing for kernels that take rows as written.
  void finish(const ActiveExpert& active) const {
    if (kernels_->quantize_rows == nullptr) return;
    for (std::int64_t b = 0; b < active.blocks.count(); ++b) {
      const std::int64_t place = active.place + active.blocks.begin(b);
      kernels_->quantize_rows({.rows = reinterpret_cast<const float*>(written(place)),
                               .count = active.blocks.size(b),
                               .depth = depth_,
                               .out = quantized(place)});
    }
  }
  void finish(const WorkList& work, ThreadPool* pool) const {
    if (kernels_->quantize_rows == nullptr) return;
    parallel_for(pool, static_cast<std::int64_t>(work.active.size()),
                 [&](std::int64_t i, int) { finish(work.active[static_cast<std::size_t>(i)]); });
  }

 private:
  [[nodiscard]] std::int64_t quantized_row_bytes() const {
    return steps() * kernels_->step_row_bytes;
  }
  [[nodiscard]] std::byte* quantized(std::int64_t place) const {
    return quantized_.data() + place * quantized_row_bytes();
  }

  const Kernels* kernels_ = nullptr;
  std::int64_t depth_ = 0;
  HugeBuffer written_;
  HugeBuffer quantized_;
};

}  // namespace switchyard::cpu

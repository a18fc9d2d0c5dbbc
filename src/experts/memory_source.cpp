// Expert weights that already lie in memory, as views of plain arrays.
#include <cstring>

#include "core/row_ops.hpp"
#include "experts/source_check.hpp"
#include "switchyard/experts.hpp"

namespace switchyard {
namespace {

class MemorySource final : public ExpertSource {
 public:
  MemorySource(const ExpertConfig& config, DType dtype, const void* w13, const void* w2,
               const float* b13, const float* b2)
      : config_(config),
        dtype_(dtype),
        w13_(static_cast<const std::byte*>(w13)),
        w2_(static_cast<const std::byte*>(w2)),
        b13_(b13),
        b2_(b2) {}

  [[nodiscard]] DType dtype() const override { return dtype_; }

  void read(std::int32_t expert, ExpertPart part, std::int64_t first_row, std::int64_t num_rows,
            DType dtype, void* out) const override {
    const bool down = part == ExpertPart::kDown;
    const std::int64_t cols = down ? config_.inner : config_.hidden;
    const std::int64_t row =
        (down ? expert * config_.hidden : first_row_of(expert, part)) + first_row;
    const std::byte* from = (down ? w2_ : w13_) + row * cols * size_of(dtype_);
    row_ops::convert(dtype_, from, dtype, out, num_rows * cols);
  }

  void read_bias(std::int32_t expert, ExpertPart part, float* out) const override {
    const bool down = part == ExpertPart::kDown;
    const std::int64_t count = down ? config_.hidden : config_.inner;
    const float* from = down ? b2_ + expert * config_.hidden : b13_ + first_row_of(expert, part);
    std::memcpy(out, from, static_cast<std::size_t>(count) * sizeof(float));
  }

 private:
  /// Row of w13 (and place in b13) where a part begins.
  [[nodiscard]] std::int64_t first_row_of(std::int32_t expert, ExpertPart part) const {
    return std::int64_t{expert} * (config_.gated ? 2 : 1) * config_.inner +
           (part == ExpertPart::kUp ? config_.inner : 0);
  }

  ExpertConfig config_;
  DType dtype_;
  const std::byte* w13_;
  const std::byte* w2_;
  const float* b13_;
  const float* b2_;
};

}  // namespace

std::unique_ptr<ExpertSource> make_memory_source(const ExpertConfig& config, DType dtype,
                                                 const void* w13, const void* w2, const float* b13,
                                                 const float* b2) {
  check_source(config, dtype, w13, w2, b13, b2);
  return std::make_unique<MemorySource>(config, dtype, w13, w2, b13, b2);
}

}  // namespace switchyard

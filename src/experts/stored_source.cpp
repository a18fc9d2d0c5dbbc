// Experts of which codes and scales lie in memory, as views of plain arrays.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>

#include "core/check.hpp"
#include "switchyard/experts.hpp"

namespace switchyard {
namespace {

const char* name_of(ExpertPart part) { return part == ExpertPart::kDown ? "w2" : "w13"; }
const char* rows_of(ExpertPart part) {
  if (part == ExpertPart::kDown) return "down";
  return part == ExpertPart::kGate ? "gate" : "up";
}

class StoredSource final : public ExpertSource {
 public:
  StoredSource(const ExpertConfig& config, const StoredExperts& stored)
      : config_(config), stored_(stored) {}

  [[nodiscard]] DType dtype() const override { return DType::kBF16; }
  [[nodiscard]] WeightFormat stored_format() const override { return stored_.format; }

  void read(std::int32_t expert, ExpertPart part, std::int64_t first_row, std::int64_t num_rows,
            DType dtype, void* out) const override {
    const StoredLayout one = layout_of(part, 1);
    auto* to = static_cast<std::byte*>(out);
    for (std::int64_t row = first_row; row < first_row + num_rows; ++row) {
      decode(one, rows_from(expert, part, row), dtype, to);
      to += one.cols * size_of(dtype);
    }
  }

  void read_stored(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                   std::int64_t num_rows, const StoredRows& out) const override {
    const bool e4m3 = stored_.format == WeightFormat::kE4M3;
    require(!e4m3 || first_row % kE4M3Block == 0 || first_row % kE4M3Block + num_rows <= kE4M3Block,
            "rows from {}, {} of them: the scales of e4m3 weights belong to {} rows each, want the "
            "first to be a multiple of it, or all of them to share one",
            first_row, num_rows, kE4M3Block);
    const StoredLayout layout = layout_of(part, num_rows);
    const ConstStoredRows from = rows_from(expert, part, first_row);
    if (e4m3) check_e4m3(expert, part, first_row, layout, from);
    if (!e4m3) check_mxfp4(expert, part, first_row, layout, from);
    std::copy_n(from.values, layout.value_bytes(), out.values);
    std::copy_n(from.scales, layout.scale_bytes(), out.scales);
  }

  void read_bias(std::int32_t expert, ExpertPart part, float* out) const override {
    const bool down = part == ExpertPart::kDown;
    const float* const from = down ? stored_.b2 + std::int64_t{expert} * config_.hidden
                                   : stored_.b13 + matrix_of(expert, part) * config_.inner;
    std::copy_n(from, down ? config_.hidden : config_.inner, out);
  }

 private:
  [[nodiscard]] StoredLayout layout_of(ExpertPart part, std::int64_t rows) const {
    return {.format = stored_.format,
            .rows = rows,
            .cols = part == ExpertPart::kDown ? config_.inner : config_.hidden};
  }
  /// Of w13 or of w2, in the order in which they lie.
  [[nodiscard]] std::int64_t matrix_of(std::int32_t expert, ExpertPart part) const {
    if (part == ExpertPart::kDown) return expert;
    return std::int64_t{expert} * (config_.gated ? 2 : 1) + (part == ExpertPart::kUp ? 1 : 0);
  }
  /// From a row that begins a block of scales, or stands alone.
  [[nodiscard]] ConstStoredRows rows_from(std::int32_t expert, ExpertPart part,
                                          std::int64_t row) const {
    const bool down = part == ExpertPart::kDown;
    const StoredLayout matrix = layout_of(part, down ? config_.hidden : config_.inner);
    const std::int64_t before = matrix_of(expert, part);
    const std::int64_t scale_row = stored_.format == WeightFormat::kE4M3 ? row / kE4M3Block : row;
    const auto* const values = static_cast<const std::byte*>(down ? stored_.w2 : stored_.w13);
    const auto* const scales =
        static_cast<const std::byte*>(down ? stored_.scales2 : stored_.scales13);
    return {values + before * matrix.value_bytes() + row * matrix.value_row_bytes(),
            scales + before * matrix.scale_bytes() + scale_row * matrix.scale_row_bytes()};
  }

  static void check_e4m3(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                         const StoredLayout& layout, const ConstStoredRows& from) {
    const std::span codes(from.values, static_cast<std::size_t>(layout.value_bytes()));
    const auto nan = std::find_if(codes.begin(), codes.end(), [](std::byte code) {
      return (code & std::byte{0x7f}) == std::byte{0x7f};
    });
    if (nan != codes.end()) {
      const std::int64_t at = nan - codes.begin();
      fail(ErrorCode::kInvalidArgument,
           "{} of expert {}: row {} of {}, column {} is NaN, which stored weights cannot have",
           name_of(part), expert, first_row + at / layout.cols, rows_of(part), at % layout.cols);
    }
    const std::int64_t across = layout.scale_row_bytes() / std::int64_t{sizeof(float)};
    for (std::int64_t i = 0; i < layout.scale_rows() * across; ++i) {
      float scale = 0;
      std::memcpy(&scale, from.scales + i * std::int64_t{sizeof scale}, sizeof scale);
      require(
          std::isfinite(scale),
          "{}'s scales of expert {}: row {} of {}, column {} is {}, which stored weights cannot "
          "have",
          name_of(part), expert, first_row / kE4M3Block + i / across, rows_of(part), i % across,
          scale);
    }
  }

  static void check_mxfp4(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                          const StoredLayout& layout, const ConstStoredRows& from) {
    const std::span scales(from.scales, static_cast<std::size_t>(layout.scale_bytes()));
    const auto nan = std::find(scales.begin(), scales.end(), std::byte{0xff});
    if (nan == scales.end()) return;
    const std::int64_t at = nan - scales.begin(), across = layout.scale_row_bytes();
    fail(ErrorCode::kInvalidArgument,
         "{}'s scales of expert {}: row {} of {}, column {} is 255, NaN, which stored weights "
         "cannot "
         "have",
         name_of(part), expert, first_row + at / across, rows_of(part), at % across);
  }

  ExpertConfig config_;
  StoredExperts stored_;
};

}  // namespace

std::unique_ptr<ExpertSource> make_stored_source(const ExpertConfig& config,
                                                 const StoredExperts& stored) {
  check(config);
  if (stored.format != WeightFormat::kE4M3 && stored.format != WeightFormat::kMxfp4) {
    fail(ErrorCode::kUnsupported, "experts stored as {} in arrays, want e4m3 or mxfp4",
         to_string(stored.format));
  }
  if (stored.format == WeightFormat::kMxfp4) {
    require(config.hidden % kMxfp4Block == 0 && config.inner % kMxfp4Block == 0,
            "hidden={} and inner={} of experts stored as mxfp4, want multiples of {}",
            config.hidden, config.inner, kMxfp4Block);
  }
  require(stored.w13 != nullptr && stored.w2 != nullptr, "expert weights are null");
  require(stored.scales13 != nullptr && stored.scales2 != nullptr, "scales of experts are null");
  require(!config.bias || (stored.b13 != nullptr && stored.b2 != nullptr),
          "expert biases are null");
  return std::make_unique<StoredSource>(config, stored);
}

}  // namespace switchyard

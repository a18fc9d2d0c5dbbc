#pragma once

// The forms of weights with codes that tests go through.

#include <string>
#include <vector>

#include "switchyard/weight_format.hpp"

namespace switchyard {

struct StoredKind {
  WeightFormat format;
  Int4Form int4{};

  /// Values of a row that share a scale.
  [[nodiscard]] std::int64_t group() const {
    switch (format) {
      case WeightFormat::kMxfp4: return kMxfp4Block;
      case WeightFormat::kInt4: return int4.group;
      case WeightFormat::kNvfp4: return kNvfp4Block;
      default: return kE4M3Block;
    }
  }
  [[nodiscard]] std::string name() const {
    std::string name = to_string(format);
    if (format != WeightFormat::kInt4) return name;
    return name + " " + std::to_string(int4.group) +
           (int4.scale == DType::kF16 ? " f16" : " bf16") + (int4.zero_points ? " zeros" : "");
  }
};

inline const std::vector<StoredKind>& stored_kinds() {
  static const std::vector<StoredKind> kinds = {
      {WeightFormat::kE4M3},
      {WeightFormat::kMxfp4},
      {WeightFormat::kNvfp4},
      {WeightFormat::kInt4, {.group = 32, .scale = DType::kBF16}},
      {WeightFormat::kInt4, {.group = 32, .scale = DType::kF16, .zero_points = true}},
      {WeightFormat::kInt4, {.group = 64, .scale = DType::kBF16, .zero_points = true}},
      {WeightFormat::kInt4, {.group = 128, .scale = DType::kF16}},
      {WeightFormat::kInt4, {.group = 128, .scale = DType::kF16, .zero_points = true}}};
  return kinds;
}

}  // namespace switchyard

#pragma once

#include "switchyard/layer.hpp"

namespace switchyard {

/// Whether the layer's options say that experts multiply rows of e4m3.
[[nodiscard]] inline bool computes_fp8(const LayerOptions& options) {
  return options.compute == DType::kF8E4M3;
}

/// What the layer computes in beside that.
[[nodiscard]] inline DType compute_type(const LayerModel& model, const LayerOptions& options) {
  if (computes_fp8(options)) return DType::kBF16;
  return options.compute.value_or(model.experts->dtype());
}

/// @param options  Its weights are what the source of the experts is asked for.
/// @throws Error{kInvalidArgument}: no type that is computed in; {kUnsupported}: fp8 with anything
///         that LayerOptions::compute does not name.
void check_compute(const LayerModel& model, const LayerOptions& options);

}  // namespace switchyard

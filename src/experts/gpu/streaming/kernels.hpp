#pragma once

#include "experts/gpu/streaming/args.hpp"
#include "experts/gpu/streaming/streaming.hpp"

namespace switchyard::streaming {

/// Two kernels, for cudaLaunchKernelExC; null where no such shape is built.
struct Kernels {
  const void* up = nullptr;     // __global__(UpArgs)
  const void* down = nullptr;   // __global__(DownArgs)
  const void* whole = nullptr;  // __global__(WholeArgs)
};

/// Whether a block of both kernels takes the registers of a whole SM.
inline bool takes_all_registers(const StreamingShape& shape) {
  return shape.up.tiles > 2 && !shape.down.by_item;
}
/// Rows of an expert that are multiplied at a time. Codes spend the registers on more warps.
inline int pass_rows(const StreamingShape& shape, WeightFormat format) {
  return takes_all_registers(shape) && format == WeightFormat::kExact ? 64 : 32;
}

/// Warps of a block that multiply.
inline int consumers(const StreamingShape& shape, WeightFormat format) {
  return format != WeightFormat::kExact && takes_all_registers(shape) ? kManyConsumers
                                                                      : kFewConsumers;
}

// One file each: they take a while to compile.
Kernels kernels_hopper_bf16(const StreamingShape& shape);
Kernels kernels_hopper_f16(const StreamingShape& shape);
Kernels kernels_hopper_f32(const StreamingShape& shape);
Kernels kernels_hopper_mxfp4(const StreamingShape& shape);
Kernels kernels_hopper_e4m3(const StreamingShape& shape);
Kernels kernels_portable_bf16(const StreamingShape& shape);
Kernels kernels_portable_f16(const StreamingShape& shape);
Kernels kernels_portable_f32(const StreamingShape& shape);

}  // namespace switchyard::streaming

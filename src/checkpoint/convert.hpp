#pragma once

#include <cstdint>

#include "switchyard/tensor.hpp"

namespace switchyard {

/// Convert `count` values between f32, bf16 and f16 (through f32, rounded once, to nearest even).
/// `from` may lie at any address; `to` is aligned.
void convert(const void* from, DType from_type, void* to, DType to_type, std::int64_t count);

}  // namespace switchyard

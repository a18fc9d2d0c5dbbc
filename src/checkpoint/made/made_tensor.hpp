#pragma once

// Made-up weights: a pure function of (seed, tensor name, index) in integer arithmetic, so that the
// bytes are the same on every machine and any part can be made without the rest.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "checkpoint/files/safetensors.hpp"

namespace switchyard {

enum class Fill : std::uint8_t {
  kWeight,        ///< About normal, deviation between 0.8 and 1.2 times 1/sqrt(fan_in).
  kNorm,          ///< 1, give or take an eighth.
  kBias,          ///< About normal, deviation 0.07.
  kBytes,         ///< Every byte equally likely: codes of four bits, also in words of I32.
  kMxfp4Scale,    ///< E8M0 such that MXFP4 values have a deviation of about 1/sqrt(fan_in).
  kF8,            ///< Every F8_E4M3 but NaN equally likely.
  kF8Scale,       ///< F32, no power of two, such that F8 values have about that deviation.
  kInt4Scale,     ///< F16 or BF16, such that int4 values have about that deviation.
  kInt4Zeros,     ///< I32 of 8 zero points, each 7 or 8.
  kGroupIndex,    ///< I32: the number of the group that an element is in, `fan_in` each.
  kNvfp4Scale,    ///< F8_E4M3, between 1/2 and 2.
  kNvfp4Factor,   ///< F32, such that NVFP4 values have about that deviation.
  kNvfp4Divisor,  ///< F32: about the inverse.
};

struct MadeTensor {
  TensorSpec spec;
  Fill fill = Fill::kWeight;
  std::int64_t fan_in = 1;
};

/// Elements [first, first + count) as they stand in the file.
/// @param out  count * size_of(tensor.spec.type) bytes, aligned for the type.
void make_elements(const MadeTensor& tensor, std::uint64_t seed, std::int64_t first,
                   std::int64_t count, void* out);

}  // namespace switchyard

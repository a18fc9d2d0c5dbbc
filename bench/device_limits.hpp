#pragma once

#include "bench/machine.hpp"

namespace switchyard::bench {

/// Of the current GPU: a copy of 2 GiB, reads of 4 GiB, and cuBLAS on large square matrices of
/// random values.
[[nodiscard]] Limits measure_gpu_limits();

}  // namespace switchyard::bench

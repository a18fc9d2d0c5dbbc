#pragma once

#include "bench/measure/dense_beside.hpp"
#include "bench/measure/machine.hpp"

namespace switchyard::bench {

/// Of the current GPU: a copy of 2 GiB, reads of 4 GiB, and cuBLAS on large square matrices of
/// random values.
[[nodiscard]] Limits measure_gpu_limits();

/// What make_dense_beside() gives on a GPU: by cuBLAS.
[[nodiscard]] std::unique_ptr<DenseBeside> make_cublas_beside(DType dtype);

}  // namespace switchyard::bench

// The grouped product of e4m3 by itself, for a process that has another program's beside it:
// tools/peers/deepgemm_beside.py loads this as a module.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <exception>

#include "experts/gpu/grouped/fp8/product.hpp"

/// y [S, columns] of bf16: the rows of each expert times its weights, as launch_fp8_down() has it.
/// Device pointers, 16-byte aligned: x [S, depth] of codes with scales [S, ceil(depth / 128)]; w of
/// codes as coded/layout.hpp has them for e4m3, with scales [E, ceil(columns / 128), ceil(depth /
/// 128)]; begin [E + 1], counts [E]; counters: 64 numbers that are 0, and again behind the call.
/// Enqueues one kernel. 0, or 1 and words on stderr.
extern "C" int switchyard_bench_fp8_product(const void* x, const float* x_scales, const void* w,
                                            const float* w_scales, void* y,
                                            const std::int32_t* begin, const std::int32_t* counts,
                                            std::int32_t* counters, std::int32_t num_experts,
                                            std::int64_t num_rows, std::int64_t depth,
                                            std::int64_t columns, cudaStream_t stream) {
  try {
    switchyard::Fp8GroupedParams params{.expert_begin = begin,
                                        .expert_rows = counts,
                                        .counters = counters,
                                        .num_experts = num_experts,
                                        .max_rows = num_rows,
                                        .num_tokens = num_rows,
                                        .hidden = columns,
                                        .inner = depth};
    // The second product only reads its rows.
    params.act = static_cast<std::byte*>(const_cast<void*>(x));
    params.act_scales = const_cast<float*>(x_scales);
    params.w2 = static_cast<const std::byte*>(w);
    params.scales2 = w_scales;
    params.y = y;
    switchyard::launch_fp8_down(params, stream);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "the product of e4m3: %s\n", error.what());
    return 1;
  }
}

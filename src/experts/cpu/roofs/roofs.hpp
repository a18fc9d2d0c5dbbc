#pragma once

#include "experts/cpu/kernels/kernels.hpp"
#include "switchyard/cpu_isa.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {

/// The limits of this machine for one instruction set, as measured.
struct CpuRoofs {
  double read_bytes_per_s = 0;  ///< Memory, all threads reading, by the best number of streams.
  int streams = 0;              ///< That number, per thread.
  double flops_f32 = 0;         ///< Operations per second, all threads.
  double flops_bf16 = 0;        ///< By the fastest of its products for the type.
  double flops_f16 = 0;
};

/// The kernels whose products of a type have the larger peak: those of the instruction set, or of
/// the next lower one that has others, which it includes (bf16 dot products may be slower than
/// products of floats).
[[nodiscard]] const cpu::Kernels& peak_kernels(CpuIsa isa, DType dtype, ThreadPool* pool);

/// Measures with the threads of the pool (null: this one) for well under a second; the best of
/// several runs, because others on the machine can only take away.
/// @throws Error{kOutOfMemory}.
[[nodiscard]] CpuRoofs measure_cpu_roofs(CpuIsa isa, ThreadPool* pool);

}  // namespace switchyard

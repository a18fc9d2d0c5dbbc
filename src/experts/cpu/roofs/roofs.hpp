#pragma once

#include "switchyard/cpu_isa.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {

/// The limits of this machine for one instruction set, as measured.
struct CpuRoofs {
  double read_bytes_per_s = 0;  ///< Memory, all threads reading, by the best number of streams.
  int streams = 0;              ///< That number, per thread.
  double flops_f32 = 0;         ///< Operations per second, all threads.
  double flops_bf16 = 0;        ///< As the bf16 kernels of this instruction set multiply.
  double flops_f16 = 0;
};

/// Measures with the threads of the pool (null: this one) for well under a second; the best of
/// several runs, because others on the machine can only take away.
/// @throws Error{kOutOfMemory}.
[[nodiscard]] CpuRoofs measure_cpu_roofs(CpuIsa isa, ThreadPool* pool);

}  // namespace switchyard

// The roofs of this machine, by the instruction set in use.
#include "bench/measure/dense_beside.hpp"
#include "bench/measure/machine.hpp"
#include "core/check.hpp"
#include "experts/cpu/roofs/roofs.hpp"
#include "switchyard/cpu_isa.hpp"
#include "switchyard/thread_pool.hpp"

#ifdef SWITCHYARD_WITH_CUDA
#include "bench/measure/device_limits.hpp"
#endif

namespace switchyard::bench {

Limits measure_limits(Backend backend, int num_threads) {
#ifdef SWITCHYARD_WITH_CUDA
  if (backend == Backend::kCuda) return measure_gpu_limits();
#endif
  require(backend == Backend::kCpu, "this build has no backend cuda");
  ThreadPool pool(num_threads);
  const CpuRoofs roofs = measure_cpu_roofs(isa_in_use(), &pool);
  return {.bandwidth = roofs.read_bytes_per_s,
          .read_bandwidth = roofs.read_bytes_per_s,
          .flops_f32 = roofs.flops_f32,
          .flops_bf16 = roofs.flops_bf16,
          .flops_f16 = roofs.flops_f16};
}

std::unique_ptr<DenseBeside> make_dense_beside(Backend backend, DType dtype) {
#ifdef SWITCHYARD_WITH_CUDA
  if (backend == Backend::kCuda) return make_cublas_beside(dtype);
#endif
  static_cast<void>(backend);
  static_cast<void>(dtype);
  return nullptr;
}

}  // namespace switchyard::bench

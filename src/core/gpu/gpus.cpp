// The GPUs of this machine, in the words of the CUDA runtime.
#include "switchyard/device.hpp"

#ifdef SWITCHYARD_WITH_CUDA
#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include "core/gpu/cuda_check.hpp"
#endif

namespace switchyard {

#ifdef SWITCHYARD_WITH_CUDA

Gpus find_gpus() {
  Gpus gpus;
  int count = 0;
  cudaError_t status = cudaGetDeviceCount(&count);
  for (int device = 0; status == cudaSuccess && device < count; ++device) {
    cudaDeviceProp properties{};
    status = cudaGetDeviceProperties(&properties, device);
    gpus.list.push_back({.name = properties.name,
                         .compute_major = properties.major,
                         .compute_minor = properties.minor,
                         .multiprocessors = properties.multiProcessorCount,
                         .memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem),
                         .l2_bytes = properties.l2CacheSize});
  }
  if (status != cudaSuccess || count == 0) {
    cudaGetLastError();  // or the next check would report it again
    gpus.list.clear();
    gpus.missing = status == cudaSuccess ? "no GPU here" : cudaGetErrorString(status);
    return gpus;
  }
  int driver = 0;
  cudaDriverGetVersion(&driver);
  gpus.driver = fmt::format("{}.{}", driver / 1000, driver % 1000 / 10);
  if (gpus.list.front().compute_major < 8) {
    gpus.missing =
        fmt::format("{} has compute capability {}.{}, want at least 8.0", gpus.list.front().name,
                    gpus.list.front().compute_major, gpus.list.front().compute_minor);
  }
  return gpus;
}

void use_gpu_of_rank(int rank) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    cudaGetLastError();  // or the next check would report it again
    return;
  }
  SWITCHYARD_CUDA(cudaSetDevice(rank % count));
}

#else

void use_gpu_of_rank(int /*rank*/) {}

Gpus find_gpus() { return {.list = {}, .driver = {}, .missing = "not built in"}; }

#endif

}  // namespace switchyard

// Which ranks share a device, told through a small host window, and whether they may.
#include "comm/device_sharing.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "core/cuda_check.hpp"

namespace switchyard {

DeviceSharing device_sharing(Communicator& communicator, int device) {
  using Uuid = std::array<char, sizeof(cudaUUID_t)>;
  cudaDeviceProp properties{};
  SWITCHYARD_CUDA(cudaGetDeviceProperties(&properties, device));
  Uuid own;
  std::memcpy(own.data(), properties.uuid.bytes, own.size());
  const int ranks = communicator.size();
  const auto window =
      communicator.create_window(static_cast<std::size_t>(ranks) * sizeof(Uuid), ranks);
  for (int to = 0; to < ranks; ++to) {
    window->put(to, static_cast<std::size_t>(communicator.rank()) * sizeof(Uuid), own.data(),
                sizeof(Uuid));
    window->signal(to, communicator.rank(), 1);
  }
  for (int from = 0; from < ranks; ++from) {
    window->wait(from, 1, {.phase = "devices", .rank = from});
  }
  std::vector<Uuid> all(static_cast<std::size_t>(ranks));
  std::memcpy(all.data(), window->local(), all.size() * sizeof(Uuid));
  communicator.barrier("devices");  // nobody drops the window while another still writes to it
  const auto ranks_on = [&all](const Uuid& uuid) {
    return static_cast<int>(std::count(all.begin(), all.end(), uuid));
  };
  DeviceSharing sharing{.here = ranks_on(own)};
  for (const Uuid& uuid : all) sharing.most = std::max(sharing.most, ranks_on(uuid));
  return sharing;
}

void require_loaded_kernels() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  SWITCHYARD_CUDA(cudaGetDriverEntryPointByVersion("cuModuleGetLoadingMode", &found, 11070,
                                                   cudaEnableDefault, &result));
  CUmoduleLoadingMode mode = CU_MODULE_EAGER_LOADING;
  if (result == cudaDriverEntryPointSuccess && found != nullptr) {
    const CUresult status = reinterpret_cast<decltype(&cuModuleGetLoadingMode)>(found)(&mode);
    if (status != CUDA_SUCCESS) mode = CU_MODULE_LAZY_LOADING;
  }
  if (mode == CU_MODULE_EAGER_LOADING) return;
  fail(ErrorCode::kUnsupported,
       "ranks that share a GPU wait for each other: set CUDA_MODULE_LOADING=EAGER, so that no "
       "kernel "
       "is loaded meanwhile");
}

}  // namespace switchyard

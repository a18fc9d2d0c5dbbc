// Which ranks share a device and what all devices can do, told through a small host window, and
// whether ranks may share one.
#include "comm/device/windows/sharing.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "core/gpu/cuda_check.hpp"

namespace switchyard {

DeviceSharing device_sharing(Communicator& communicator, int device) {
  struct Device {
    std::array<char, sizeof(cudaUUID_t)> uuid;
    bool hopper;
  };
  cudaDeviceProp properties{};
  SWITCHYARD_CUDA(cudaGetDeviceProperties(&properties, device));
  // Later chips run the kernels of sm_80.
  Device own{.uuid = {}, .hopper = properties.major == 9};
  std::memcpy(own.uuid.data(), properties.uuid.bytes, own.uuid.size());
  const int ranks = communicator.size();
  const auto window =
      communicator.create_window(static_cast<std::size_t>(ranks) * sizeof(Device), ranks);
  for (int to = 0; to < ranks; ++to) {
    window->put(to, static_cast<std::size_t>(communicator.rank()) * sizeof(Device), &own,
                sizeof(Device));
    window->signal(to, communicator.rank(), 1);
  }
  for (int from = 0; from < ranks; ++from) {
    window->wait(from, 1, {.phase = "devices", .rank = from});
  }
  std::vector<Device> all(static_cast<std::size_t>(ranks));
  std::memcpy(all.data(), window->local(), all.size() * sizeof(Device));
  communicator.barrier("devices");  // nobody drops the window while another still writes to it
  const auto ranks_on = [&all](const Device& of) {
    return static_cast<int>(
        std::ranges::count_if(all, [&](const Device& each) { return each.uuid == of.uuid; }));
  };
  DeviceSharing sharing{.here = ranks_on(own)};
  for (const Device& of : all) sharing.most = std::max(sharing.most, ranks_on(of));
  sharing.bulk_copies = std::ranges::all_of(all, &Device::hopper);
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

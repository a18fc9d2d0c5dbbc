// The one kernel that calls NCCL's device API; from its answer on, addresses are all that is used.
#include <cstddef>

#include "comm/device/exchange.hpp"
#include "comm/nccl/windows/pointers.hpp"
#include "core/gpu/device_buffer.hpp"

namespace switchyard {
namespace {

__global__ void peer_pointers_kernel(ncclWindow_t window, int num_ranks, std::byte** parts) {
  const auto rank = static_cast<int>(threadIdx.x);
  if (rank < num_ranks) parts[rank] = static_cast<std::byte*>(ncclGetPeerPointer(window, 0, rank));
}

}  // namespace

void read_peer_pointers(ncclWindow_t window, int num_ranks, std::byte** parts) {
  const DeviceMemory memory(std::int64_t{kMaxDeviceRanks * sizeof(std::byte*)});
  auto** const answer = reinterpret_cast<std::byte**>(memory.data());
  cudaStream_t stream = nullptr;
  SWITCHYARD_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  peer_pointers_kernel<<<1, kMaxDeviceRanks, 0, stream>>>(window, num_ranks, answer);
  SWITCHYARD_CUDA(cudaGetLastError());
  SWITCHYARD_CUDA(cudaMemcpyAsync(parts, answer,
                                  static_cast<std::size_t>(num_ranks) * sizeof(std::byte*),
                                  cudaMemcpyDeviceToHost, stream));
  SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
  SWITCHYARD_CUDA(cudaStreamDestroy(stream));
}

}  // namespace switchyard

// One launch of a kernel with a stack larger than any other has.
#include "core/gpu/stacks.hpp"

#include <cstddef>
#include <cstdint>

#include "core/gpu/cuda_check.hpp"
#include "core/gpu/device_wide.hpp"

namespace switchyard {
namespace {

constexpr int kMostStack = 1024;  // more than any kernel of the library has

/// Every thread has kMostStack bytes of its own.
__global__ void stack_kernel(std::byte* out) {
  volatile std::byte bytes[kMostStack];
  for (std::int32_t i = 0; i < kMostStack; ++i) bytes[i] = static_cast<std::byte>(i);
  if (out != nullptr) *out = bytes[blockIdx.x];
}

}  // namespace

void make_room_for_stacks() {
  stack_kernel<<<1, 32>>>(nullptr);
  SWITCHYARD_CUDA(cudaGetLastError());
  SWITCHYARD_CUDA(wait_for_device());
}

}  // namespace switchyard

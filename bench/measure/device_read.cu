// What the memory of a GPU gives to kernels that only read: 128 bytes in flight a thread, nothing
// kept in the first cache level. Bound by the memory.
#include "bench/measure/device_read.hpp"
#include "core/gpu/cuda_device.hpp"

namespace switchyard::bench {
namespace {

constexpr int kInFlight = 8;  // of 16 bytes a thread

__device__ __forceinline__ uint4 load(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

__global__ void read_all(const uint4* p, std::size_t size, unsigned* out) {
  unsigned sum = 0;
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; i + (kInFlight - 1) * stride < size; i += kInFlight * stride) {
    uint4 v[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) v[k] = load(p + i + k * stride);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) sum ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  for (; i < size; i += stride) {
    const uint4 v = load(p + i);
    sum ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (sum == 0x12345) *out = sum;  // or the compiler would see that nobody wants the sum
}

}  // namespace

void launch_read(const void* memory, std::int64_t bytes, unsigned* out, ReadShape shape,
                 cudaStream_t stream) {
  read_all<<<static_cast<unsigned>(shape.blocks * num_multiprocessors()),
             static_cast<unsigned>(shape.threads), 0, stream>>>(
      static_cast<const uint4*>(memory), static_cast<std::size_t>(bytes / 16), out);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard::bench

#include "experts/gpu/grouped/coded/order.hpp"

#include <algorithm>

#include "core/check.hpp"
#include "core/gpu/cuda_check.hpp"
#include "core/gpu/cuda_device.hpp"
#include "experts/gpu/coded/layout.hpp"

namespace switchyard {
namespace {

constexpr int kThreads = 256;

/// A thread writes 16 bytes: pairs t, t + 4, t + 8 and t + 12 of 32 values, t = thread % 4.
__global__ void __launch_bounds__(kThreads)
    order_rows(const std::uint32_t* __restrict__ pairs, uint4* __restrict__ out, std::int64_t all) {
  const std::int64_t step = std::int64_t{kThreads} * gridDim.x;
  for (std::int64_t i = std::int64_t{kThreads} * blockIdx.x + threadIdx.x; i < all; i += step) {
    const std::uint32_t* const from = pairs + i / 4 * (coded::kOrderedValues / 2) + i % 4;
    out[i] = {from[0], from[4], from[8], from[12]};
  }
}

}  // namespace

void launch_order_rows(const void* x, std::int64_t rows, std::int64_t columns, void* out,
                       cudaStream_t stream) {
  require(columns % coded::kOrderedValues == 0, "columns={} is not a multiple of {}", columns,
          coded::kOrderedValues);
  const std::int64_t all = rows * columns / 8;
  if (all == 0) return;
  const std::int64_t most = 8 * device_attribute(cudaDevAttrMultiProcessorCount);
  const std::int64_t blocks = std::min(most, (all + kThreads - 1) / kThreads);
  order_rows<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      static_cast<const std::uint32_t*>(x), static_cast<uint4*>(out), all);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard

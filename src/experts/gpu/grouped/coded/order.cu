#include "experts/gpu/grouped/coded/order.hpp"

#include <algorithm>

#include "core/check.hpp"
#include "core/gpu/cuda_check.hpp"
#include "core/gpu/cuda_device.hpp"
#include "experts/gpu/coded/layout.hpp"

namespace switchyard {
namespace {

constexpr int kThreads = 256;

constexpr int kRunsOfLane = 4;                  // runs of 16 bytes
constexpr int kRunsOfPiece = 32 * kRunsOfLane;  // of a row, a warp's at a time

/// Lets the product behind it in only as its blocks leave: one block of that fills a
/// multiprocessor, which blocks of this kernel may still want.
__global__ void __launch_bounds__(kThreads) order_rows(OrderedRows p) {
  const auto* const pairs = static_cast<const std::uint32_t*>(p.x);
  auto* const out = static_cast<uint4*>(p.out);
  const int runs = static_cast<int>(p.columns / 8);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto rows = static_cast<int>(min(p.max_rows, std::int64_t{__ldg(p.end)}));
  const int pieces = (runs + kRunsOfPiece - 1) / kRunsOfPiece;
  const std::int64_t all = std::int64_t{rows} * pieces;
  const int warps = static_cast<int>(gridDim.x) * (kThreads / 32);
  for (std::int64_t i = (blockIdx.x * kThreads + threadIdx.x) / 32; i < all; i += warps) {
    const auto row = static_cast<int>(i / pieces);
    const std::int64_t token = p.row_token == nullptr ? row : __ldg(p.row_token + row);
    if (token < 0 || token >= p.num_tokens) continue;
    const std::uint32_t* const from = pairs + token * (p.columns / 2);
    const int first = static_cast<int>(i % pieces) * kRunsOfPiece + lane;
#pragma unroll
    for (int r = 0; r < kRunsOfLane; ++r) {
      const int run = first + 32 * r;
      if (run >= runs) break;
      const auto pair = [&](int t) {
        return __ldg(from + run / 4 * 16 + 4 * t + coded::ordered_run(t, run % 4));
      };
      out[std::int64_t{row} * runs + run] = {pair(0), pair(1), pair(2), pair(3)};
    }
  }
}

}  // namespace

void launch_order_rows(const OrderedRows& rows, cudaStream_t stream) {
  require(rows.columns % coded::kOrderedValues == 0, "columns={} is not a multiple of {}",
          rows.columns, coded::kOrderedValues);
  if (rows.max_rows == 0 || rows.columns == 0) return;
  const std::int64_t most = 8 * device_attribute(cudaDevAttrMultiProcessorCount);
  const std::int64_t pieces = (rows.columns / 8 + kRunsOfPiece - 1) / kRunsOfPiece;
  const std::int64_t wanted = (rows.max_rows * pieces * 32 + kThreads - 1) / kThreads;
  const auto blocks = static_cast<unsigned>(std::min(most, wanted));
  order_rows<<<blocks, kThreads, 0, stream>>>(rows);
  SWITCHYARD_CUDA(cudaGetLastError());
}

}  // namespace switchyard

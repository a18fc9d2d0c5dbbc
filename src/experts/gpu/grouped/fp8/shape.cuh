#pragma once

// Sizes of the grouped product of e4m3 on Hopper, and what it is told beside the 16-bit one.

#include "core/gpu/register_pool.hpp"
#include "experts/gpu/grouped/sm90/gemm.cuh"

namespace switchyard {

template <bool kGated_>
struct Fp8Shape {
  static constexpr bool kGated = kGated_;  // the first product, which gathers its rows
  static constexpr bool kGather = kGated;
  static constexpr bool kTalls = false;

  static constexpr int kTileN = 256;
  static constexpr int kTileK = 64;  // pairs of codes
  static constexpr int kOutColumns = kGated ? 128 : 256;
  static constexpr int kRowsBytes = kTileRows * 128;
  static constexpr int kWeightsBytes = kTileN * 128;
  static constexpr int kStageBytes = kRowsBytes + kWeightsBytes;
  static constexpr int kStages = 4;
  static constexpr int kLoadedRows = kTileRows;

  using Out = WarpStaging<64>;  // of the second product
  static constexpr int kStagingAt = kStages * kStageBytes;
  static constexpr int kMessagesAt = kStagingAt + (kGated ? 0 : 2 * Out::kBytes);
  static constexpr int kFullAt = kMessagesAt + kRingSlots * 16;
  static constexpr int kEmptyAt = kFullAt + kStages * 8;
  static constexpr int kGatheredAt = kEmptyAt + kStages * 8;
  static constexpr int kRingAt = kGatheredAt + kStages * 8;
  static constexpr int kSharedBytes = kRingAt + kRingSlots * 8;

  static constexpr int kThreads = 384;
  static constexpr int kGatherThreads = 64;
  static constexpr int kLoadRegisters = 40;
  static constexpr int kMultiplyRegisters = 232;
  static constexpr int kFullArrivals = kGather ? 2 : 1;
  static constexpr int kEmptyArrivals = 2 * 8;

  static_assert(kSharedBytes <= 232448, "more shared memory than a CTA can have");
  static_assert((kLoadRegisters + 2 * kMultiplyRegisters) * 128 <= launch_registers(kThreads));
};

/// What the 16-bit product's parameters do not have.
struct Fp8Params {
  const float* row_scales;     // [N or S, blocks]
  const float* weight_scales;  // [E * (2 or 1), blocks of rows, blocks]
  std::int32_t blocks;         // along the sums
  std::int32_t row_blocks;     // of a matrix
  std::byte* codes;            // gated: out
  float* scales;
};

}  // namespace switchyard

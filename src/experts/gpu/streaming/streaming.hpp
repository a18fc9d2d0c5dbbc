#pragma once

// Experts of a few tokens on one GPU: one kernel or two that stream the weights of the hit experts
// once each, with the combine inside. Device pointers in, nothing else.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "switchyard/combine.hpp"
#include "switchyard/device.hpp"
#include "switchyard/experts.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

/// Which instructions copy the weights to shared memory.
enum class StreamingPath : std::uint8_t {
  kBest,      ///< kHopper where the device has it, else kPortable.
  kHopper,    ///< Tensor copies and programmatic launch: sm_90.
  kPortable,  ///< cp.async: sm_80 and everything later.
};

class TensorMaps;

namespace planning {
struct PlanParams;
}

/// What the kernels tell the host of a plan of a compact layout: pinned memory, or null.
struct PlanReport {
  DeviceStatus* status = nullptr;         ///< A copy of StreamingParams::status.
  std::int32_t* rows_used = nullptr;      ///< token_begin[N].
  std::int32_t* rows_executed = nullptr;  ///< expert_begin[El].
};

/// Where the blocks of one kernel meet: zeroed once by its owner, left zero by every call.
struct StreamingSync {
  static constexpr std::int64_t kMostHits = 126;
  std::uint32_t claimed;            ///< Items of the first half that blocks have taken.
  std::uint32_t left;               ///< Blocks that wait for nothing any more.
  std::uint32_t stored[kMostHits];  ///< Items of each hit that are in `act`.
};
static_assert(sizeof(StreamingSync) == 512);

/// The sizes of a call, which decide whether and how it is streamed.
struct StreamingProblem {
  std::int32_t num_experts = 0;  ///< E <= 1024.
  /// Of all ranks, where others have experts too: then only a share of max_assignments is to be
  /// expected here. 0: num_experts.
  std::int32_t total_experts = 0;
  std::int64_t num_tokens = 0;       ///< N.
  std::int64_t max_rows = 0;         ///< Room in row_token, row_weight and act.
  std::int64_t max_assignments = 0;  ///< Room in token_row.
  std::int64_t hidden = 0;           ///< H, a multiple of 8 (f32: of 4).
  std::int64_t inner = 0;            ///< I, likewise.
  DType dtype = DType::kBF16;        ///< kBF16, kF16 or kF32.
  /// Of the weights: of dtype, or codes as coded/layout.hpp has them (dtype kBF16, Hopper).
  WeightFormat format = WeightFormat::kExact;
  bool scales_fold = false;  ///< MXFP4: CudaExpertWeights::scales_fold().
  bool gated = true;
  bool x_is_packed = false;  ///< Row r of x is row r of the plan; else gathered by row_token.
  /// The plan was complete before the kernel that precedes this call in the stream began: the
  /// weights may be fetched while that kernel still runs.
  bool plan_is_older = false;
  bool batch_invariant = false;  ///< No tile depends on the number of tokens; not of codes.
  bool makes_plan = false;       ///< StreamingParams::plan is given.
  bool blocks_meet = false;      ///< StreamingParams::sync is given.
  /// Tiles of the two kernels (measurements); 0: chosen.
  int up_tiles = 0;
  int down_tiles = 0;

  bool operator==(const StreamingProblem&) const = default;
};

/// One layer's experts and a plan of few rows; every pointer lives on the device, 16-byte aligned.
struct StreamingParams : StreamingProblem {
  const void* x = nullptr;     ///< [N, H], compute type.
  const void* w13 = nullptr;   ///< [E, 2I, H] (gate rows, up rows), plain: [E, I, H].
  const float* b13 = nullptr;  ///< [E, 2I] or [E, I]; may be null.
  const void* w2 = nullptr;    ///< [E, H, I].
  /// Of codes: a factor for each matrix [E, 2 or 1] and [E] (MXFP4), or blocks' scales [E, 2 or 1,
  /// ceil(I / 128), ceil(H / 128)] and [E, ceil(H / 128), ceil(I / 128)] (e4m3).
  const float* scales13 = nullptr;
  const float* scales2 = nullptr;
  const float* b2 = nullptr;          ///< [E, H]; may be null.
  TensorMaps* weight_maps = nullptr;  ///< Who keeps those of w13 and w2; null: made anew.
  void* act = nullptr;                ///< [max_rows, I], compute type: written, then read.
  StreamingSync* sync = nullptr;      ///< Null: always two kernels. One call at a time.

  /// Not null: the kernel makes this plan of a few assignments, in the arrays below, itself. Where
  /// choose_streaming().whole only.
  const planning::PlanParams* plan = nullptr;
  PlanReport report{};
  const DeviceStatus* status = nullptr;  ///< What is reported, complete before this call.

  const std::int32_t* expert_begin = nullptr;  ///< [E+1] first row of each expert.
  const std::int32_t* expert_rows = nullptr;   ///< [E] rows used of it.
  const std::int32_t* row_token = nullptr;     ///< [max_rows].
  const float* row_weight = nullptr;           ///< [max_rows].
  const std::int32_t* token_begin = nullptr;   ///< [N+1] into token_row.
  const std::int32_t* token_row = nullptr;     ///< [max_assignments] ascending for each token.

  void* sums = nullptr;  ///< out [N, H], or [N * num_groups, H] with each_group.
  DType sums_dtype = DType::kF32;
  Subtree subtree{};
  bool each_group = false;
  std::int32_t first_expert = 0;  ///< Global id of expert 0.

  Activation activation = Activation::kSilu;
  float alpha = 1.702F;
  float limit = 7.0F;
  StreamingPath path = StreamingPath::kBest;

  /// What choose_streaming() reads.
  [[nodiscard]] StreamingProblem problem() const {
    StreamingProblem problem = *this;
    problem.makes_plan = plan != nullptr;
    problem.blocks_meet = sync != nullptr;
    return problem;
  }
};

/// What the choice of tiles depends on, of the device.
struct StreamingChip {
  int num_sms = 0;
  int shared_bytes_per_sm = 0;     ///< Of all blocks together, 1 KB a block included.
  int shared_bytes_per_block = 0;  ///< Most of one block.
  bool hopper = false;

  bool operator==(const StreamingChip&) const = default;
};

/// How one of the two kernels runs.
struct StreamingKernelShape {
  int tiles = 1;         ///< Tiles of 16 weight rows that the 8 warps of a block share: 1, 2, 4, 8.
  bool by_item = false;  ///< Second kernel: the warps share the experts, not the sum over I.
  int num_blocks = 0;
  int piece_bytes = 0;  ///< Of a token row in one stage, and of a weight row but of codes.
  int stage_bytes = 0;  ///< Of the ring of weights and tokens in shared memory.
  int num_stages = 0;
  int lead_stages = 0;  ///< The next kernel is let in when so many loads are left.
};

struct StreamingShape {
  StreamingKernelShape up;
  StreamingKernelShape down;
  bool whole = false;  ///< One kernel for both, whose ring is `ring`'s.
  StreamingKernelShape ring;
  bool fits = false;  ///< The rows of all experts fit shared memory.
};

/// Whether a grouped GEMM and a combine after it would be slower: they are faster where experts
/// have many rows. A pure function of (problem, chip).
[[nodiscard]] bool worth_streaming(const StreamingProblem& problem, const StreamingChip& chip);

/// Tiles and rings: a pure function of (problem, chip).
[[nodiscard]] StreamingShape choose_streaming(const StreamingProblem& problem,
                                              const StreamingChip& chip);
[[nodiscard]] inline StreamingShape choose_streaming(const StreamingParams& params,
                                                     const StreamingChip& chip) {
  return choose_streaming(params.problem(), chip);
}

/// The current device.
/// @throws Error{kDevice}.
[[nodiscard]] StreamingChip streaming_chip();

/// sums = the weighted sums of each token's expert outputs, by the fixed order of ReductionOrder.
/// Of codes the products are those of the numbers that they mean, exact too; scales multiply sums.
/// Enqueues one or two kernels; capturable; allocates nothing, no host wait. Weights of an expert
/// are read once per 32 (from 4 tiles up: 64) of its rows. 16-bit products are exact, f32 ones are
/// split so that about 2^-21 of a product is lost; sums are fp32; the intermediate and each row are
/// rounded to the compute type.
/// @throws Error{kInvalidArgument}: a size or alignment is off. {kUnsupported}: too many rows for
///         shared memory (choose_streaming().fits), or the device lacks the path. {kDevice}.
/// Cost: streams 2 or 3 * H * I weights of each hit expert.
void launch_streaming(const StreamingParams& params, cudaStream_t stream);
/// With tiles of the caller's choice (measurements).
void launch_streaming(const StreamingParams& params, const StreamingShape& shape,
                      cudaStream_t stream);

}  // namespace switchyard

#pragma once

// The two matrix products of all experts, for many tokens, on one GPU: device pointers in, nothing
// else. Which rows an expert has is known only on the device.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "experts/gpu/grouped/tile_config.hpp"
#include "switchyard/experts.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

class TensorMaps;

/// Which kernels run a grouped GEMM.
enum class GroupedPath : std::uint8_t {
  kBest,      ///< sm_90a where the device has it, else sm_80.
  kSm90,      ///< TMA and wgmma.
  kSm80,      ///< cp.async and mma.sync: sm_80 and everything later; flat where it has no room.
  kSm80Flat,  ///< The same in 98 KB of shared memory, as where a block cannot have 146 KB.
};

/// One layer's experts and their rows; every pointer lives on the device, 16-byte aligned.
struct GroupedGemmParams {
  // What gate_up reads.
  const void* x = nullptr;                  ///< [N, H], compute type.
  const std::int32_t* row_token = nullptr;  ///< [S] row of x for each row; null: row itself.
  const void* w13 = nullptr;                ///< [E, 2I, H] (gate rows, up rows), plain: [E, I, H].
  const float* b13 = nullptr;               ///< [E, 2I] or [E, I]; may be null.
  // What gate_up writes and down reads.
  void* act = nullptr;  ///< [S, I], compute type.
  /// What gate_up also writes, for training: [S, 2I] gate, then up, before the activation, with
  /// biases (plain: [S, I]), compute type; or null.
  void* preactivation = nullptr;
  // What down reads and writes.
  const void* w2 = nullptr;           ///< [E, H, I].
  const float* b2 = nullptr;          ///< [E, H]; may be null.
  TensorMaps* weight_maps = nullptr;  ///< Who keeps those of w13 and w2; null: made anew.
  void* y = nullptr;                  ///< [S, H], compute type.

  const std::int32_t* expert_begin = nullptr;  ///< [E+1] first row of each expert.
  const std::int32_t* expert_rows = nullptr;   ///< [E] rows used of it.
  void* workspace = nullptr;  ///< grouped_gemm_workspace_bytes(), zeroed once by its owner; the
                              ///< kernels leave it zeroed. One per stream.

  std::int32_t num_experts = 0;    ///< E <= 1024.
  std::int64_t max_rows = 0;       ///< S: room in row_token, act and y.
  std::int64_t num_tokens = 0;     ///< N.
  std::int64_t expected_rows = 0;  ///< Rows there will be about, for the choice of tile; 0:
                                   ///< max_rows.
  std::int64_t hidden = 0;         ///< H, a multiple of 8 (f32: of 4).
  std::int64_t inner = 0;          ///< I, likewise.
  DType dtype = DType::kBF16;      ///< kBF16, kF16 or kF32.
  bool gated = true;
  Activation activation = Activation::kSilu;
  float alpha = 1.702F;
  float limit = 7.0F;
  GroupedPath path = GroupedPath::kBest;
  TileShape tile = TileShape::kAuto;  ///< sm_90a, gated gate_up only.
  bool dynamic = true;                ///< Units from a counter; false: in turn, whatever they cost.
};

/// The tile that launch_gate_up() takes where sm_90a's kernels run in 16 bits: `tile`, or the one
/// that is the quickest by choose_tile(). Bits are the same.
[[nodiscard]] TileShape tile_of(const GroupedGemmParams& params);

/// Whether a block of the current device can have the shared memory of kSm80, else it is kSm80Flat.
[[nodiscard]] bool has_room_for_sm80();

/// Bytes of `workspace`: one counter for each of the two launches, on lines of their own.
constexpr std::size_t grouped_gemm_workspace_bytes() { return 256; }

/// act[row] = activation(w13[e] x[row_token[row]] + b13[e]) for every used row of every expert e.
/// Enqueues one kernel; capturable; no host wait. Sums run over ascending h in fp32; a row's bits
/// depend on nothing but its token and its expert. 16-bit products are exact, f32 ones are split so
/// that about 2^-21 of a product is lost, and less than 2^-18.
/// @throws Error{kInvalidArgument}: a size or alignment is off. {kUnsupported}: the device lacks
///         the architecture. {kDevice}.
/// Cost: 2 * H * I operations a row (4 gated); weights of hit experts and rows of x once from L2 a
///       tile.
void launch_gate_up(const GroupedGemmParams& params, cudaStream_t stream);

/// y[row] = w2[e] act[row] + b2[e] for every used row. As launch_gate_up; in 16-bit types on Hopper
/// it may begin while the kernel before it in the stream ends, and reads expert_begin, expert_rows
/// and w2 at once: they must be older than that kernel, as they are behind launch_gate_up.
void launch_down(const GroupedGemmParams& params, cudaStream_t stream);

}  // namespace switchyard

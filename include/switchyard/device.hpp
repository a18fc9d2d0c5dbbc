#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "switchyard/experts.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

/// One GPU as the CUDA runtime sees it.
struct Gpu {
  std::string name{};
  int compute_major = 0, compute_minor = 0;  ///< Compute capability.
  int multiprocessors = 0;
  std::int64_t memory_bytes = 0;
  std::int64_t l2_bytes = 0;
};

struct Gpus {
  std::vector<Gpu> list{};  ///< By device number.
  std::string driver{};     ///< The newest CUDA version that the driver knows: "13.0".
  std::string missing{};    ///< Why the backend cuda cannot be used; empty: it can.
};

/// Never throws for want of a GPU, a driver or a build with CUDA: `missing` says which.
[[nodiscard]] Gpus find_gpus();

/// Makes the GPU of a rank, `rank` mod their number, the calling thread's current one. Nothing
/// where there is none.
/// @throws Error{kDevice}.
void use_gpu_of_rank(int rank);

/// What kernels found wrong with their data. Lives in device memory; kernels only ever lower
/// `nan_logit` and `bad_token_id` and raise the counters, so the record does not depend on timing.
/// Whoever owns it fills it with DeviceStatus{} and copies it to the host when asked.
struct DeviceStatus {
  static constexpr std::uint64_t kNone = ~std::uint64_t{0};

  /// (token << 32 | expert) of the lowest NaN logit; its token gets no expert. kNone: none. Of
  /// soft_moe() (token << 32 | slot) of the lowest logit that is not finite.
  std::uint64_t nan_logit = kNone;
  /// Assignments to an expert outside [-1, E), skipped; of a list, those that are no token's.
  std::uint32_t bad_ids = 0;
  std::uint32_t lost_rows = 0;  ///< Assignments beyond padded_rows of their expert; skipped.
  /// (token << 32 | its id) of the lowest token whose id a hash router has no experts for; it gets
  /// none. kNone: none.
  std::uint64_t bad_token_id = kNone;

  [[nodiscard]] bool ok() const {
    return nan_logit == kNone && bad_ids == 0 && lost_rows == 0 && bad_token_id == kNone;
  }
};

/// Device memory that route, capacity and plan need on CUDA for at most so many tokens: zeroed once
/// by its owner, left usable by every call, one per stream. 256-byte aligned.
[[nodiscard]] std::int64_t stage_workspace_bytes(std::int64_t max_tokens, std::int64_t top_k,
                                                 std::int64_t num_experts, std::int64_t hidden);

/// What router_gemm_backward() needs on CUDA as its Execution::workspace for at most so many
/// tokens: where the gate or its bias have a gradient, on compute capability 9.0 always. Scratch:
/// nothing of it lasts. Not shared with the stages above. Never less for more tokens.
[[nodiscard]] std::int64_t router_gemm_backward_workspace_bytes(std::int64_t max_tokens,
                                                                std::int64_t num_experts,
                                                                std::int64_t hidden);

/// What routing_sums() needs on CUDA as its Execution::workspace for so many groups of tokens:
/// zeroed once by its owner, left usable by every call. Not shared with the stages above.
[[nodiscard]] std::int64_t routing_sums_workspace_bytes(std::int64_t groups,
                                                        std::int64_t num_experts,
                                                        std::int64_t devices);

/// What experts() needs on CUDA as its Execution::workspace for at most so many rows: counters (768
/// bytes, zeroed once by the owner and left zero by every call), then the intermediate rows. Not
/// shared with the stages above.
[[nodiscard]] std::int64_t experts_workspace_bytes(std::int64_t max_rows, std::int64_t inner,
                                                   DType dtype);

/// The same for these weights. Stored ones take room for the numbers of some experts at a time
/// beside it: 64 MiB, or what one expert has, where that is more.
[[nodiscard]] std::int64_t experts_workspace_bytes(std::int64_t max_rows,
                                                   const ExpertWeights& weights);

/// Rows of ExpertsBackwardArgs that are given room apart from the workspace.
struct ExpertsBackwardRoom {
  bool dpreactivation = false;
  bool weighted_activation = false;
};

/// What experts_backward() needs on CUDA as its Execution::workspace for at most so many rows of
/// these experts: whatever it holds, and of no use behind the call.
[[nodiscard]] std::int64_t experts_backward_workspace_bytes(const ExpertConfig& config, DType dtype,
                                                            std::int32_t num_local,
                                                            std::int64_t max_rows,
                                                            ExpertsBackwardRoom room = {});

}  // namespace switchyard

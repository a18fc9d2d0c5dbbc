#pragma once

#include <memory>

#include "switchyard/experts.hpp"
#include "switchyard/plan.hpp"
#include "switchyard/route.hpp"
#include "switchyard/routing/soft_moe.hpp"

namespace switchyard {

/// Stages of one rank on the current GPU as calls of their own, which only enqueue. Each takes
/// memory where a call has more tokens, or more experts a token, than any before: not while its
/// stream is captured, which is Error{kInvalidArgument}. What kernels find wrong (expert ids out of
/// range, whose assignments count for nothing; rows beyond a padded layout) is the error of a later
/// call, or of check(), which waits for the last one.

/// route() on GPU `device`, the current one, for callers without a place for what it finds: that is
/// kept for each GPU of the process. @throws Error{kInvalidArgument}: also what an earlier call has
/// found there.
void route_on_gpu(int device, const RouteArgs& args);
/// Waits for `stream` and throws what calls of route_on_gpu() have found on that GPU, once.
void check_routes(int device, void* stream);

/// The plan of a call, in memory that is kept from call to call.
class PlanCalls {
 public:
  virtual ~PlanCalls() = default;
  /// `args` without plan and without execution. The view is valid until the next call.
  virtual PlanView run(PlanArgs args, void* stream) = 0;
  virtual void check() = 0;
};
/// @throws Error{kUnsupported}: built without CUDA.
[[nodiscard]] std::unique_ptr<PlanCalls> make_plan_calls(std::int32_t num_experts);

/// Experts whose weights lie on the GPU, as CudaExpertWeights has them, and are used there.
struct ExpertsOnDevice {
  ExpertConfig config{};
  DType dtype = DType::kBF16;  ///< Of the weights, and of x.
  const void* w13 = nullptr;
  const void* w2 = nullptr;
  const float* b13 = nullptr;  ///< May be null, and then b2 too.
  const float* b2 = nullptr;
};

struct FusedCall {
  ConstRawMatrix x{};                   ///< [T, H]
  Matrix<const std::int32_t> expert{};  ///< [T, K], -1 unused.
  Matrix<const float> weight{};         ///< [T, K]
  RawMatrix y{};                        ///< out [T, H] f32, bf16 or f16.
};

/// Plan, experts and combine in one call; or Soft-MoE over the same experts.
class FusedExperts {
 public:
  virtual ~FusedExperts() = default;
  /// @throws Error{kUnsupported}: sizes that no kernel takes.
  virtual void run(const FusedCall& call, void* stream) = 0;
  /// soft_moe() of `args` without weights and execution. A logit that is not finite is the error of
  /// a later call.
  virtual void mix(SoftMoeArgs args, void* stream) = 0;
  /// Likewise, of a forward with this configuration and so many tokens.
  virtual void mix_backward(const SoftMoeConfig& config, std::int64_t num_tokens,
                            SoftMoeBackwardArgs args, void* stream) = 0;
  virtual void check() = 0;
};
/// @throws Error{kUnsupported}: built without CUDA.
[[nodiscard]] std::unique_ptr<FusedExperts> make_fused_experts(const ExpertsOnDevice& experts);
/// Of weights that load_experts() has placed on the current GPU, all experts of a layer.
[[nodiscard]] std::unique_ptr<FusedExperts> make_fused_experts(
    std::unique_ptr<ExpertWeights> weights);

}  // namespace switchyard

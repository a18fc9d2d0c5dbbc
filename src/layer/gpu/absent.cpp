// In a build without CUDA stages on a GPU are errors by name, not missing symbols.
#include "core/check.hpp"
#include "layer/gpu/stage_calls.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {
namespace {

[[noreturn]] void refuse() {
  fail(ErrorCode::kUnsupported, "stages on a GPU: this library is built without CUDA");
}

}  // namespace

void route_on_gpu(int /*device*/, const RouteArgs& /*args*/) { refuse(); }
void check_routes(int /*device*/, void* /*stream*/) { refuse(); }
std::unique_ptr<PlanCalls> make_plan_calls(std::int32_t /*num_experts*/) { refuse(); }
std::unique_ptr<FusedExperts> make_fused_experts(const ExpertsOnDevice& /*experts*/) { refuse(); }
std::unique_ptr<FusedExperts> make_fused_experts(std::unique_ptr<ExpertWeights> /*weights*/) {
  refuse();
}

std::shared_ptr<LayerScratch> make_layer_scratch() { refuse(); }

std::unique_ptr<ExpertSource> make_device_source(const ExpertConfig& /*config*/, DType /*dtype*/,
                                                 const void* /*w13*/, const void* /*w2*/,
                                                 const float* /*b13*/, const float* /*b2*/) {
  refuse();
}

}  // namespace switchyard

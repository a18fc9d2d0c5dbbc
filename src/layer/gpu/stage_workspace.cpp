// What the stages of a layer share on a GPU, as the largest of what each asks for.

#include <algorithm>

#include "plan/implementations.hpp"
#include "route/implementations.hpp"
#include "switchyard/device.hpp"

namespace switchyard {

std::int64_t stage_workspace_bytes(std::int64_t max_tokens, std::int64_t top_k,
                                   std::int64_t num_experts, std::int64_t hidden) {
  // Stages of one stream follow each other and share the scratch.
  return std::max({router_gemm_workspace_bytes(max_tokens, num_experts, hidden),
                   plan_workspace_bytes(max_tokens, top_k, num_experts),
                   capacity_workspace_bytes(max_tokens, top_k, num_experts)});
}

}  // namespace switchyard

#pragma once

#include "core/gpu/device_buffer.hpp"
#include "switchyard/plan.hpp"

namespace switchyard {

/// A plan of a dense routing that owns device memory; as Plan does on the host.
class DevicePlan {
 public:
  PlanView reserve(std::int64_t num_tokens, std::int64_t top_k, std::int32_t num_experts,
                   std::int64_t rows) {
    view_.num_experts = num_experts;
    view_.expert_begin = expert_begin_.vector<std::int32_t>(std::int64_t{num_experts} + 1);
    view_.expert_rows = expert_rows_.vector<std::int32_t>(num_experts);
    view_.row_token = row_token_.vector<std::int32_t>(rows);
    view_.row_weight = row_weight_.vector<float>(rows);
    view_.token_begin = token_begin_.vector<std::int32_t>(num_tokens + 1);
    view_.token_row = token_row_.vector<std::int32_t>(num_tokens * top_k);
    view_.most_rows = top_k;
    return view_;
  }
  [[nodiscard]] const PlanView& view() const { return view_; }

 private:
  DeviceBuffer expert_begin_, expert_rows_, row_token_, row_weight_, token_begin_, token_row_;
  PlanView view_{};
};

}  // namespace switchyard

#pragma once

#include <bit>
#include <vector>

#include "switchyard/device.hpp"
#include "switchyard/plan.hpp"
#include "testkit/gpu/device_array.hpp"
#include "testkit/random_values.hpp"
#include "testkit/routed.hpp"

namespace switchyard {

inline std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

/// A stream's workspace and status, as a layer owns them.
class StageContext {
 public:
  StageContext(std::int64_t max_tokens, std::int64_t top_k, std::int64_t num_experts,
               std::int64_t hidden)
      : workspace_(index(stage_workspace_bytes(max_tokens, top_k, num_experts, hidden))),
        status_(std::vector<DeviceStatus>(1)) {
    SWITCHYARD_CUDA(cudaMemset(workspace_.data(), 0, index(workspace_.vector().shape[0])));
  }

  [[nodiscard]] Execution execution(cudaStream_t stream = nullptr) const {
    return {.backend = Backend::kCuda,
            .stream = stream,
            .workspace = workspace_.data(),
            .workspace_bytes = workspace_.vector().shape[0],
            .status = status_.data()};
  }
  [[nodiscard]] DeviceStatus status() const { return status_.get()[0]; }

 private:
  DeviceArray<std::byte> workspace_;
  DeviceArray<DeviceStatus> status_;
};

/// The arrays of a plan on the device, of a dense routing or as the host's says.
class PlanOnDevice {
 public:
  PlanOnDevice(std::int64_t num_tokens, std::int64_t top_k, std::int32_t num_experts,
               std::int64_t rows)
      : num_experts_(num_experts),
        most_rows_(top_k),
        expert_begin_(index(num_experts) + 1),
        expert_rows_(index(num_experts)),
        row_token_(index(rows)),
        row_weight_(index(rows)),
        token_begin_(index(num_tokens) + 1),
        token_row_(index(num_tokens * top_k)) {}
  /// A plan of the host.
  explicit PlanOnDevice(const PlanView& host)
      : num_experts_(host.num_experts),
        most_rows_(host.most_rows),
        expert_begin_(values(host.expert_begin)),
        expert_rows_(values(host.expert_rows)),
        row_token_(values(host.row_token)),
        row_weight_(values(host.row_weight)),
        token_begin_(values(host.token_begin)),
        token_row_(values(host.token_row)) {}

  [[nodiscard]] PlanView view() const {
    return {.num_experts = num_experts_,
            .expert_begin = expert_begin_.vector(),
            .expert_rows = expert_rows_.vector(),
            .row_token = row_token_.vector(),
            .row_weight = row_weight_.vector(),
            .token_begin = token_begin_.vector(),
            .token_row = token_row_.vector(),
            .most_rows = most_rows_};
  }

  /// The same for a list of assignments, whose tokens may have any number of rows.
  [[nodiscard]] PlanView view_of_list() const {
    PlanView list = view();
    list.most_rows = 0;
    return list;
  }

  /// The part that plan() defines, in one list: equal for equal plans.
  [[nodiscard]] std::vector<std::int32_t> contents() const {
    std::vector<std::int32_t> all = expert_begin_.get();
    const std::int32_t rows = all.back();
    append(all, expert_rows_.get(), -1);
    append(all, row_token_.get(), rows);
    const std::vector<float> weights = row_weight_.get();
    for (std::int32_t r = 0; r < rows; ++r) {
      all.push_back(std::bit_cast<std::int32_t>(weights[index(r)]));
    }
    const std::vector<std::int32_t> begin = token_begin_.get();
    append(all, begin, -1);
    append(all, token_row_.get(), begin.back());
    return all;
  }

  static void append(std::vector<std::int32_t>& all, const std::vector<std::int32_t>& part,
                     std::int64_t count) {
    all.insert(all.end(), part.begin(), count < 0 ? part.end() : part.begin() + count);
  }

 private:
  template <typename T>
  static std::vector<T> values(const Vector<T>& of) {
    return {of.data, of.data + of.shape[0]};
  }

  std::int32_t num_experts_;
  std::int64_t most_rows_;
  DeviceArray<std::int32_t> expert_begin_, expert_rows_, row_token_;
  DeviceArray<float> row_weight_;
  DeviceArray<std::int32_t> token_begin_, token_row_;
};

/// The same list of a plan on the host.
inline std::vector<std::int32_t> contents(const PlanView& view) {
  std::vector<std::int32_t> all;
  const auto append = [&all](const std::int32_t* values, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) all.push_back(values[i]);
  };
  append(view.expert_begin.data, view.num_experts + 1);
  const std::int32_t rows = all.back();
  append(view.expert_rows.data, view.num_experts);
  append(view.row_token.data, rows);
  for (std::int32_t r = 0; r < rows; ++r) {
    all.push_back(std::bit_cast<std::int32_t>(view.row_weight[r]));
  }
  const std::int64_t num_tokens = view.num_tokens();
  append(view.token_begin.data, num_tokens + 1);
  append(view.token_row.data, view.token_begin[num_tokens]);
  return all;
}

}  // namespace switchyard

// The exchange between GPUs with its plan and its sums: dispatch, a counting sort of what came, and
// after the experts the weighted sums of each row, which then go home. Bound by the wire; the plan
// is bound by latency, the sums by memory.
#include <cuda_runtime_api.h>

#include <algorithm>

#include "comm/device/device_exchange.hpp"
#include "comm/device/setup.hpp"
#include "core/check.hpp"
#include "core/gpu/cuda_memory.hpp"
#include "core/gpu/device_wide.hpp"
#include "core/gpu/stacks.hpp"
#include "interfaces/device_transports.hpp"
#include "plan/gpu/device_plan.hpp"
#include "switchyard/combine.hpp"
#include "switchyard/device.hpp"

namespace switchyard {
namespace {

class Native final : public DeviceNative {
 public:
  Native(Communicator& communicator, const DeviceNativeConfig& config)
      : config_(config),
        exchange_(communicator, config.exchange, in_one_place(config.options)),
        subtree_(exchange_.subtree()) {
    const ExpertParallelConfig& sizes = config_.exchange;
    const int ranks = communicator.size();
    first_expert_ = first_expert_of(sizes.num_experts, ranks, communicator.rank());
    num_local_ = first_expert_of(sizes.num_experts, ranks, communicator.rank() + 1) - first_expert_;
    max_rows_ = layout_of(sizes, in_one_place(config.options), ranks).max_rows;
    rows_.max_assignments = max_rows_ * std::min(sizes.top_k, num_local_);
    rows_.plan = plan_.reserve(max_rows_, sizes.top_k, num_local_, max_rows_ * sizes.top_k);
    workspace_.reserve(stage_workspace_bytes(std::max(max_rows_, sizes.max_tokens), sizes.top_k,
                                             sizes.num_experts, sizes.hidden));
    if (exchange_.makes_lists()) {
      lists_ = {.plan = rows_.plan,
                .assignment_row = assignment_rows_.vector<std::int32_t>(max_rows_ * sizes.top_k)};
    } else if (sums_ = exchange_.place_of_partials(); sums_.data == nullptr) {
      const DType wire = sizes.combine_wire == DType::kF8E4M3 ? DType::kF32 : sizes.combine_wire;
      const std::int64_t groups = sizes.rank_invariant ? subtree_.num_groups : 1;
      sums_ = sums_memory_.matrix(wire, max_rows_ * groups, sizes.hidden);
    }
    if (config_.capacity_factor > 0) {
      (void)capacity_of(config_.capacity_factor, 1, sizes.top_k, sizes.num_experts);
      (void)kept_.matrix<std::uint8_t>(sizes.max_tokens, sizes.top_k);
      (void)counts_.vector<std::int64_t>(2 * std::int64_t{sizes.num_experts});
    }
    rehearse();
    if (exchange_.ranks_on_device() > 1) make_room_for_stacks();
    communicator.barrier("native exchange");
  }

  Rows dispatch(const DispatchArgs& args) override {
    check();
    DispatchArgs sent = args;
    sent.execution = execution_on(args.execution.stream);
    if (config_.capacity_factor > 0 && args.expert.shape[0] > 0) sent.kept = choose_kept(sent);
    rows_.received = exchange_.dispatch(sent, lists_);
    if (num_local_ > 0 && !exchange_.makes_lists()) {
      make_plan(rows_.received.expert, rows_.received.weight, args.execution.stream);
    }
    return rows_;
  }

  void combine(ConstRawMatrix rows, RawMatrix out, void* stream) override {
    check();
    if (exchange_.makes_lists()) {
      exchange_.combine_rows({.partials = rows, .out = out, .execution = execution_on(stream)},
                             lists_);
      return;
    }
    if (num_local_ > 0) reduce(rows, stream);
    exchange_.combine({.partials = sums_, .out = out, .execution = execution_on(stream)});
  }

  void check() override { exchange_.check(); }
  [[nodiscard]] const DeviceExpertParallel& exchange() const override { return exchange_; }

 private:
  static DeviceExchangeOptions in_one_place(DeviceExchangeOptions options) {
    options.one_place = true;
    return options;
  }

  [[nodiscard]] Execution execution_on(void* stream) const {
    Execution execution{.backend = Backend::kCuda, .stream = stream};
    return with_workspace(execution, workspace_);
  }

  /// Runs plan and sums on nothing: a kernel's first launch may wait for the device, on which the
  /// exchange of another rank may wait for this one.
  void rehearse() {
    if (num_local_ == 0 || exchange_.makes_lists()) return;
    const std::int64_t top_k = config_.exchange.top_k;
    DeviceBuffer ids, weights;
    const auto nobody = ids.matrix<std::int32_t>(max_rows_, top_k);
    SWITCHYARD_CUDA(cudaMemset(nobody.data, 0xff, static_cast<std::size_t>(4 * nobody.size())));
    make_plan(nobody, weights.matrix<float>(max_rows_, top_k), nullptr);
    reduce({sums_.data, config_.exchange.dtype, 1, config_.exchange.hidden}, nullptr);
    SWITCHYARD_CUDA(wait_for_device());  // before ids and weights go
  }

  Matrix<const std::uint8_t> choose_kept(const DispatchArgs& args) {
    const ExpertParallelConfig& sizes = config_.exchange;
    const std::int64_t tokens = args.expert.shape[0];
    const std::int64_t experts = sizes.num_experts;
    const Matrix<std::uint8_t> kept = kept_.matrix<std::uint8_t>(tokens, sizes.top_k);
    auto* const counts = reinterpret_cast<std::int64_t*>(counts_.data());
    apply_capacity({.assignments = DenseAssignments{.expert = args.expert, .weight = args.weight},
                    .num_experts = sizes.num_experts,
                    .capacity = capacity_of(config_.capacity_factor, tokens, sizes.top_k, experts),
                    .policy = config_.drop_policy,
                    .kept = flat(kept),
                    .counts = {counts, {experts}},
                    .counts_kept = {counts + experts, {experts}},
                    .execution = args.execution});
    return kept;
  }

  void make_plan(Matrix<const std::int32_t> expert, Matrix<const float> weight, void* stream) {
    plan({.assignments = DenseAssignments{.expert = expert, .weight = weight},
          .first_expert = first_expert_,
          .plan = rows_.plan,
          .execution = execution_on(stream)});
  }

  void reduce(ConstRawMatrix rows, void* stream) {
    switchyard::combine({.rows = rows,
                         .plan = rows_.plan,
                         .first_expert = first_expert_,
                         .reduced = {.sums = sums_,
                                     .subtree = subtree_,
                                     .each_group = config_.exchange.rank_invariant},
                         .execution = execution_on(stream)});
  }

  const DeviceNativeConfig config_;
  DevicePlan plan_;
  DeviceBuffer workspace_, sums_memory_, assignment_rows_, kept_, counts_;
  DeviceExchange exchange_;  ///< Ends first: all ranks' kernels have left then.
  const Subtree subtree_;
  std::int32_t first_expert_ = 0;
  std::int32_t num_local_ = 0;
  std::int64_t max_rows_ = 0;  ///< N max.
  RawMatrix sums_{};
  DeviceExpertLists lists_;  ///< Where the exchange makes them and sums by them.
  Rows rows_;
};

}  // namespace

std::unique_ptr<DeviceNative> make_device_native(Communicator& communicator,
                                                 const DeviceNativeConfig& config) {
  return std::make_unique<Native>(communicator, config);
}

}  // namespace switchyard

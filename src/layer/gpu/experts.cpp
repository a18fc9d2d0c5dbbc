// Plan, pack, experts and combine of the experts of one rank.
#include "layer/gpu/experts.hpp"

#include "core/check.hpp"
#include "core/gpu/cuda_memory.hpp"
#include "core/gpu/device_wide.hpp"
#include "experts/gpu/in_place.hpp"
#include "experts/gpu/workspace.hpp"
#include "layer/compute_check.hpp"
#include "switchyard/device.hpp"

namespace switchyard {

std::unique_ptr<ExpertWeights> load_device_experts(const ExpertSource& source,
                                                   const ExpertConfig& config, std::int32_t first,
                                                   std::int32_t count, DType compute,
                                                   const LayerOptions& options,
                                                   const Execution& execution) {
  if (const auto* const device = dynamic_cast<const DeviceSource*>(&source)) {
    require(compute == device->dtype(), "weights of {} on the GPU, compute type {}: want the same",
            to_string(device->dtype()), to_string(compute));
    require(count == device->num_experts(),
            "weights on the GPU are those of {} experts, and this rank has {}: over ranks each "
            "gives its own",
            device->num_experts(), count);
    require(options.weights == WeightFormat::kExact, "weights on the GPU are exact, want {}",
            to_string(options.weights));
    return device->in_place(config, first);
  }
  return load_experts({.config = config,
                       .source = &source,
                       .dtype = compute,
                       .first_expert = first,
                       .num_local = count,
                       .format = options.weights,
                       .execution = execution,
                       .progress = options.progress});
}

CudaExperts::CudaExperts(const LayerModel& model, const LayerOptions& options,
                         const CudaRouter& router, DType compute, const Execution& execution,
                         CudaScratch& scratch, int rank, int num_ranks)
    : options_(options),
      router_(router),
      config_(model.config.experts),
      top_k_(model.config.router.top_k()),
      compute_(compute),
      num_ranks_(num_ranks),
      subtree_(
          subtree_of_rank({config_.num_experts, model.config.reduction_groups}, rank, num_ranks)),
      first_expert_(first_expert_of(config_.num_experts, num_ranks, rank)),
      num_local_(first_expert_of(config_.num_experts, num_ranks, rank + 1) - first_expert_),
      weights_(load_device_experts(*model.experts, config_, first_expert_, num_local_, compute,
                                   options, execution)),
      scratch_(scratch) {}

void CudaExperts::reserve(std::int64_t num_tokens) {
  const std::int64_t rows = layout_rows(num_tokens);
  (void)plan_.reserve(most_received(num_tokens), top_k_, num_local_, rows);
  scratch_.workspace.reserve(experts_workspace_bytes(rows, weights()));
  scratch_.runner.reserve(options_.layout, compute_, rows, config_.hidden);
}

std::int64_t CudaExperts::most_received(std::int64_t num_tokens) const {
  return num_ranks_ == 1 ? num_tokens : num_ranks_ * options_.max_tokens;
}

/// Rows an expert of the padded layout has for a call of so many tokens.
std::int64_t CudaExperts::padded_rows(std::int64_t num_tokens) const {
  if (options_.layout.kind != LayoutKind::kPadded) return 0;
  const std::int64_t capacity =
      num_ranks_ *
      router_.capacity_for(num_ranks_ == 1 ? num_tokens : options_.max_tokens).computing;
  // Without a limit the host does not know the fullest expert: room for all of them.
  return capacity > 0 ? capacity : most_received(num_tokens) * top_k_;
}

std::int64_t CudaExperts::layout_rows(std::int64_t num_tokens) const {
  return max_rows(options_.layout, most_received(num_tokens), top_k_, num_local_,
                  padded_rows(num_tokens));
}

PlanArgs CudaExperts::plan_args(const RowAssignments& work, std::int64_t num_tokens,
                                const Execution& execution) {
  return {.assignments = DenseAssignments{.expert = work.expert, .weight = work.weight},
          .kept = flat(work.kept),
          .first_expert = first_expert_,
          .total_experts = work.total_experts,
          .layout = options_.layout,
          .padded_rows = padded_rows(num_tokens),
          .plan = plan_.reserve(work.expert.shape[0], top_k_, num_local_, layout_rows(num_tokens)),
          .execution = execution};
}

ExpertsArgs CudaExperts::experts_args(const RowsForExperts& rows, const ReducedRows& reduced,
                                      const Execution& execution) {
  return {.x = rows.x,
          .x_scale = rows.scale,
          .plan = plan_.view(),
          .layout = options_.layout,
          .weights = &weights(),
          .reduced = reduced,
          .execution = with_workspace(execution, scratch_.workspace)};
}

void CudaExperts::make_plan(const RowAssignments& work, std::int64_t num_tokens,
                            const Execution& execution) {
  const ScopedStage stage(execution, "plan",
                          {.bytes = 21 * static_cast<double>(work.expert.size())});
  switchyard::plan(plan_args(work, num_tokens, execution));
}

bool CudaExperts::plan_and_reduce(const RowAssignments& work, std::int64_t num_tokens,
                                  ConstRawMatrix x, ReducedRows reduced, const PlanReport& report,
                                  bool stages_apart, const Execution& execution) {
  reduced.subtree = subtree_;
  const PlanArgs plan = plan_args(work, num_tokens, execution);
  const ExpertsArgs experts = experts_args({.x = x}, reduced, execution);
  const PlannedExpertsArgs planned{plan, experts, report, execution};
  const auto* const at_once = find_planned_experts(planned);
  if (at_once == nullptr) return false;
  if (stages_apart) {
    if (is_verbose()) {
      print_choice("plan+experts", "this call", "one after the other",
                   fmt::format("{}: a recorder wants the time of each", at_once->name));
    }
    return false;
  }
  at_once->run(planned);
  return true;
}

bool CudaExperts::computes_fp8() const { return switchyard::computes_fp8(options_); }

bool CudaExperts::takes_fp8(const RowAssignments& work, std::int64_t num_tokens, ConstRawMatrix x,
                            ReducedRows reduced, const Execution& execution) {
  if (!computes_fp8() || num_local_ == 0) return false;
  if (options_.layout.kind != LayoutKind::kCompact) return true;
  (void)plan_args(work, num_tokens, execution);
  reduced.subtree = subtree_;
  return !experts_supported(
      experts_args({.x = {x.data, compute_, x.rows, x.cols}}, reduced, execution));
}

void CudaExperts::reduce(const RowsForExperts& rows, ReducedRows reduced,
                         const Execution& execution, RawMatrix preactivation) {
  reduced.subtree = subtree_;
  ExpertsArgs args = experts_args(rows, reduced, execution);
  args.preactivation = preactivation;
  scratch_.runner.run(args, execution);
}

std::int64_t CudaExperts::backward_workspace_bytes(std::int64_t num_tokens,
                                                   bool has_dpreactivation) const {
  return experts_backward_workspace_bytes(
      config_, compute_, num_local_, layout_rows(num_tokens),
      {.dpreactivation = has_dpreactivation, .weighted_activation = true});
}

bool CudaExperts::preactivation_has(std::int64_t bytes_per_token) const {
  // Of the padded layout a capacity may leave fewer rows than choices.
  return options_.layout.kind != LayoutKind::kPadded &&
         top_k_ * preactivation_cols() * size_of(compute_) >= bytes_per_token;
}

RawMatrix CudaExperts::lend_inner(std::int64_t num_tokens) {
  const std::int64_t rows = layout_rows(num_tokens);
  scratch_.workspace.reserve(experts_workspace_bytes(rows, weights()));
  return {scratch_.inner_rows(), compute_, rows, config_.inner};
}

RawMatrix CudaExperts::lend_rows(std::int64_t num_tokens) {
  return scratch_.runner.rows().matrix(compute_, layout_rows(num_tokens), config_.hidden);
}

void CudaExperts::reload(const ExpertSource& source, const Execution& execution) {
  drop();  // never two copies
  weights_ = load_device_experts(source, config_, first_expert_, num_local_, compute_, options_,
                                 execution);
}

const ExpertWeights& CudaExperts::weights() const {
  require(weights_ != nullptr, "the experts could not be reloaded; the layer has none");
  return *weights_;
}

bool CudaExperts::offer_lists(const Execution& execution) {
  if (options_.layout.kind != LayoutKind::kCompact) return false;
  const std::int64_t received = most_received(options_.max_tokens);
  const ReducedRows sums{
      .sums = {scratch_.runner.rows().data(), DType::kF32, received, config_.hidden},
      .subtree = subtree_};
  const ConstRawMatrix x{scratch_.runner.rows().data(), compute_, received, config_.hidden};
  if (num_local_ > 0 && experts_supported(experts_args({.x = x}, sums, execution))) return false;
  lists_ = {.plan = plan_.view(),
            .assignment_row = assignment_rows_.vector<std::int32_t>(received * top_k_)};
  return true;
}

ConstRawMatrix CudaExperts::rows_by_lists(const RowsForExperts& rows, const Execution& execution) {
  ExpertsArgs args = experts_args(rows, {}, execution);
  args.rows = scratch_.runner.rows().matrix(compute_, args.plan.row_token.shape[0], config_.hidden);
  if (num_local_ > 0) experts(args);
  return args.rows;
}

void CudaExperts::rehearse(const RawMatrix& sums, bool each_group, const Execution& execution,
                           RawMatrix preactivation) {
  if (num_local_ == 0) return;
  const std::int64_t received = most_received(options_.max_tokens);
  DeviceBuffer ids, weights;
  const Matrix<std::int32_t> nobody = ids.matrix<std::int32_t>(received, top_k_);
  SWITCHYARD_CUDA(
      cudaMemset(nobody.data, 0xff, static_cast<std::size_t>(4 * nobody.size())));  // -1
  make_plan({.expert = nobody, .weight = weights.matrix<float>(received, top_k_)},
            options_.max_tokens, execution);
  const ReducedRows reduced{.sums = sums, .each_group = each_group};
  const ConstRawMatrix x{scratch_.runner.rows().data(), compute_, received, config_.hidden};
  reduce({.x = x}, reduced, execution, preactivation);
  if (computes_fp8()) {
    const std::int64_t scales = (config_.hidden + kE4M3Block - 1) / kE4M3Block;
    reduce({.x = {x.data, DType::kF8E4M3, received, config_.hidden},
            .scale = {reinterpret_cast<const float*>(x.data), {received, scales}}},
           reduced, execution);
  }
  SWITCHYARD_CUDA(wait_for_device());  // before ids and weights go
}

}  // namespace switchyard

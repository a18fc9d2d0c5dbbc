// The experts on a GPU for few rows, with the combine inside: a kernel or two that stream the
// weights of the hit experts. Bound by the memory the weights come from.

#include <algorithm>
#include <array>

#include "core/gpu/cuda_device.hpp"
#include "experts/gpu/planned_experts.hpp"
#include "experts/gpu/streaming/streaming.hpp"
#include "experts/gpu/weights.hpp"
#include "experts/gpu/workspace.hpp"
#include "experts/implementations.hpp"
#include "plan/gpu/few.hpp"
#include "switchyard/device.hpp"

namespace switchyard {
namespace {

StreamingParams params_of(const ExpertsArgs& args) {
  const auto& weights = static_cast<const CudaExpertWeights&>(*args.weights);
  const ExpertConfig& config = weights.config();
  StreamingParams params;
  params.x = args.x.data;
  params.x_is_packed = args.x_is_packed;
  params.w13 = weights.w13();
  params.b13 = weights.b13();
  params.w2 = weights.w2();
  params.b2 = weights.b2();
  params.format = weights.format();
  params.scales_fold = weights.scales_fold();
  params.scales13 = weights.scales13();
  params.scales2 = weights.scales2();
  params.weight_maps = &weights.maps();
  auto* const workspace = static_cast<std::byte*>(args.execution.workspace);
  params.act = workspace + kActAt;
  params.sync = reinterpret_cast<StreamingSync*>(workspace + kStreamingSyncAt);
  params.expert_begin = args.plan.expert_begin.data;
  params.expert_rows = args.plan.expert_rows.data;
  params.row_token = args.plan.row_token.data;
  params.row_weight = args.plan.row_weight.data;
  params.token_begin = args.plan.token_begin.data;
  params.token_row = args.plan.token_row.data;
  params.sums = args.reduced.sums.data;
  params.sums_dtype = args.reduced.sums.dtype;
  params.subtree = args.reduced.subtree;
  params.each_group = args.reduced.each_group;
  params.first_expert = weights.first_expert();
  params.num_experts = weights.num_local();
  params.total_experts = config.num_experts;
  params.num_tokens = args.plan.num_tokens();
  params.max_rows = args.plan.row_token.shape[0];
  params.max_assignments = args.plan.token_row.shape[0];
  params.hidden = config.hidden;
  params.inner = config.inner;
  params.dtype = weights.dtype();
  params.gated = config.gated;
  params.activation = config.activation;
  params.alpha = config.alpha;
  params.limit = config.limit;
  params.batch_invariant = args.execution.batch_invariant;
  return params;
}

/// choose_streaming(), which reject and run ask alike, once: the layers of a model have the same
/// few problems, and the host's time counts where a layer takes 30 us.
const StreamingShape& shape_for(const StreamingProblem& problem, const StreamingChip& chip) {
  struct Choice {
    StreamingProblem problem{};
    StreamingChip chip{};
    StreamingShape shape{};
  };
  thread_local std::array<Choice, 8> kept{};
  thread_local std::size_t next = 0;
  for (const Choice& choice : kept) {
    if (choice.problem == problem && choice.chip == chip) return choice.shape;
  }
  Choice& choice = kept[next];
  next = (next + 1) % kept.size();
  choice = {.problem = problem, .chip = chip, .shape = choose_streaming(problem, chip)};
  return choice.shape;
}

std::optional<std::string> reject(const ExpertsArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  if (args.reduced.sums.cols == 0) return "combines, it does not write rows";
  if (args.preactivation.data != nullptr) return "keeps no pre-activation";
  const bool is_f32 = args.weights->dtype() == DType::kF32;
  // The grouped GEMM takes many rows: which of the two must not hang on the batch.
  if (args.execution.batch_invariant) return "not for batch_invariant";
  const WeightFormat format = args.weights->format();
  if (format == WeightFormat::kInt4 || format == WeightFormat::kNvfp4) {
    return "streams exact weights, e4m3 and MXFP4";
  }
  const StreamingParams params = params_of(args);
  const std::int64_t multiple = is_f32 ? 4 : 8;
  if (params.hidden % multiple != 0 || params.inner % multiple != 0) {
    return is_f32 ? "hidden and inner must be multiples of 4"
                  : "hidden and inner must be multiples of 8";
  }
  if (params.num_experts < 1 || params.num_experts > 1024) {
    return "not between 1 and 1024 experts on one GPU";
  }
  if (params.subtree.num_groups > 32) return "more than 32 groups on one GPU";
  if (!is_aligned_16(params.x) || !is_aligned_16(args.execution.workspace)) {
    return "x or the workspace are not aligned to 16 bytes";
  }
  const StreamingChip chip = streaming_chip();
  if (params.format != WeightFormat::kExact && !chip.hopper) {
    return "stored weights are streamed by compute capability 9.0";
  }
  if (!worth_streaming(params, chip)) return "more rows than are worth streaming";
  if (!shape_for(params.problem(), chip).fits) return "the rows do not fit shared memory";
  return std::nullopt;
}

void run_with(const ExpertsArgs& args, const StreamingParams& params) {
  const std::int64_t needed = experts_workspace_bytes(params.max_rows, params.inner, params.dtype);
  require(args.execution.workspace != nullptr && args.execution.workspace_bytes >= needed,
          "the experts' workspace has {} bytes, {} rows need {}", args.execution.workspace_bytes,
          params.max_rows, needed);
  // Bytes and operations at most: the counts themselves are on the device.
  const double matrices = params.gated ? 3 : 2;
  const double of_expert = args.weights->bytes_per_expert();
  const auto matrix = static_cast<double>(params.hidden * params.inner);
  const auto rows = static_cast<double>(params.max_assignments);
  const double flops = 2 * matrices * matrix * rows;
  const StageWork work{.bytes = std::min<double>(params.num_experts, rows) * of_expert,
                       .flops = flops,
                       .flops_executed = flops,
                       .most_rows = params.max_assignments,
                       .flops_per_row = 2 * matrices * matrix};
  // One name for both kernels: events between them would end their overlap.
  const ScopedStage stage(args.execution, "gemm1+activation+gemm2+combine", work);
  launch_streaming(params, shape_for(params.problem(), streaming_chip()),
                   static_cast<cudaStream_t>(args.execution.stream));
}

std::string kernels_of(const ExpertsArgs& args) {
  return shape_for(params_of(args).problem(), streaming_chip()).whole ? "one kernel"
                                                                      : "two kernels";
}

void run(const ExpertsArgs& args) {
  const StreamingParams params = params_of(args);
  if (params.num_tokens > 0) run_with(args, params);
}

std::optional<std::string> reject_planned(const PlannedExpertsArgs& args) {
  // Of more tokens nothing is gained by the report: a kernel for it takes a share that is too
  // small.
  const auto* dense = std::get_if<DenseAssignments>(&args.plan.assignments);
  if (dense == nullptr) return "takes a dense routing, not a list of assignments";
  if (!planning::are_few(dense->expert.shape[0], dense->expert.shape[1],
                         args.plan.layout.kind == LayoutKind::kCompact)) {
    return "only for 1 to 64 assignments in the compact layout";
  }
  return reject(args.experts);
}

void run_planned(const PlannedExpertsArgs& args) {
  const PlanArgs& plan = args.plan;
  const planning::PlanParams few = planning::params_without_memory(plan);
  StreamingParams params = params_of(args.experts);
  params.plan = &few;
  params.report = args.report;
  params.status = plan.execution.status;
  if (!shape_for(params.problem(), streaming_chip()).whole) {
    // Two kernels do not make it: that took longer than a kernel for it.
    params.plan = nullptr;
    const ScopedStage stage(plan.execution, "plan",
                            {.bytes = 21 * static_cast<double>(num_assignments(plan.assignments))});
    switchyard::plan(plan);
  }
  run_with(args.experts, params);
}

std::string planned_kernels_of(const PlannedExpertsArgs& args) {
  StreamingParams params = params_of(args.experts);
  const planning::PlanParams few = planning::params_without_memory(args.plan);
  params.plan = &few;
  return shape_for(params.problem(), streaming_chip()).whole ? "one kernel"
                                                             : "a plan, then two kernels";
}

constexpr Implementation<PlannedExpertsArgs> kPlannedStreaming{"cuda.streaming", reject_planned,
                                                               run_planned, planned_kernels_of};
constexpr const Implementation<PlannedExpertsArgs>* kPlanned[] = {&kPlannedStreaming};

std::string sizes_of(const PlannedExpertsArgs& args) {
  return fmt::format("{} assignments of {} tokens, {} experts",
                     num_assignments(args.plan.assignments), num_tokens(args.plan.assignments),
                     args.plan.plan.num_experts);
}

}  // namespace

const Implementation<PlannedExpertsArgs>* find_planned_experts(const PlannedExpertsArgs& args) {
  return find<PlannedExpertsArgs>("plan+experts", kPlanned, args, sizes_of);
}

const Implementation<ExpertsArgs> kExpertsCudaStreaming{"cuda.streaming", reject, run, kernels_of};

}  // namespace switchyard

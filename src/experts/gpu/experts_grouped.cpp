// The experts on a GPU for many rows: two grouped products with the intermediate rows in the
// workspace. Bound by the tensor cores; which expert has how many rows stays on the device.
// Weights that are stored as codes become numbers, some experts at a time, in the workspace.

#include <algorithm>

#include "core/gpu/cuda_device.hpp"
#include "experts/gpu/coded/expanded.hpp"
#include "experts/gpu/grouped/gemm.hpp"
#include "experts/gpu/row_products.hpp"
#include "experts/gpu/weights.hpp"
#include "experts/gpu/workspace.hpp"
#include "experts/implementations.hpp"
#include "switchyard/device.hpp"

namespace switchyard {
namespace {

/// What all grouped GEMMs ask for alike.
std::optional<std::string> reject(const ExpertsArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  const ExpertConfig& config = args.weights->config();
  const std::int64_t multiple = 16 / size_of(args.weights->dtype());
  if (config.hidden % multiple != 0 || config.inner % multiple != 0) {
    return "hidden and inner must be multiples of 16 bytes";
  }
  if (args.x.dtype != args.weights->dtype()) return "x must have the weights' type";
  if (args.weights->num_local() > 1024) return "more than 1024 experts on one GPU";
  if (args.rows.cols == 0) return "writes rows, it does not combine them";
  if (args.rows.dtype != args.weights->dtype()) return "rows must have the weights' type";
  if (!is_aligned_16(args.x.data) || !is_aligned_16(args.rows.data) ||
      !is_aligned_16(args.preactivation.data) || !is_aligned_16(args.execution.workspace)) {
    return "x, rows, the pre-activation or the workspace are not aligned to 16 bytes";
  }
  return std::nullopt;
}

enum class Products : std::uint8_t { k16Bit, kF32 };

template <GroupedPath kPath, Products kProducts>
std::optional<std::string> reject(const ExpertsArgs& args) {
  if (auto reason = reject(args)) return reason;
  if (args.weights->format() != WeightFormat::kExact) return "takes exact weights";
  const bool is_f32 = args.weights->dtype() == DType::kF32;
  if (is_f32 != (kProducts == Products::kF32)) return is_f32 ? "not for f32" : "for f32 only";
  const int major = device_attribute(cudaDevAttrComputeCapabilityMajor);
  if (kPath == GroupedPath::kSm90 && major != 9) return "needs sm_90";
  if (major < 8) return "needs sm_80 or later";
  if (kPath == GroupedPath::kSm80 && !is_f32 && !has_room_for_sm80()) {
    return "needs 146 KB of shared memory a block";
  }
  return std::nullopt;
}

StageWork work(const ExpertsArgs& args, double matrices, double row_bytes) {
  const ExpertConfig& config = args.weights->config();
  const std::int64_t matrix_bytes = config.hidden * config.inner * size_of(args.weights->dtype());
  return work_of_rows(args, matrices, matrices * static_cast<double>(matrix_bytes), row_bytes);
}

GroupedGemmParams params_of(const ExpertsArgs& args, std::int64_t needed, GroupedPath path) {
  const auto& weights = static_cast<const CudaExpertWeights&>(*args.weights);
  const ExpertConfig& config = weights.config();
  const std::int64_t max_rows = args.rows.rows;
  require_room(args, needed);
  auto* workspace = static_cast<std::byte*>(args.execution.workspace);
  return {.x = args.x.data,
          .row_token = args.x_is_packed ? nullptr : args.plan.row_token.data,
          .w13 = weights.w13(),
          .b13 = weights.b13(),
          .act = workspace + kActAt,
          .preactivation = args.preactivation.data,
          .w2 = weights.w2(),
          .b2 = weights.b2(),
          .weight_maps = &weights.maps(),
          .y = args.rows.data,
          .expert_begin = args.plan.expert_begin.data,
          .expert_rows = args.plan.expert_rows.data,
          .workspace = workspace,
          .num_experts = weights.num_local(),
          .max_rows = max_rows,
          .num_tokens = args.x.rows,
          .hidden = config.hidden,
          .inner = config.inner,
          .dtype = weights.dtype(),
          .gated = config.gated,
          .activation = config.activation,
          .alpha = config.alpha,
          .limit = config.limit,
          .path = path};
}

double row_bytes_of(const ExpertsArgs& args) {
  const ExpertConfig& config = args.weights->config();
  return static_cast<double>((config.hidden + config.inner) * size_of(args.weights->dtype()));
}

std::string tile_name(const GroupedGemmParams& params) {
  return tile_of(params) == TileShape::kPingPong ? "tiles of 128 x 192 in turn"
                                                 : "tiles of 128 x 256";
}

/// What the choice of a tile depends on.
GroupedGemmParams sizes_of(const ExpertsArgs& args) {
  const ExpertConfig& config = args.weights->config();
  return {.preactivation = args.preactivation.data,
          .num_experts = args.weights->num_local(),
          .max_rows = args.rows.rows,
          .hidden = config.hidden,
          .inner = config.inner,
          .gated = config.gated};
}

bool has_nothing(const ExpertsArgs& args) {
  return args.rows.rows == 0 || args.weights->num_local() == 0;
}

std::string tile_name(const ExpertsArgs& args) {
  return has_nothing(args) ? "nothing to do" : tile_name(sizes_of(args));
}

template <GroupedPath kPath>
void run(const ExpertsArgs& args) {
  if (has_nothing(args)) return;
  const GroupedGemmParams params = params_of(
      args,
      experts_workspace_bytes(args.rows.rows, args.weights->config().inner, args.weights->dtype()),
      kPath);
  const auto stream = static_cast<cudaStream_t>(args.execution.stream);
  {
    const ScopedStage stage(args.execution, "gemm1+activation",
                            work(args, params.gated ? 2 : 1, row_bytes_of(args)));
    launch_gate_up(params, stream);
  }
  const ScopedStage stage(args.execution, "gemm2", work(args, 1, row_bytes_of(args)));
  launch_down(params, stream);
}

std::optional<std::string> reject_expanded(const ExpertsArgs& args) {
  if (auto reason = reject(args)) return reason;
  if (args.weights->format() == WeightFormat::kExact) return "takes stored weights";
  if (args.preactivation.data != nullptr) return "keeps no pre-activation";
  if (device_attribute(cudaDevAttrComputeCapabilityMajor) < 8) return "needs sm_80 or later";
  return std::nullopt;
}

/// Weights of an expert as numbers, and experts that become numbers at a time.
std::int64_t expanded_expert_bytes(const CudaExpertWeights& weights) {
  const ExpertConfig& config = weights.config();
  return coded::expanded_expert_bytes(config.hidden, config.inner, config.gated);
}
std::int32_t expanded_experts(const CudaExpertWeights& weights) {
  const ExpertConfig& config = weights.config();
  return coded::expanded_experts(config.hidden, config.inner, config.gated, weights.num_local());
}

std::int64_t expanded_at(std::int64_t max_rows, const CudaExpertWeights& weights) {
  const std::int64_t end =
      experts_workspace_bytes(max_rows, weights.config().inner, weights.dtype());
  return (end + 255) / 256 * 256;
}

void run_expanded(const ExpertsArgs& args) {
  if (has_nothing(args)) return;
  const auto& weights = static_cast<const CudaExpertWeights&>(*args.weights);
  const GroupedGemmParams params =
      params_of(args, experts_workspace_bytes(args.rows.rows, weights), GroupedPath::kBest);
  std::byte* const to =
      static_cast<std::byte*>(args.execution.workspace) + expanded_at(args.rows.rows, weights);
  // The numbers of the experts hit are written and read again.
  StageWork all = work(args, params.gated ? 3 : 2, 2 * row_bytes_of(args));
  all.bytes += std::min<double>(weights.num_local(), static_cast<double>(args.rows.rows)) *
               (weights.bytes_per_expert() + static_cast<double>(expanded_expert_bytes(weights)));
  const ScopedStage stage(args.execution, "expand+gemm1+activation+gemm2", all);
  coded::launch_expanded({.format = weights.format(),
                          .int4 = weights.int4_form(),
                          .w13 = weights.w13(),
                          .scales13 = weights.scales13(),
                          .w2 = weights.w2(),
                          .scales2 = weights.scales2()},
                         params, to, static_cast<cudaStream_t>(args.execution.stream));
}

/// Of the experts that become numbers at a time.
std::string expanded_tile_name(const ExpertsArgs& args) {
  if (has_nothing(args)) return "nothing to do";
  if (device_attribute(cudaDevAttrComputeCapabilityMajor) != 9) return "as cuda.grouped_sm80";
  GroupedGemmParams params = sizes_of(args);
  const std::int32_t at_once =
      expanded_experts(static_cast<const CudaExpertWeights&>(*args.weights));
  params.expected_rows = coded::expected_rows(params.max_rows, at_once, params.num_experts);
  params.num_experts = at_once;
  return fmt::format("{} experts at a time, {}", at_once, tile_name(params));
}

}  // namespace

std::int64_t experts_workspace_bytes(std::int64_t max_rows, std::int64_t inner, DType dtype) {
  return kActAt + max_rows * inner * size_of(dtype);
}

std::int64_t experts_workspace_bytes(std::int64_t max_rows, const ExpertWeights& weights) {
  const auto& on_gpu = static_cast<const CudaExpertWeights&>(weights);
  if (weights.format() == WeightFormat::kExact) {
    return experts_workspace_bytes(max_rows, weights.config().inner, weights.dtype());
  }
  // Where numbers are not wanted, scales of rows may be.
  const std::int64_t numbers = expanded_experts(on_gpu) * expanded_expert_bytes(on_gpu);
  return expanded_at(max_rows, on_gpu) + std::max(numbers, 4 * max_rows);
}

const Implementation<ExpertsArgs> kExpertsCudaExpanded{"cuda.expanded", reject_expanded,
                                                       run_expanded, expanded_tile_name};
const Implementation<ExpertsArgs> kExpertsCudaGroupedSm90{
    "cuda.grouped_sm90", reject<GroupedPath::kSm90, Products::k16Bit>, run<GroupedPath::kSm90>,
    tile_name};
const Implementation<ExpertsArgs> kExpertsCudaGroupedSm80{
    "cuda.grouped_sm80", reject<GroupedPath::kSm80, Products::k16Bit>, run<GroupedPath::kSm80>};
const Implementation<ExpertsArgs> kExpertsCudaGroupedSm80Flat{
    "cuda.grouped_sm80_flat", reject<GroupedPath::kSm80Flat, Products::k16Bit>,
    run<GroupedPath::kSm80Flat>};
const Implementation<ExpertsArgs> kExpertsCudaGroupedF32Sm90{
    "cuda.grouped_f32_sm90", reject<GroupedPath::kSm90, Products::kF32>, run<GroupedPath::kSm90>};
const Implementation<ExpertsArgs> kExpertsCudaGroupedF32{
    "cuda.grouped_f32", reject<GroupedPath::kSm80, Products::kF32>, run<GroupedPath::kSm80>};

}  // namespace switchyard

// The experts on Hopper for many rows of e4m3, with weights that are stored so: two grouped
// products in 8 bits, with the intermediate rows and their scales in the workspace.

#include <algorithm>

#include "core/gpu/cuda_device.hpp"
#include "experts/gpu/grouped/fp8/product.hpp"
#include "experts/gpu/weights.hpp"
#include "experts/gpu/workspace.hpp"
#include "experts/implementations.hpp"
#include "switchyard/device.hpp"

namespace switchyard {
namespace {

constexpr std::int64_t kScaleBlock = 128;

std::int64_t scales_at(std::int64_t max_rows, std::int64_t inner) {
  return kActAt + (max_rows * inner + 255) / 256 * 256;
}

std::optional<std::string> reject(const ExpertsArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  if (args.x.dtype != DType::kF8E4M3) return "takes rows of e4m3";
  const ExpertWeights& weights = *args.weights;
  if (weights.format() != WeightFormat::kE4M3) return "takes weights stored as e4m3";
  if (!weights.config().gated) return "takes gated experts";
  if (weights.config().hidden % 16 != 0 || weights.config().inner % 16 != 0) {
    return "hidden and inner must be multiples of 16";
  }
  if (weights.num_local() > 1024) return "more than 1024 experts on one GPU";
  if (args.rows.cols == 0) return "writes rows, it does not combine them";
  if (args.rows.dtype != DType::kBF16) return "rows must be bf16";
  if (args.preactivation.data != nullptr) return "keeps no pre-activation";
  if (!is_aligned_16(args.x.data) || !is_aligned_16(args.rows.data) ||
      !is_aligned_16(args.execution.workspace)) {
    return "x, rows or the workspace are not aligned to 16 bytes";
  }
  if (device_attribute(cudaDevAttrComputeCapabilityMajor) != 9) return "needs sm_90";
  return std::nullopt;
}

/// Bytes and operations at most: the counts themselves are on the device.
StageWork work(const ExpertsArgs& args, double matrices, double row_bytes) {
  const ExpertConfig& config = args.weights->config();
  const auto rows = static_cast<double>(args.rows.rows);
  const auto matrix = static_cast<double>(config.hidden * config.inner);
  const double flops = 2 * matrices * matrix * rows;
  const double experts = std::min<double>(args.weights->num_local(), rows);
  return {.bytes = experts * matrices * matrix + rows * row_bytes,
          .flops = flops,
          .flops_executed = flops,
          .most_rows = args.rows.rows,
          .bytes_per_row = row_bytes,
          .flops_per_row = 2 * matrices * matrix};
}

void run(const ExpertsArgs& args) {
  const auto& weights = static_cast<const CudaExpertWeights&>(*args.weights);
  const std::int64_t max_rows = args.rows.rows;
  if (max_rows == 0 || weights.num_local() == 0) return;
  const ExpertConfig& config = weights.config();
  const std::int64_t blocks = (config.inner + kScaleBlock - 1) / kScaleBlock;
  const std::int64_t needed = scales_at(max_rows, config.inner) + 4 * max_rows * blocks;
  require(args.execution.workspace != nullptr && args.execution.workspace_bytes >= needed,
          "the experts' workspace has {} bytes, {} rows of e4m3 need {}",
          args.execution.workspace_bytes, max_rows, needed);
  require(args.x_is_packed || args.plan.row_token.shape[0] >= max_rows,
          "row_token has {} entries, want one for each of {} rows", args.plan.row_token.shape[0],
          max_rows);
  auto* const workspace = static_cast<std::byte*>(args.execution.workspace);
  const Fp8GroupedParams params{
      .x = {args.x.data, args.x_scale.data},
      .row_token = args.x_is_packed ? nullptr : args.plan.row_token.data,
      .w13 = weights.w13(),
      .scales13 = weights.scales13(),
      .b13 = weights.b13(),
      .act = workspace + kActAt,
      .act_scales = reinterpret_cast<float*>(workspace + scales_at(max_rows, config.inner)),
      .w2 = weights.w2(),
      .scales2 = weights.scales2(),
      .b2 = weights.b2(),
      .y = args.rows.data,
      .weight_maps = &weights.maps(),
      .expert_begin = args.plan.expert_begin.data,
      .expert_rows = args.plan.expert_rows.data,
      .counters = reinterpret_cast<std::int32_t*>(workspace),
      .num_experts = weights.num_local(),
      .max_rows = max_rows,
      .num_tokens = args.x.rows,
      .hidden = config.hidden,
      .inner = config.inner,
      .activation = config.activation,
      .alpha = config.alpha,
      .limit = config.limit};
  const auto stream = static_cast<cudaStream_t>(args.execution.stream);
  const auto row_bytes = static_cast<double>(config.hidden + config.inner);
  {
    const ScopedStage stage(args.execution, "gemm1+activation", work(args, 2, row_bytes));
    launch_fp8_gate_up(params, stream);
  }
  const ScopedStage stage(args.execution, "gemm2",
                          work(args, 1, row_bytes + static_cast<double>(config.hidden)));
  launch_fp8_down(params, stream);
}

}  // namespace

const Implementation<ExpertsArgs> kExpertsCudaFp8{"cuda.grouped_fp8_sm90", reject, run};

}  // namespace switchyard

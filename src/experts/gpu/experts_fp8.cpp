// The experts on Hopper for many rows of e4m3, with weights that are stored so: two grouped
// products in 8 bits, with the intermediate rows and their scales in the workspace.

#include "experts/gpu/grouped/fp8/product.hpp"
#include "experts/gpu/row_products.hpp"
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
  return reject_rows_of_codes(args);
}

/// A code is a byte.
StageWork work(const ExpertsArgs& args, double matrices, double row_bytes) {
  const ExpertConfig& config = args.weights->config();
  return work_of_rows(args, matrices, matrices * static_cast<double>(config.hidden * config.inner),
                      row_bytes);
}

void run(const ExpertsArgs& args) {
  const auto& weights = static_cast<const CudaExpertWeights&>(*args.weights);
  const std::int64_t max_rows = args.rows.rows;
  if (max_rows == 0 || weights.num_local() == 0) return;
  const ExpertConfig& config = weights.config();
  const std::int64_t blocks = (config.inner + kScaleBlock - 1) / kScaleBlock;
  const std::int64_t needed = scales_at(max_rows, config.inner) + 4 * max_rows * blocks;
  require_room(args, needed);
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

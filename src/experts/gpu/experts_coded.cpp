// The experts on Hopper for more rows than are streamed, with weights that are stored as codes: two
// grouped products that decode them in registers, with the intermediate rows in the workspace.

#include <cstddef>

#include "experts/gpu/coded/layout.hpp"
#include "experts/gpu/grouped/coded/product.hpp"
#include "experts/gpu/row_products.hpp"
#include "experts/gpu/weights.hpp"
#include "experts/gpu/workspace.hpp"
#include "experts/implementations.hpp"
#include "switchyard/device.hpp"

namespace switchyard {
namespace {

/// Codes are decoded once for every 72 to 128 rows of an expert; from some number of them on it is
/// cheaper to write all weights as numbers first (docs/history/stored_weights.md). With
/// batch_invariant the number of rows decides nothing.
std::int64_t most_rows(WeightFormat format) { return format == WeightFormat::kE4M3 ? 1152 : 1536; }

/// Where rows may lie until the second product writes there, in the order of the codes or split:
/// where it will; null where they may not.
void* room_for_order(const ExpertsArgs& args) {
  const ExpertConfig& config = args.weights->config();
  if (!coded::can_be_ordered(config.hidden, config.inner)) return nullptr;
  const auto* const x = static_cast<const std::byte*>(args.x.data);
  auto* const rows = static_cast<std::byte*>(args.rows.data);
  const bool apart = x + args.x.bytes() <= rows || rows + args.rows.bytes() <= x;
  // Rows are split where they lie.
  const bool splits = args.weights->format() == WeightFormat::kMxfp4;
  return apart || (splits && args.x_is_packed && x == rows) ? rows : nullptr;
}

std::optional<std::string> reject(const ExpertsArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  const ExpertWeights& weights = *args.weights;
  if (weights.format() != WeightFormat::kE4M3 && weights.format() != WeightFormat::kMxfp4) {
    return "takes weights stored as e4m3 or MXFP4";
  }
  if (args.x.dtype != DType::kBF16) return "takes rows of bf16";
  if (weights.config().hidden % 8 != 0 || weights.config().inner % 8 != 0) {
    return "hidden and inner must be multiples of 8";
  }
  if (auto reason = reject_rows_of_codes(args)) return reason;
  if (weights.format() == WeightFormat::kMxfp4) {
    if (!static_cast<const CudaExpertWeights&>(weights).scales_fold()) {
      return "scales of MXFP4 are too far apart for exponents of e5m2";
    }
    if (room_for_order(args) == nullptr) return "x overlaps the rows";
  }
  if (!args.execution.batch_invariant &&
      args.rows.rows > most_rows(weights.format()) * weights.num_local()) {
    return "so many rows that numbers in memory are cheaper";
  }
  return std::nullopt;
}

/// Where in the workspace the scales of split rows are: behind the intermediate rows, where other
/// implementations have numbers.
std::int64_t row_scales_at(const ExpertsArgs& args) {
  const std::int64_t end =
      experts_workspace_bytes(args.rows.rows, args.weights->config().inner, DType::kBF16);
  return (end + 255) / 256 * 256;
}

/// Of the first product, or of the second.
StageWork work(const ExpertsArgs& args, bool second) {
  const ExpertConfig& config = args.weights->config();
  const double of_first = config.gated ? 2 : 1;
  const double matrices = second ? 1 : of_first;
  return work_of_rows(args, matrices, args.weights->bytes_per_expert() * matrices / (of_first + 1),
                      2 * static_cast<double>(config.hidden + config.inner));
}

void run(const ExpertsArgs& args) {
  const auto& weights = static_cast<const CudaExpertWeights&>(*args.weights);
  const std::int64_t max_rows = args.rows.rows;
  if (max_rows == 0 || weights.num_local() == 0) return;
  const ExpertConfig& config = weights.config();
  const bool splits = weights.format() == WeightFormat::kMxfp4;
  const std::int64_t scales_at = row_scales_at(args);
  require_room(args, scales_at + (splits ? 4 * max_rows : 0));
  auto* const workspace = static_cast<std::byte*>(args.execution.workspace);
  const CodedGroupedParams params{
      .format = weights.format(),
      .x = args.x.data,
      .row_token = args.x_is_packed ? nullptr : args.plan.row_token.data,
      .ordered = room_for_order(args),
      .row_scales = splits ? reinterpret_cast<float*>(workspace + scales_at) : nullptr,
      .num_tokens = args.x.rows,
      .w13 = weights.w13(),
      .scales13 = weights.scales13(),
      .b13 = weights.b13(),
      .act = workspace + kActAt,
      .w2 = weights.w2(),
      .scales2 = weights.scales2(),
      .b2 = weights.b2(),
      .y = args.rows.data,
      .weight_maps = &weights.maps(),
      .expert_begin = args.plan.expert_begin.data,
      .expert_rows = args.plan.expert_rows.data,
      .num_experts = weights.num_local(),
      .max_rows = max_rows,
      .hidden = config.hidden,
      .inner = config.inner,
      .batch_invariant = args.execution.batch_invariant,
      .gated = config.gated,
      .activation = config.activation,
      .alpha = config.alpha,
      .limit = config.limit};
  const auto stream = static_cast<cudaStream_t>(args.execution.stream);
  {
    const ScopedStage stage(args.execution, "gemm1+activation", work(args, false));
    launch_coded_gate_up(params, stream);
  }
  const ScopedStage stage(args.execution, "gemm2", work(args, true));
  launch_coded_down(params, stream);
}

}  // namespace

const Implementation<ExpertsArgs> kExpertsCudaCoded{"cuda.grouped_coded_sm90", reject, run};

}  // namespace switchyard

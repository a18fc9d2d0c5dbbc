// Checks of the experts stage and the choice among its implementations.
#include "switchyard/experts.hpp"

#include "core/reduced_check.hpp"
#include "core/select.hpp"
#include "experts/implementations.hpp"

namespace switchyard {
namespace {

// On the CPU each accepts one layout.
constexpr const Implementation<ExpertsArgs>* kImplementations[] = {
#ifdef SWITCHYARD_WITH_CUDA
    &kExpertsCudaStreaming,       &kExpertsCudaGroupedSm90,    &kExpertsCudaGroupedSm80,
    &kExpertsCudaGroupedSm80Flat, &kExpertsCudaGroupedF32Sm90, &kExpertsCudaGroupedF32,
    &kExpertsCudaCoded,           &kExpertsCudaExpanded,       &kExpertsCudaFp8,
#endif
    &kExpertsCpuGrouped,          &kExpertsCpuBlocks,          &kExpertsCpuBatched,
};

std::string sizes_of(const ExpertsArgs& args) {
  const ExpertConfig& config = args.weights->config();
  return fmt::format("{} tokens, up to {} rows, {} experts of {} x {} {}, {}",
                     args.plan.num_tokens(), args.plan.row_token.shape[0],
                     args.weights->num_local(), config.hidden, config.inner,
                     to_string(args.weights->dtype()), args.rows.cols != 0 ? "rows" : "sums");
}

void check_preactivation(const ExpertsArgs& args, std::int64_t rows) {
  const ExpertWeights& weights = *args.weights;
  require(args.preactivation.dtype == weights.dtype(),
          "preactivation is {}, the weights compute in {}", to_string(args.preactivation.dtype),
          to_string(weights.dtype()));
  require(args.preactivation.rows >= rows, "the layout has {} rows, preactivation {}", rows,
          args.preactivation.rows);
  require_shape("preactivation", args.preactivation, args.preactivation.rows,
                (weights.config().gated ? 2 : 1) * weights.config().inner);
}

void check(const ExpertsArgs& args) {
  require(args.weights != nullptr, "experts have no weights");
  const ExpertWeights& weights = *args.weights;
  const std::int64_t hidden = weights.config().hidden;
  require(args.execution.backend == weights.backend(), "weights are on {}, the call is for {}",
          to_string(weights.backend()), to_string(args.execution.backend));
  require(args.plan.num_experts == weights.num_local(), "the plan has {} experts, the weights {}",
          args.plan.num_experts, weights.num_local());
  const bool has_rows = args.rows.cols != 0;
  const bool has_sums = args.reduced.sums.cols != 0;
  if (args.x.dtype == DType::kF8E4M3 && weights.backend() == Backend::kCuda) {
    require(has_rows, "experts of fp8 rows write rows, they do not combine them");
    require_shape("x_scale", args.x_scale, args.x.rows, (hidden + kE4M3Block - 1) / kE4M3Block);
  } else {
    require(args.x.dtype == weights.dtype(), "x is {}, the weights compute in {}",
            to_string(args.x.dtype), to_string(weights.dtype()));
    require(args.x_scale.data == nullptr, "x is {} and has scales: want fp8, on cuda",
            to_string(args.x.dtype));
  }
  require_shape("x", args.x, args.x.rows, hidden);
  require(has_rows != has_sums, "experts want exactly one of rows and reduced");
  if (has_rows) {
    require_shape("rows", args.rows, args.rows.rows, hidden);
  } else {
    require_reduced(args.reduced, args.plan.num_tokens(), hidden, weights.first_expert(),
                    weights.num_local());
  }
  const bool saves = args.preactivation.data != nullptr;
  if (weights.backend() != Backend::kCpu) {  // only the device knows how many rows there are
    if (saves) check_preactivation(args, args.rows.rows);
    return;
  }
  require_shape("expert_begin", args.plan.expert_begin, std::int64_t{args.plan.num_experts} + 1);
  require_shape("expert_rows", args.plan.expert_rows, args.plan.num_experts);
  const std::int64_t rows = args.plan.expert_begin[args.plan.num_experts];
  if (args.x_is_packed) {
    require(args.x.rows >= rows, "the layout has {} rows, packed x {}", rows, args.x.rows);
  } else {
    require_shape("x", args.x, args.plan.num_tokens(), hidden);
  }
  require(!has_rows || args.rows.rows >= rows, "the layout has {} rows, the output {}", rows,
          args.rows.rows);
  if (saves) check_preactivation(args, rows);
}

}  // namespace

std::int32_t ExpertWeights::local_of(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                                     std::int64_t num_rows) const {
  require(expert >= first_expert_ && expert < first_expert_ + num_local_,
          "expert {} is not among the local ones, {} to {}", expert, first_expert_,
          first_expert_ + num_local_);
  require(part != ExpertPart::kUp || config_.gated, "plain experts have no up rows");
  const std::int64_t rows = part == ExpertPart::kDown ? config_.hidden : config_.inner;
  require(first_row >= 0 && num_rows >= 0 && num_rows <= rows - first_row,
          "rows {} to {} of a matrix of {}", first_row, first_row + num_rows, rows);
  return expert - first_expert_;
}

namespace {

/// Weights as they are stored are those of the source.
WeightFormat format_of(const LoadExpertsArgs& args) {
  const WeightFormat stored = args.source->stored_format();
  if (args.format == WeightFormat::kStored) return stored;
  if (!has_codes(args.format)) return args.format;
  if (args.format != stored) {
    fail(ErrorCode::kUnsupported,
         "{} weights of a source that stores {} ones: want those, or exact", to_string(args.format),
         to_string(stored));
  }
  return args.format;
}

/// Values of a row that share a scale divide both sizes; blocks of e4m3 are cut off.
void check_groups(const LoadExpertsArgs& args) {
  std::int64_t group = 1;
  if (args.format == WeightFormat::kMxfp4) group = kMxfp4Block;
  if (args.format == WeightFormat::kNvfp4) group = kNvfp4Block;
  if (args.format == WeightFormat::kInt4) {
    check(args.source->int4_form());
    group = args.source->int4_form().group;
  }
  require(args.config.hidden % group == 0 && args.config.inner % group == 0,
          "{} weights want hidden={} and inner={} to be multiples of {}", to_string(args.format),
          args.config.hidden, args.config.inner, group);
}

}  // namespace

std::unique_ptr<ExpertWeights> load_experts(const LoadExpertsArgs& given) {
  require(given.source != nullptr, "experts have no source of weights");
  LoadExpertsArgs args = given;
  args.format = format_of(given);
  check(args.config);
  check_groups(args);
  require_float("the compute type of experts", args.dtype);
  require(args.first_expert >= 0 && args.num_local >= 0 &&
              args.num_local <= args.config.num_experts - args.first_expert,
          "experts {} to {} of {}", args.first_expert, args.first_expert + args.num_local,
          args.config.num_experts);
  if (args.execution.backend == Backend::kCpu) return load_experts_cpu(args);
#ifdef SWITCHYARD_WITH_CUDA
  if (args.execution.backend == Backend::kCuda) return load_experts_cuda(args);
#endif
  fail(ErrorCode::kUnsupported, "experts on {}: not in this build",
       to_string(args.execution.backend));
}

void experts(const ExpertsArgs& args) {
  check(args);
  select<ExpertsArgs>("experts", kImplementations, args, sizes_of).run(args);
}

bool try_experts(const ExpertsArgs& args) {
  check(args);
  const auto* const chosen = find<ExpertsArgs>("experts", kImplementations, args, sizes_of);
  if (chosen != nullptr) chosen->run(args);
  return chosen != nullptr;
}

bool experts_supported(const ExpertsArgs& args) {
  for (const Implementation<ExpertsArgs>* candidate : kImplementations) {
    if (!candidate->reject(args)) return true;
  }
  return false;
}

}  // namespace switchyard

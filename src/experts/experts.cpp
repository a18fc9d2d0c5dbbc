// Checks of the experts stage and the choice among its implementations.
#include "switchyard/experts.hpp"

#include <cmath>

#include "core/check.hpp"
#include "core/select.hpp"
#include "experts/implementations.hpp"

namespace switchyard {
namespace {

// On the CPU each accepts one layout.
constexpr const Implementation<ExpertsArgs>* kImplementations[] = {
#ifdef SWITCHYARD_WITH_CUDA
    &kExpertsCudaDecode, &kExpertsCudaGrouped,
#endif
    &kExpertsCpuGrouped, &kExpertsCpuBlocks,   &kExpertsCpuBatched,
};

bool is_compute_type(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

void check_reduced(const ReducedRows& reduced, const ExpertsArgs& args) {
  const Subtree& tree = reduced.subtree;
  const std::int64_t num_tokens = args.plan.num_tokens();
  const std::int64_t rows = reduced.each_group ? num_tokens * tree.num_groups : num_tokens;
  require(tree.order.groups >= 1 && tree.num_groups >= 1 && tree.first_group >= 0 &&
              tree.first_group + tree.num_groups <= tree.order.groups,
          "subtree of groups {} to {} of {}", tree.first_group, tree.first_group + tree.num_groups,
          tree.order.groups);
  require(reduced.sums.rows == rows && reduced.sums.cols == args.weights->config().hidden,
          "sums are [{}, {}], want [{}, {}]", reduced.sums.rows, reduced.sums.cols, rows,
          args.weights->config().hidden);
  require(is_compute_type(reduced.sums.dtype), "sums are {}, want f32, bf16 or f16",
          to_string(reduced.sums.dtype));
}

void check(const ExpertsArgs& args) {
  require(args.weights != nullptr, "experts have no weights");
  const ExpertWeights& weights = *args.weights;
  const std::int64_t hidden = weights.config().hidden;
  require(args.execution.backend == weights.backend(), "weights are on {}, the call is for {}",
          to_string(weights.backend()), to_string(args.execution.backend));
  require(args.plan.num_experts == weights.num_local(), "the plan has {} experts, the weights {}",
          args.plan.num_experts, weights.num_local());
  require(args.x.cols == hidden, "x has {} columns, want hidden={}", args.x.cols, hidden);
  require(args.x.dtype == weights.dtype(), "x is {}, the weights compute in {}",
          to_string(args.x.dtype), to_string(weights.dtype()));
  const bool has_rows = args.rows.cols != 0;
  const bool has_sums = args.reduced.sums.cols != 0;
  require(has_rows != has_sums, "experts want exactly one of rows and reduced");
  if (has_rows) {
    require(args.rows.cols == hidden, "rows have {} columns, want hidden={}", args.rows.cols,
            hidden);
  } else {
    check_reduced(args.reduced, args);
  }
}

}  // namespace

void check(const ExpertConfig& config) {
  require(config.num_experts >= 1, "num_experts={}, want at least 1", config.num_experts);
  require(config.hidden >= 1, "hidden={}, want at least 1", config.hidden);
  require(config.inner >= 1, "inner={}, want at least 1", config.inner);
  require(config.activation != Activation::kClampedSwiglu || config.gated,
          "activation clamped_swiglu needs gated experts");
  require(std::isfinite(config.alpha), "alpha={}, want a finite number", config.alpha);
  require(config.limit > 0, "limit={}, want a positive number", config.limit);
}

std::unique_ptr<ExpertWeights> load_experts(const LoadExpertsArgs& args) {
  check(args.config);
  require(args.source != nullptr, "experts have no source of weights");
  require(is_compute_type(args.dtype), "experts compute in {}, want f32, bf16 or f16",
          to_string(args.dtype));
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
  select<ExpertsArgs>("experts", kImplementations, args).run(args);
}

bool experts_supported(const ExpertsArgs& args) {
  for (const Implementation<ExpertsArgs>* candidate : kImplementations) {
    if (!candidate->reject(args)) return true;
  }
  return false;
}

}  // namespace switchyard

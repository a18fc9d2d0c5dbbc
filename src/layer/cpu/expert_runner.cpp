#include "layer/cpu/expert_runner.hpp"

#include "switchyard/pack.hpp"

namespace switchyard {

void ExpertRunner::run(const Args& args) {
  ExpertsArgs experts_args{.x = args.x,
                           .plan = args.plan,
                           .layout = args.layout,
                           .weights = args.weights,
                           .reduced = args.reduced,
                           .execution = args.execution};
  const std::int64_t rows = args.plan.expert_begin[args.plan.num_experts];
  const std::int64_t hidden = args.x.cols;
  if (args.layout.kind != LayoutKind::kCompact) {
    const RawMatrix packed = packed_.matrix(args.x.dtype, rows, hidden);
    const ScopedStage stage(args.execution, "pack",
                            {.bytes = 2 * static_cast<double>(packed.bytes())});
    pack({.x = args.x, .plan = args.plan, .rows = packed, .execution = args.execution});
    experts_args.x = packed;
    experts_args.x_is_packed = true;
  } else if (experts_supported(experts_args)) {
    experts(experts_args);
    return;
  }
  const RawMatrix out = rows_.matrix(DType::kF32, rows, hidden);
  experts_args.reduced = {};
  experts_args.rows = out;
  experts(experts_args);
  const ScopedStage stage(
      args.execution, "combine",
      {.bytes = static_cast<double>(out.bytes() + args.reduced.sums.bytes()),
       .flops = 2 * static_cast<double>(args.plan.token_begin[args.plan.num_tokens()] * hidden)});
  combine({.rows = out,
           .plan = args.plan,
           .first_expert = args.weights->first_expert(),
           .reduced = args.reduced,
           .execution = args.execution});
}

}  // namespace switchyard

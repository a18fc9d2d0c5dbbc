// Contract checks of pack, and which implementation runs it.
#include "switchyard/pack.hpp"
#include "core/shape_check.hpp"
#include "plan/implementations.hpp"

namespace switchyard {
namespace {

constexpr const Implementation<PackArgs>* kPacks[] = {
#ifdef SWITCHYARD_WITH_CUDA
    &kPackCuda,
#endif
    &kPackCpu};

std::string sizes_of(const PackArgs& args) {
  return fmt::format("up to {} rows x {} {} of {} tokens", args.rows.rows, args.x.cols,
                     to_string(args.x.dtype), args.x.rows);
}

}  // namespace

void pack(const PackArgs& args) {
  require_float("x", args.x.dtype);
  require(args.rows.dtype == args.x.dtype, "rows are {}, but x is {}", to_string(args.rows.dtype),
          to_string(args.x.dtype));
  require_shape("x", args.x, args.plan.num_tokens(), args.x.cols);
  require_shape("rows", args.rows, args.rows.rows, args.x.cols);
  require_shape("expert_begin", args.plan.expert_begin, std::int64_t{args.plan.num_experts} + 1);
  select<PackArgs>("pack", kPacks, args, sizes_of).run(args);
}

}  // namespace switchyard

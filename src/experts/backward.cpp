// Checks of the experts' way back and the choice among its implementations.
#include "core/shape_check.hpp"
#include "experts/gradient_check.hpp"
#include "experts/implementations.hpp"

namespace switchyard {
namespace {

void check_weights_gradient(const std::string& name, const RawMatrix& gradient, std::int64_t rows,
                            std::int64_t cols, DType compute) {
  if (gradient.data == nullptr) return;
  require_shape(name.c_str(), gradient, rows, cols);
  require(gradient.dtype == DType::kF32 || gradient.dtype == compute,
          "{} is {}, want f32 or the compute type, {}", name, to_string(gradient.dtype),
          to_string(compute));
}

void check_bias_gradient(const std::string& name, const Matrix<float>& gradient, bool bias,
                         std::int64_t rows, std::int64_t cols) {
  if (gradient.data == nullptr) return;
  require(bias, "{} is asked for, but the experts have no biases", name);
  require_shape(name.c_str(), gradient, rows, cols);
}

constexpr const Implementation<ExpertsBackwardArgs>* kImplementations[] = {
#ifdef SWITCHYARD_WITH_CUDA
    &kExpertsBackwardGpuSm90,
    &kExpertsBackwardGpu,
#endif
    &kExpertsBackwardCpu,
};

/// Rows of the layout. On a GPU only the device knows how many there are: at most so many.
std::int64_t rows_of_layout(const ExpertsBackwardArgs& args) {
  return args.weights->backend() == Backend::kCpu
             ? args.plan.expert_begin[args.weights->num_local()]
             : args.plan.row_token.shape[0];
}

std::string sizes_of(const ExpertsBackwardArgs& args) {
  const ExpertConfig& config = args.weights->config();
  return fmt::format("{} tokens, {} experts of {} x {} {}, pre-activation {}",
                     args.plan.num_tokens(), args.weights->num_local(), config.hidden, config.inner,
                     to_string(args.weights->dtype()),
                     args.preactivation.data == nullptr ? "made again" : "kept");
}

void check_room(const char* name, const RawMatrix& room, std::int64_t rows, std::int64_t cols,
                DType dtype) {
  if (room.data == nullptr) return;
  require(room.dtype == dtype, "{} is {}, the weights compute in {}", name, to_string(room.dtype),
          to_string(dtype));
  require(room.rows >= rows, "the layout has {} rows, {} {}", rows, name, room.rows);
  require_shape(name, room, room.rows, cols);
}

void check(const ExpertsBackwardArgs& args) {
  require(args.weights != nullptr, "experts have no weights");
  const ExpertWeights& weights = *args.weights;
  const ExpertConfig& config = weights.config();
  const std::int64_t num_local = weights.num_local();
  const std::int64_t num_tokens = args.plan.num_tokens();
  const std::int64_t width = (config.gated ? 2 : 1) * config.inner;
  require(args.execution.backend == weights.backend(), "weights are on {}, the call is for {}",
          to_string(weights.backend()), to_string(args.execution.backend));
  require(weights.format() == WeightFormat::kExact, "a backward wants exact weights, not {}",
          to_string(weights.format()));
  require(args.plan.num_experts == num_local, "the plan has {} experts, the weights {}",
          args.plan.num_experts, num_local);
  for (const auto& [name, matrix] : {std::pair{"x", args.x}, std::pair{"dout", args.dout}}) {
    require(matrix.dtype == weights.dtype(), "{} is {}, the weights compute in {}", name,
            to_string(matrix.dtype), to_string(weights.dtype()));
    require_shape(name, matrix, num_tokens, config.hidden);
  }
  check_gradients(args.gradients, config, num_local, weights.dtype());
  require_shape("expert_begin", args.plan.expert_begin, num_local + 1);
  require_shape("expert_rows", args.plan.expert_rows, num_local);
  const std::int64_t rows = rows_of_layout(args);
  if (args.preactivation.data != nullptr) {
    require(args.preactivation.dtype == weights.dtype(),
            "preactivation is {}, the weights compute in {}", to_string(args.preactivation.dtype),
            to_string(weights.dtype()));
    require(args.preactivation.rows >= rows, "the layout has {} rows, preactivation {}", rows,
            args.preactivation.rows);
    require_shape("preactivation", args.preactivation, args.preactivation.rows, width);
  }
  check_room("dpreactivation", args.dpreactivation, rows, width, weights.dtype());
  check_room("weighted_activation", args.weighted_activation, rows, config.inner, weights.dtype());
  if (args.dpreactivation.data != args.preactivation.data) {
    require_apart("dpreactivation", args.dpreactivation, "preactivation", args.preactivation);
  }
  for (const ConstRawMatrix other : {args.preactivation, ConstRawMatrix(args.dpreactivation)}) {
    require_apart("weighted_activation", args.weighted_activation, "a pre-activation", other);
  }
  if (args.drow_weight.data != nullptr) {
    require(args.drow_weight.shape[0] >= rows, "the layout has {} rows, drow_weight {}", rows,
            args.drow_weight.shape[0]);
  }
  if (args.dx_rows.data != nullptr) {
    require(args.dx_rows.dtype == DType::kF32 || args.dx_rows.dtype == weights.dtype(),
            "dx_rows is {}, want f32 or {}, in which the weights compute",
            to_string(args.dx_rows.dtype), to_string(weights.dtype()));
    require(args.dx_rows.rows >= rows, "the layout has {} rows, dx_rows {}", rows,
            args.dx_rows.rows);
    require_shape("dx_rows", args.dx_rows, args.dx_rows.rows, config.hidden);
  }
}

}  // namespace

void check_gradients(const ExpertGradients& gradients, const ExpertConfig& config,
                     std::int64_t num_experts, DType compute, const char* of) {
  const std::int64_t width = (config.gated ? 2 : 1) * config.inner;
  const auto name = [&](const char* gradient) { return std::string(of) + gradient; };
  check_weights_gradient(name("dw13"), gradients.w13, num_experts * width, config.hidden, compute);
  check_weights_gradient(name("dw2"), gradients.w2, num_experts * config.hidden, config.inner,
                         compute);
  check_bias_gradient(name("db13"), gradients.b13, config.bias, num_experts, width);
  check_bias_gradient(name("db2"), gradients.b2, config.bias, num_experts, config.hidden);
}

void experts_backward(const ExpertsBackwardArgs& args) {
  check(args);
  select<ExpertsBackwardArgs>("experts_backward", kImplementations, args, sizes_of).run(args);
}

}  // namespace switchyard

// The experts' way back on a GPU: one grouped product through the activation, two that sum over the
// rows of each expert, one that gives rows. Bound by the tensor cores; which expert has how many
// rows stays on the device, so a captured call serves every plan that fits.

#include <algorithm>

#include "core/gpu/cuda_device.hpp"
#include "experts/gpu/backward/products.hpp"
#include "experts/gpu/grouped/gemm.hpp"
#include "experts/gpu/weights.hpp"
#include "experts/implementations.hpp"
#include "switchyard/device.hpp"

namespace switchyard {
namespace {

std::int64_t first_cols(const ExpertConfig& config) {
  return (config.gated ? 2 : 1) * config.inner;
}

/// How the workspace is divided.
struct Places {
  static constexpr std::int64_t kCounterBytes = 128;  // a line of its own
  static constexpr std::int64_t kZeroedBytes =
      static_cast<std::int64_t>(grouped_gemm_workspace_bytes()) + 2 * kCounterBytes;

  std::int64_t units = 0;  ///< Four arrays of num_experts + 1.
  std::int64_t dots = 0;
  std::int64_t dz = 0;
  std::int64_t inner = 0;
  std::int64_t parts = 0;
  std::int64_t bytes = 0;

  Places(const ExpertConfig& config, DType dtype, std::int64_t num_experts, std::int64_t max_rows,
         ExpertsBackwardRoom room) {
    const std::int64_t width = first_cols(config);
    bytes = kZeroedBytes;
    units = take(4 * (num_experts + 1) * 4);
    dots = take(max_rows * tiles_along(config.inner) * 4);
    if (!room.dpreactivation) dz = take(max_rows * width * size_of(dtype));
    if (!room.weighted_activation) inner = take(max_rows * config.inner * size_of(dtype));
    parts = take(std::max(split_bytes({max_rows, width, config.hidden}),
                          split_bytes({max_rows, config.hidden, config.inner})));
  }

 private:
  std::int64_t take(std::int64_t count) {
    const std::int64_t at = (bytes + 255) / 256 * 256;
    bytes = at + count;
    return at;
  }
};

template <BackwardPath kPath>
std::optional<std::string> reject(const ExpertsBackwardArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  const ExpertConfig& config = args.weights->config();
  const std::int64_t multiple = 16 / size_of(args.weights->dtype());
  if (config.hidden % multiple != 0 || config.inner % multiple != 0) {
    return "hidden and inner must be multiples of 16 bytes";
  }
  if (args.weights->num_local() > kMaxBackwardExperts) return "more than 1024 experts on one GPU";
  const int major = device_attribute(cudaDevAttrComputeCapabilityMajor);
  if (major < 8) return "needs sm_80 or later";
  if (kPath != BackwardPath::kPortable && major != 9) return "needs sm_90";
  if (kPath != BackwardPath::kPortable && args.weights->dtype() == DType::kF32) {
    return "not for f32";
  }
  // Rows are found by 32-bit numbers of 16 bytes.
  constexpr std::int64_t kMostChunks = 0xFFFFFFFF;
  if (args.x.rows * (config.hidden / multiple) > kMostChunks ||
      args.plan.row_token.shape[0] * (first_cols(config) / multiple) > kMostChunks) {
    return "x or the pre-activation are more than 64 GB";
  }
  const void* const moved_by_16[] = {args.x.data,
                                     args.dout.data,
                                     args.preactivation.data,
                                     args.dpreactivation.data,
                                     args.weighted_activation.data,
                                     args.dx_rows.data,
                                     args.gradients.w13.data,
                                     args.gradients.w2.data,
                                     args.execution.workspace};
  if (!std::all_of(std::begin(moved_by_16), std::end(moved_by_16), is_aligned_16)) {
    return "x, dout, the pre-activation or its gradient, weighted activations, dx, a weights' "
           "gradient or the workspace are not aligned to 16 bytes";
  }
  return std::nullopt;
}

template <BackwardPath kPath>
class Backward {
 public:
  explicit Backward(const ExpertsBackwardArgs& args)
      : args_(args),
        weights_(static_cast<const CudaExpertWeights&>(*args.weights)),
        config_(weights_.config()),
        dtype_(weights_.dtype()),
        width_(first_cols(config_)),
        max_rows_(args.plan.row_token.shape[0]),
        places_(config_, dtype_, weights_.num_local(), max_rows_,
                {.dpreactivation = args.dpreactivation.data != nullptr,
                 .weighted_activation = args.weighted_activation.data != nullptr}),
        dz_(args.dpreactivation.data != nullptr ? args.dpreactivation.data : at(places_.dz)),
        inner_(args.weighted_activation.data != nullptr ? args.weighted_activation.data
                                                        : at(places_.inner)),
        stream_(static_cast<cudaStream_t>(args.execution.stream)),
        rows_{.begin = args.plan.expert_begin.data,
              .rows = args.plan.expert_rows.data,
              .token = args.plan.row_token.data,
              .weight = args.plan.row_weight.data,
              .num_experts = weights_.num_local(),
              .max_rows = max_rows_} {}

  void run() {
    if (weights_.num_local() == 0) return;
    require(
        args_.execution.workspace != nullptr && args_.execution.workspace_bytes >= places_.bytes,
        "the workspace of the experts' backward has {} bytes, {} rows need {}",
        args_.execution.workspace_bytes, max_rows_, places_.bytes);
    const bool gradients_last = args_.rows_enqueued != nullptr;
    {
      const ScopedStage stage(args_.execution, "experts_backward", work());
      prepare();
      if (max_rows_ > 0) through_activation();
      if (max_rows_ > 0 && args_.drow_weight.data != nullptr) sum_row_weights();
      if (!gradients_last) weight_gradients();
      if (max_rows_ > 0 && args_.dx_rows.data != nullptr) rows_gradient();
    }
    if (!gradients_last) return;
    (*args_.rows_enqueued)();
    const ScopedStage stage(args_.execution, "experts_backward", {});
    weight_gradients();
  }

 private:
  [[nodiscard]] std::byte* at(std::int64_t offset) const {
    return static_cast<std::byte*>(args_.execution.workspace) + offset;
  }
  [[nodiscard]] float* floats_at(std::int64_t offset) const {
    return reinterpret_cast<float*>(at(offset));
  }

  void rows_gradient() const {
    launch_rows_gradient({.rows = rows_,
                          .in = dz_,
                          .weights = weights_.w13(),
                          .out = args_.dx_rows.data,
                          .out_is_f32 = args_.dx_rows.dtype == DType::kF32,
                          .depth = width_,
                          .cols = config_.hidden,
                          .weight_maps = &weights_.maps(),
                          .dtype = dtype_},
                         kPath, stream_);
  }

  /// Bytes and operations at most: the counts themselves are on the device.
  [[nodiscard]] StageWork work() const {
    const auto first = static_cast<double>(width_ * config_.hidden);
    const auto second = static_cast<double>(config_.inner * config_.hidden);
    double products = second;
    if (args_.preactivation.data == nullptr) products += first;
    if (args_.dx_rows.data != nullptr) products += first;
    if (args_.gradients.w13.data != nullptr) products += first;
    if (args_.gradients.w2.data != nullptr) products += second;
    const double flops = 2 * static_cast<double>(max_rows_) * products;
    const double experts = std::min<double>(weights_.num_local(), static_cast<double>(max_rows_));
    return {.bytes = experts * weights_.bytes_per_expert() +
                     2.0 * static_cast<double>(args_.x.bytes()) +
                     static_cast<double>(args_.gradients.w13.bytes() + args_.gradients.w2.bytes()),
            .flops = flops,
            .flops_executed = flops,
            .most_rows = max_rows_,
            .flops_per_row = 2 * products};
  }

  [[nodiscard]] RaggedUnits units(int product) const {
    auto* const arrays = reinterpret_cast<std::int32_t*>(at(places_.units));
    const std::int64_t count = std::int64_t{weights_.num_local()} + 1;
    const RaggedProblem problem = product == 0
                                      ? RaggedProblem{max_rows_, width_, config_.hidden}
                                      : RaggedProblem{max_rows_, config_.hidden, config_.inner};
    constexpr auto kCounters = static_cast<std::int64_t>(grouped_gemm_workspace_bytes());
    return {
        .parts_before = arrays + std::int64_t{2} * product * count,
        .split_parts_before = arrays + std::int64_t{2 * product + 1} * count,
        .counter = reinterpret_cast<std::int32_t*>(at(kCounters + product * Places::kCounterBytes)),
        .part_rows = part_rows(problem)};
  }

  void prepare() const {
    launch_prepare_units({.rows = rows_,
                          .units = {units(0), units(1)},
                          .zeroed = reinterpret_cast<std::uint32_t*>(at(0)),
                          .num_zeroed = Places::kZeroedBytes / 4},
                         stream_);
  }

  void through_activation() const {
    const bool kept = args_.preactivation.data != nullptr;
    if (!kept) make_preactivation();
    launch_down_gradient({.rows = rows_,
                          .dout = args_.dout.data,
                          .w2 = weights_.w2(),
                          .z = kept ? args_.preactivation.data : dz_,
                          .dz = dz_,
                          .inner = inner_,
                          .dots = floats_at(places_.dots),
                          .hidden = config_.hidden,
                          .inner_cols = config_.inner,
                          .gated = config_.gated,
                          .activation = {config_.activation, config_.alpha, config_.limit},
                          .weight_maps = &weights_.maps(),
                          .dtype = dtype_},
                         kPath, stream_);
  }

  /// As the forward has made it, where its gradient will be.
  void make_preactivation() const {
    launch_gate_up({.x = args_.x.data,
                    .row_token = rows_.token,
                    .w13 = weights_.w13(),
                    .b13 = weights_.b13(),
                    .act = inner_,
                    .preactivation = dz_,
                    .weight_maps = &weights_.maps(),
                    .expert_begin = rows_.begin,
                    .expert_rows = rows_.rows,
                    .workspace = at(0),
                    .num_experts = rows_.num_experts,
                    .max_rows = max_rows_,
                    .num_tokens = args_.x.rows,
                    .hidden = config_.hidden,
                    .inner = config_.inner,
                    .dtype = dtype_,
                    .gated = config_.gated,
                    .activation = config_.activation,
                    .alpha = config_.alpha,
                    .limit = config_.limit},
                   stream_);
  }

  void sum_row_weights() const {
    launch_row_weight_sums({.rows = rows_,
                            .dots = floats_at(places_.dots),
                            .num_dots = tiles_along(config_.inner),
                            .dout = args_.dout.data,
                            .b2 = weights_.b2(),
                            .hidden = config_.hidden,
                            .out = args_.drow_weight.data,
                            .dtype = dtype_},
                           stream_);
  }

  void weight_gradients() const {
    const GradientOperand dz{dz_, nullptr, width_};
    const GradientOperand dout{args_.dout.data, rows_.token, config_.hidden};
    launch_weights(args_.gradients.w2, 1, dout, {inner_, nullptr, config_.inner});
    launch_weights(args_.gradients.w13, 0, dz, {args_.x.data, rows_.token, config_.hidden});
    launch_bias(args_.gradients.b2, dout, true);
    launch_bias(args_.gradients.b13, dz, false);
  }

  void launch_weights(const RawMatrix& out, int product, const GradientOperand& left,
                      const GradientOperand& right) const {
    if (out.data == nullptr) return;
    launch_weight_gradient({.rows = rows_,
                            .left = left,
                            .right = right,
                            .units = units(product),
                            .split_sums = floats_at(places_.parts),
                            .out = out.data,
                            .out_is_f32 = out.dtype == DType::kF32,
                            .accumulate = args_.accumulate,
                            .dtype = dtype_},
                           kPath, stream_);
  }

  void launch_bias(const Matrix<float>& out, const GradientOperand& in, bool weighted) const {
    if (out.data == nullptr) return;
    launch_column_sums({.rows = rows_,
                        .in = in,
                        .weighted = weighted,
                        .out = out.data,
                        .accumulate = args_.accumulate,
                        .dtype = dtype_},
                       stream_);
  }

  const ExpertsBackwardArgs& args_;
  const CudaExpertWeights& weights_;
  const ExpertConfig& config_;
  DType dtype_;
  std::int64_t width_;
  std::int64_t max_rows_;
  Places places_;
  std::byte* dz_;     ///< [S, 2I] the pre-activation's gradient,
  std::byte* inner_;  ///< [S, I] weighted activations: in the caller's room or the workspace.
  cudaStream_t stream_;
  ExpertRows rows_;
};

}  // namespace

std::int64_t experts_backward_workspace_bytes(const ExpertConfig& config, DType dtype,
                                              std::int32_t num_local, std::int64_t max_rows,
                                              ExpertsBackwardRoom room) {
  return Places(config, dtype, num_local, max_rows, room).bytes;
}

const Implementation<ExpertsBackwardArgs> kExpertsBackwardGpuSm90{
    "cuda.grouped_sm90", reject<BackwardPath::kSm90>,
    [](const ExpertsBackwardArgs& args) { Backward<BackwardPath::kSm90>(args).run(); }};
const Implementation<ExpertsBackwardArgs> kExpertsBackwardGpu{
    "cuda.grouped_sm80", reject<BackwardPath::kPortable>,
    [](const ExpertsBackwardArgs& args) { Backward<BackwardPath::kPortable>(args).run(); }};

}  // namespace switchyard

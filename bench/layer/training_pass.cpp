#include "bench/layer/training_pass.hpp"

namespace switchyard::bench {

const char* to_string(Pass pass) noexcept {
  switch (pass) {
    case Pass::kForward: return "forward";
    case Pass::kForwardTrain: return "forward-train";
    case Pass::kBackward: return "backward";
    case Pass::kBoth: return "both";
  }
  return "?";
}

TrainingPass::TrainingPass(const LayerConfig& config, std::int32_t num_local, DType compute,
                           Recompute recompute, bool routed, Backend backend)
    : saved_(recompute), memory_(backend) {
  const auto experts = [&](const ExpertConfig& e, std::int32_t count) {
    const std::int64_t first = (e.gated ? 2 : 1) * e.inner;
    ExpertGradients gradients{.w13 = memory_for(compute, count * first, e.hidden),
                              .w2 = memory_for(compute, count * e.hidden, e.inner)};
    if (e.bias) {
      const auto floats = [&](std::int64_t cols) {
        return Matrix<float>{reinterpret_cast<float*>(memory_for(DType::kF32, count, cols).data),
                             {count, cols}};
      };
      gradients.b13 = floats(first);
      gradients.b2 = floats(e.hidden);
    }
    return gradients;
  };
  args_.experts = experts(config.experts, num_local);
  if (config.shared.num_experts > 0) args_.shared = experts(config.shared, 1);
  if (routed) {
    args_.dgate = memory_for(DType::kF32, config.router.gate_rows(),
                             config.router.network.features(config.experts.hidden));
    if (config.router.noise.kind == RouterNoise::Kind::kLearned) {
      args_.dnoise_gate = memory_for(DType::kF32, args_.dgate.rows, config.experts.hidden);
    }
    if (const std::int64_t size = config.router.network.size(config.experts.hidden); size > 0) {
      const RawMatrix network = memory_for(DType::kF32, 1, size);
      args_.drouter_network = {reinterpret_cast<float*>(network.data), {size}};
    }
  }
}

RawMatrix TrainingPass::memory_for(DType dtype, std::int64_t rows, std::int64_t cols) {
  return {memory_.make(rows * cols * size_of(dtype)), dtype, rows, cols};
}

void TrainingPass::backward(MoeLayer& layer, ConstRawMatrix dout, StageRecorder* recorder,
                            void* stream) {
  if (args_.dtokens.data == nullptr) args_.dtokens = memory_for(dout.dtype, dout.rows, dout.cols);
  args_.saved = &saved_;
  args_.dout = dout;
  args_.recorder = recorder;
  args_.stream = stream;
  layer.backward(args_);
}

}  // namespace switchyard::bench

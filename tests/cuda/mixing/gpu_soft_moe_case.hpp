#pragma once

// A Soft-MoE problem on a GPU, and its forward and backward with all gradients.

#include <gtest/gtest.h>

#include "switchyard/device.hpp"
#include "testkit/gpu/device_array.hpp"
#include "testkit/random_values.hpp"
#include "tests/stages/soft_moe_case.hpp"

namespace switchyard::test {

using Floats = std::vector<float>;

inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

struct Types {
  DType compute = DType::kF32;
  DType phi = DType::kF32;
  DType dout = DType::kF32;
  DType out = DType::kF32;  ///< Of y, dx and dphi.
};

inline void round_all(Floats& values, DType dtype) {
  values = loaded_as_floats(dtype, stored_as(dtype, values));
}

/// What a GPU is given of a case, as numbers.
inline SoftMoeCase rounded(SoftMoeCase c, const Types& types) {
  for (Floats* values : {&c.x, &c.w13, &c.w2}) round_all(*values, types.compute);
  round_all(c.phi, types.phi);
  round_all(c.dy, types.dout);
  return c;
}

/// The arrays of a case on the device, and calls with them.
class OnGpu {
 public:
  OnGpu(const SoftMoeCase& c, const Types& types, float start = 1e30F)
      : c_(c),
        types_(types),
        w13_(stored_as(types.compute, c.w13)),
        w2_(stored_as(types.compute, c.w2)),
        source_(make_memory_source(c.experts, types.compute, w13_.data(), w2_.data())),
        weights_(make_weights()),
        x_(stored_as(types.compute, c.x)),
        phi_(stored_as(types.phi, c.phi)),
        dy_(stored_as(types.dout, c.dy)),
        y_(stored_as(types.out, Floats(c.x.size(), 1.0F))),
        dx_(stored_as(types.out, Floats(c.x.size(), 1.0F))),
        dphi_(stored_as(types.out, Floats(c.phi.size(), start))),
        dispatch_(at(c.num_tokens * c.num_slots())),
        combine_(at(c.num_tokens * c.num_slots())),
        dscale_(Floats{start}),
        dw13_(Floats(c.w13.size(), start)),
        dw2_(Floats(c.w2.size(), start)),
        status_(Statuses{DeviceStatus{}}),
        forward_memory_(at(soft_moe_workspace_bytes(*weights_, c.config, c.num_tokens))),
        backward_memory_(at(soft_moe_backward_workspace_bytes(*weights_, c.config, c.num_tokens))) {
  }

  /// Once more, for who owns them.
  [[nodiscard]] std::unique_ptr<ExpertWeights> make_weights() const {
    return load_experts({.config = c_.experts,
                         .source = source_.get(),
                         .dtype = types_.compute,
                         .num_local = c_.experts.num_experts,
                         .execution = {.backend = Backend::kCuda}});
  }
  [[nodiscard]] SoftMoeArgs forward(SavedSoftMoe* saved, cudaStream_t stream = nullptr) const {
    return {.x = rows(x_, types_.compute, c_.num_tokens),
            .phi = rows(phi_, types_.phi, c_.num_slots()),
            .weights = weights_.get(),
            .config = c_.config,
            .out = rows(y_, types_.out, c_.num_tokens),
            .dispatch = dispatch_.matrix(c_.num_tokens, c_.num_slots()),
            .combine = combine_.matrix(c_.num_tokens, c_.num_slots()),
            .saved = saved,
            .execution = execution(forward_memory_, stream)};
  }
  [[nodiscard]] SoftMoeBackwardArgs backward(SavedSoftMoe& saved, bool accumulate = false,
                                             cudaStream_t stream = nullptr) const {
    const ExpertConfig& experts = c_.experts;
    const std::int64_t width = (experts.gated ? 2 : 1) * experts.inner;
    return {.saved = &saved,
            .phi = rows(phi_, types_.phi, c_.num_slots()),
            .weights = weights_.get(),
            .dout = rows(dy_, types_.dout, c_.num_tokens),
            .dx = rows(dx_, types_.out, c_.num_tokens),
            .dphi = rows(dphi_, types_.out, c_.num_slots()),
            .dscale = dscale_.data(),
            .experts = {.w13 = {dw13_.bytes(), DType::kF32, experts.num_experts * width,
                                experts.hidden},
                        .w2 = {dw2_.bytes(), DType::kF32, experts.num_experts * experts.hidden,
                               experts.inner}},
            .accumulate = accumulate,
            .execution = execution(backward_memory_, stream)};
  }
  void set(const SoftMoeCase& c) const {
    x_.set(stored_as(types_.compute, c.x));
    dy_.set(stored_as(types_.dout, c.dy));
  }
  [[nodiscard]] DeviceStatus status() const { return status_.get()[0]; }
  [[nodiscard]] SoftMoeResults results() const {
    const auto loaded = [&](const DeviceArray<std::byte>& from) {
      return loaded_as_floats(types_.out, from.get());
    };
    return {.y = loaded(y_),
            .dispatch = dispatch_.get(),
            .combine = combine_.get(),
            .dx = loaded(dx_),
            .dphi = loaded(dphi_),
            .dscale = dscale_.get(),
            .dw13 = dw13_.get(),
            .dw2 = dw2_.get()};
  }

 private:
  using Statuses = std::vector<DeviceStatus>;

  [[nodiscard]] RawMatrix rows(const DeviceArray<std::byte>& array, DType dtype,
                               std::int64_t count) const {
    return {array.bytes(), dtype, count, c_.experts.hidden};
  }
  [[nodiscard]] Execution execution(const DeviceArray<std::byte>& memory,
                                    cudaStream_t stream) const {
    return {.backend = Backend::kCuda,
            .stream = stream,
            .workspace = memory.data(),
            .workspace_bytes = static_cast<std::int64_t>(memory.size()),
            .status = status_.data()};
  }

  SoftMoeCase c_;
  Types types_;
  std::vector<std::byte> w13_, w2_;
  std::unique_ptr<ExpertSource> source_;
  std::unique_ptr<ExpertWeights> weights_;
  DeviceArray<std::byte> x_, phi_, dy_, y_, dx_, dphi_;
  DeviceArray<float> dispatch_, combine_, dscale_, dw13_, dw2_;
  DeviceArray<DeviceStatus> status_;
  DeviceArray<std::byte> forward_memory_, backward_memory_;  // poisoned: what they hold is nothing
};

inline SoftMoeResults run_on_gpu(const SoftMoeCase& c, const Types& types = {},
                                 bool accumulate = false, float start = 1.0F) {
  const OnGpu arrays(c, types, start);
  SavedSoftMoe saved(c.recompute);
  soft_moe(arrays.forward(&saved));
  soft_moe_backward(arrays.backward(saved, accumulate));
  EXPECT_TRUE(arrays.status().ok());
  return arrays.results();
}

}  // namespace switchyard::test

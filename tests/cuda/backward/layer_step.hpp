#pragma once

// A small layer and its calls there and back on one GPU.

#include <gtest/gtest.h>

#include "switchyard/layer.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/gpu/made_up_layer.hpp"

namespace switchyard::backward_on_gpu {

using test::expect_error;

inline constexpr std::int64_t kHidden = 64;
inline constexpr std::int64_t kInner = 48;
inline constexpr std::int32_t kExperts = 6;
inline constexpr std::int32_t kTopK = 2;
inline constexpr std::int64_t kShared = 32;

inline LayerConfig layer_config() {
  LayerConfig config;
  config.router = {.num_experts = kExperts, .kind = TopKRouter{.top_k = kTopK}};
  config.experts = {.num_experts = kExperts, .hidden = kHidden, .inner = kInner};
  config.shared = config.experts;
  config.shared.num_experts = 1;
  config.shared.inner = kShared;
  config.shared_gated = true;
  return config;
}

/// A call forward and back with its arrays on the device.
class Step {
 public:
  Step(std::int64_t num_tokens, DType dtype, unsigned seed)
      : num_tokens_(num_tokens),
        dtype_(dtype),
        tokens_(stored_as(dtype, random_floats(num_tokens * kHidden, seed))),
        dout_(stored_as(dtype, random_floats(num_tokens * kHidden, seed + 1))),
        out_(tokens_.size()),
        dtokens_(tokens_.size()),
        dgate_(kExperts * kHidden),
        w13_(kExperts * 2 * kInner * kHidden),
        w2_(kExperts * kHidden * kInner),
        shared13_(2 * kShared * kHidden),
        shared_gate_(kHidden) {}

  void set(unsigned seed) {
    tokens_.set(stored_as(dtype_, random_floats(num_tokens_ * kHidden, seed)));
    dout_.set(stored_as(dtype_, random_floats(num_tokens_ * kHidden, seed + 1)));
  }
  void forget_tokens() { tokens_.fill(0xff); }
  [[nodiscard]] RawMatrix tokens() const { return matrix(tokens_); }
  void forward(MoeLayer& layer, SavedForward* saved, cudaStream_t stream = nullptr,
               bool stays = false) {
    layer.forward({.tokens = matrix(tokens_),
                   .out = matrix(out_),
                   .stream = stream,
                   .saved = saved,
                   .tokens_stay = stays});
  }
  [[nodiscard]] BackwardArgs args(SavedForward& saved, cudaStream_t stream = nullptr) {
    return {.saved = &saved,
            .dout = matrix(dout_),
            .dtokens = matrix(dtokens_),
            .dgate = {dgate_.bytes(), DType::kF32, kExperts, kHidden},
            .experts = {.w13 = {w13_.bytes(), DType::kF32, kExperts * 2 * kInner, kHidden},
                        .w2 = {w2_.bytes(), DType::kF32, kExperts * kHidden, kInner}},
            .shared = {.w13 = {shared13_.bytes(), DType::kF32, 2 * kShared, kHidden}},
            .dshared_gate = shared_gate_.vector(),
            .stream = stream};
  }
  void both(MoeLayer& layer, SavedForward& saved, cudaStream_t stream = nullptr) {
    forward(layer, &saved, stream);
    layer.backward(args(saved, stream));
  }
  /// All gradients, one after the other, as bytes.
  [[nodiscard]] std::vector<std::byte> gradients() const {
    std::vector<std::byte> all = dtokens_.get();
    for (const DeviceArray<float>* array : {&dgate_, &w13_, &w2_, &shared13_, &shared_gate_}) {
      const std::vector<float> values = array->get();
      const auto* const bytes = reinterpret_cast<const std::byte*>(values.data());
      all.insert(all.end(), bytes, bytes + values.size() * sizeof(float));
    }
    return all;
  }
  [[nodiscard]] std::vector<std::byte> gradients_of(MoeLayer& layer, SavedForward& saved) {
    for (const DeviceArray<float>* array : {&dgate_, &w13_, &w2_, &shared13_, &shared_gate_}) {
      array->fill(0xff);
    }
    both(layer, saved);
    return gradients();
  }
  [[nodiscard]] RawMatrix matrix(const DeviceArray<std::byte>& array) const {
    return {array.bytes(), dtype_, num_tokens_, kHidden};
  }

 private:
  std::int64_t num_tokens_;
  DType dtype_;
  DeviceArray<std::byte> tokens_, dout_, out_, dtokens_;
  DeviceArray<float> dgate_, w13_, w2_, shared13_, shared_gate_;
};

inline LayerOptions on_gpu() { return {.backend = Backend::kCuda}; }

}  // namespace switchyard::backward_on_gpu

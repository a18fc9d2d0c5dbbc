#pragma once

// A streaming problem's data on both sides, and what plain loops in double make of it. Each run is
// made by one kernel, where the shape has it, and by two: the bits must agree.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numbers>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "core/gpu/cuda_check.hpp"
#include "core/half.hpp"
#include "experts/gpu/streaming/streaming.hpp"

namespace switchyard {

struct DeviceBytes {
  explicit DeviceBytes(std::size_t bytes) {
    SWITCHYARD_CUDA(cudaMalloc(&data, bytes + 16));
    SWITCHYARD_CUDA(cudaMemset(data, 0xff, bytes + 16));  // NaN in every type
  }
  template <typename V>
  explicit DeviceBytes(const std::vector<V>& host) : DeviceBytes(host.size() * sizeof(V)) {
    SWITCHYARD_CUDA(cudaMemcpy(data, host.data(), host.size() * sizeof(V), cudaMemcpyHostToDevice));
  }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  ~DeviceBytes() { cudaFree(data); }
  void* data = nullptr;
};

struct Problem {
  std::string name;
  std::vector<std::vector<int>> experts;  // of each token; ids may repeat
  int num_experts = 8;
  std::int64_t hidden = 264;
  std::int64_t inner = 104;
  DType dtype = DType::kBF16;
  bool gated = true;
  Activation activation = Activation::kSilu;
  bool bias = false;
  bool packed = false;
  StreamingPath path = StreamingPath::kBest;
  bool batch_invariant = false;
  bool plan_is_older = false;
};

inline std::vector<std::vector<int>> spread(int tokens, int top_k, int num_experts, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::vector<int>> experts(static_cast<std::size_t>(tokens));
  for (auto& of : experts) {
    while (static_cast<int>(of.size()) < top_k) {
      const int e = static_cast<int>(random() % static_cast<unsigned>(num_experts));
      if (std::find(of.begin(), of.end(), e) == of.end()) of.push_back(e);
    }
  }
  return experts;
}

inline double activate(Activation kind, double g, double u, bool gated, double alpha,
                       double limit) {
  double y = g;
  switch (kind) {
    case Activation::kSilu: y = g / (1 + std::exp(-g)); break;
    case Activation::kGelu: y = 0.5 * g * (1 + std::erf(g * std::numbers::sqrt2 / 2)); break;
    case Activation::kGeluTanh:
      y = 0.5 * g * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (g + 0.044715 * g * g * g)));
      break;
    case Activation::kRelu: y = std::max(g, 0.0); break;
    case Activation::kRelu2: y = std::max(g, 0.0) * std::max(g, 0.0); break;
    case Activation::kClampedSwiglu: {
      const double c = std::min(g, limit);
      return c / (1 + std::exp(-alpha * c)) * (std::clamp(u, -limit, limit) + 1);
    }
  }
  return gated ? y * u : y;
}

/// A problem's data on both sides.
class Fixture {
 public:
  explicit Fixture(const Problem& problem, bool row_is_token = false) : p_(problem) {
    std::mt19937 random(17);
    const auto experts = static_cast<std::size_t>(p_.num_experts);
    const auto h = static_cast<std::size_t>(p_.hidden);
    const auto i = static_cast<std::size_t>(p_.inner);
    const std::size_t halves = p_.gated ? 2 : 1;
    const std::size_t tokens = p_.experts.size();
    std::size_t rows = 0;
    for (const auto& of : p_.experts) rows += of.size();
    w13_ = draw(random, experts * halves * i * h, 1 / std::sqrt(static_cast<float>(h)));
    w2_ = draw(random, experts * i * h, 1 / std::sqrt(static_cast<float>(i)));
    b13_ = draw(random, experts * halves * i, 1.0F);
    b2_ = draw(random, experts * h, 1.0F);
    x_ = draw(random, (p_.packed ? rows : tokens) * h, 1.0F);
    make_plan(random, row_is_token);
    upload();
  }

  StreamingParams params() const {
    StreamingParams d;
    d.x = device_[0]->data;
    d.x_is_packed = p_.packed;
    d.w13 = device_[1]->data;
    d.w2 = device_[2]->data;
    if (p_.bias) {
      d.b13 = static_cast<const float*>(device_[3]->data);
      d.b2 = static_cast<const float*>(device_[4]->data);
    }
    d.expert_begin = static_cast<const std::int32_t*>(device_[5]->data);
    d.expert_rows = static_cast<const std::int32_t*>(device_[6]->data);
    d.row_token = static_cast<const std::int32_t*>(device_[7]->data);
    d.row_weight = static_cast<const float*>(device_[8]->data);
    d.token_begin = static_cast<const std::int32_t*>(device_[9]->data);
    d.token_row = static_cast<const std::int32_t*>(device_[10]->data);
    d.act = device_[11]->data;
    d.sums = device_[12]->data;
    d.sync = static_cast<StreamingSync*>(device_[13]->data);
    d.subtree = {{p_.num_experts, 8}, 0, 8};
    d.num_experts = p_.num_experts;
    d.num_tokens = static_cast<std::int64_t>(token_begin_.size()) - 1;
    d.max_rows = d.max_assignments = static_cast<std::int64_t>(row_token_.size());
    d.hidden = p_.hidden;
    d.inner = p_.inner;
    d.dtype = p_.dtype;
    d.gated = p_.gated;
    d.activation = p_.activation;
    d.path = p_.path;
    d.batch_invariant = p_.batch_invariant;
    d.plan_is_older = p_.plan_is_older;
    return d;
  }

  template <typename V = float>
  std::vector<V> run(const StreamingParams& d, std::size_t rows_per_token = 1) const {
    const std::size_t count = static_cast<std::size_t>(d.num_tokens * d.hidden) * rows_per_token;
    DeviceBytes sums(count * sizeof(V));
    StreamingParams call = d;
    call.sums = sums.data;
    std::optional<StreamingShape> shape;
    const auto result = [&] {
      if (shape) {
        launch_streaming(call, *shape, nullptr);
      } else {
        launch_streaming(call, nullptr);
      }
      SWITCHYARD_CUDA(cudaDeviceSynchronize());
      std::vector<V> host(count);
      SWITCHYARD_CUDA(
          cudaMemcpy(host.data(), sums.data, count * sizeof(V), cudaMemcpyDeviceToHost));
      return host;
    };
    const std::vector<V> host = result();
    EXPECT_TRUE(counters_are_zero());
    // In one kernel or in two: the bits are the same.
    StreamingChip chip = streaming_chip();
    chip.hopper = chip.hopper && call.path != StreamingPath::kPortable;
    shape = choose_streaming(call, chip);
    shape->whole = false;
    SWITCHYARD_CUDA(cudaMemset(sums.data, 0xff, count * sizeof(V)));
    const std::vector<V> by_two = result();
    EXPECT_EQ(std::memcmp(host.data(), by_two.data(), count * sizeof(V)), 0);
    return host;
  }

  [[nodiscard]] bool counters_are_zero() const {
    StreamingSync sync;
    SWITCHYARD_CUDA(cudaMemcpy(&sync, device_[13]->data, sizeof(sync), cudaMemcpyDeviceToHost));
    const StreamingSync zero{};
    return std::memcmp(&sync, &zero, sizeof(sync)) == 0;
  }

  std::vector<double> expected() const;
  const std::vector<float>& row_weight() const { return row_weight_; }
  const std::vector<int>& row_expert() const { return row_expert_; }
  const std::vector<std::int32_t>& row_token() const { return row_token_; }
  const std::vector<std::int32_t>& expert_begin() const { return expert_begin_; }
  const std::vector<std::int32_t>& expert_rows() const { return expert_rows_; }
  const std::vector<std::int32_t>& token_begin() const { return token_begin_; }
  const std::vector<std::int32_t>& token_row() const { return token_row_; }

 private:
  // Values as the compute type holds them.
  std::vector<float> draw(std::mt19937& random, std::size_t count, float scale) const {
    std::normal_distribution<float> normal(0, scale);
    std::vector<float> v(count);
    for (float& value : v) value = rounded(normal(random));
    return v;
  }
  float rounded(float v) const {
    if (p_.dtype == DType::kBF16) return bf16_to_float(float_to_bf16(v));
    return p_.dtype == DType::kF16 ? f16_to_float(float_to_f16(v)) : v;
  }
  void make_plan(std::mt19937& random, bool row_is_token) {
    std::uniform_real_distribution<float> weight(0.1F, 1.0F);
    std::vector<std::vector<std::int32_t>> rows(p_.experts.size());
    for (int e = 0; e < p_.num_experts; ++e) {
      expert_begin_.push_back(static_cast<std::int32_t>(row_token_.size()));
      for (std::size_t t = 0; t < p_.experts.size(); ++t) {
        for (const int chosen : p_.experts[t]) {
          if (chosen != e) continue;
          rows[t].push_back(static_cast<std::int32_t>(row_token_.size()));
          row_token_.push_back(static_cast<std::int32_t>(t));
          row_weight_.push_back(weight(random));
          row_expert_.push_back(e);
        }
      }
      expert_rows_.push_back(static_cast<std::int32_t>(row_token_.size()) - expert_begin_.back());
    }
    expert_begin_.push_back(static_cast<std::int32_t>(row_token_.size()));
    token_begin_.push_back(0);
    if (row_is_token) {  // each row its own token, of weight 1: the sums are the rows themselves
      for (std::size_t r = 0; r < row_token_.size(); ++r) {
        token_row_.push_back(static_cast<std::int32_t>(r));
        token_begin_.push_back(static_cast<std::int32_t>(r) + 1);
      }
      row_weight_.assign(row_weight_.size(), 1.0F);
      return;
    }
    for (const auto& of : rows) {
      token_row_.insert(token_row_.end(), of.begin(), of.end());
      token_begin_.push_back(static_cast<std::int32_t>(token_row_.size()));
    }
  }
  std::unique_ptr<DeviceBytes> narrowed(const std::vector<float>& v) const {
    if (p_.dtype == DType::kF32) return std::make_unique<DeviceBytes>(v);
    std::vector<std::uint16_t> bits(v.size());
    std::transform(v.begin(), v.end(), bits.begin(), [&](float f) {
      return p_.dtype == DType::kBF16 ? float_to_bf16(f) : float_to_f16(f);
    });
    return std::make_unique<DeviceBytes>(bits);
  }
  void upload() {
    for (const auto* v : {&x_, &w13_, &w2_}) device_.push_back(narrowed(*v));
    for (const auto* v : {&b13_, &b2_}) device_.push_back(std::make_unique<DeviceBytes>(*v));
    for (const auto* v : {&expert_begin_, &expert_rows_, &row_token_}) {
      device_.push_back(std::make_unique<DeviceBytes>(*v));
    }
    device_.push_back(std::make_unique<DeviceBytes>(row_weight_));
    for (const auto* v : {&token_begin_, &token_row_}) {
      device_.push_back(std::make_unique<DeviceBytes>(*v));
    }
    const std::size_t rows = row_token_.size();
    device_.push_back(std::make_unique<DeviceBytes>(rows * static_cast<std::size_t>(p_.inner) * 4));
    device_.push_back(std::make_unique<DeviceBytes>(16));
    device_.push_back(
        std::make_unique<DeviceBytes>(std::vector<std::uint8_t>(sizeof(StreamingSync), 0)));
  }

  Problem p_;
  std::vector<float> w13_, w2_, b13_, b2_, x_, row_weight_;
  std::vector<std::int32_t> expert_begin_, expert_rows_, row_token_, token_begin_, token_row_;
  std::vector<int> row_expert_;
  std::vector<std::unique_ptr<DeviceBytes>> device_;
};

inline std::vector<double> Fixture::expected() const {
  const auto h = static_cast<std::size_t>(p_.hidden);
  const auto inner = static_cast<std::size_t>(p_.inner);
  const std::size_t halves = p_.gated ? 2 : 1;
  std::vector<double> out(p_.experts.size() * h);
  std::vector<double> act(inner);
  for (std::size_t r = 0; r < row_token_.size(); ++r) {
    const auto e = static_cast<std::size_t>(row_expert_[r]);
    const auto token = static_cast<std::size_t>(row_token_[r]);
    const float* x = x_.data() + (p_.packed ? r : token) * h;
    for (std::size_t j = 0; j < inner; ++j) {
      double v[2] = {};
      for (std::size_t half = 0; half < halves; ++half) {
        const std::size_t row = e * halves * inner + half * inner + j;
        if (p_.bias) v[half] = b13_[row];
        for (std::size_t k = 0; k < h; ++k) v[half] += double{w13_[row * h + k]} * x[k];
      }
      act[j] = activate(p_.activation, v[0], v[1], p_.gated, 1.702F, 7.0F);
    }
    for (std::size_t k = 0; k < h; ++k) {
      double y = p_.bias ? b2_[e * h + k] : 0.0;
      for (std::size_t j = 0; j < inner; ++j) y += double{w2_[(e * h + k) * inner + j]} * act[j];
      out[token * h + k] += double{row_weight_[r]} * y;
    }
  }
  return out;
}

}  // namespace switchyard

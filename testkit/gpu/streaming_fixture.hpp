#pragma once

// A streaming problem's data on both sides, and what the reference makes of it in double. Each run
// is made by one kernel, where the shape has it, and by two: the bits must agree.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "core/half.hpp"
#include "experts/gpu/streaming/streaming.hpp"
#include "reference/reference.hpp"
#include "testkit/gpu/device_array.hpp"

namespace switchyard {

/// An H200, whether there is one or not.
inline constexpr StreamingChip kHopperChip{.num_sms = 132,
                                           .shared_bytes_per_sm = 228 * 1024,
                                           .shared_bytes_per_block = 227 * 1024,
                                           .hopper = true};

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
    d.x = device_[0]->data();
    d.x_is_packed = p_.packed;
    d.w13 = device_[1]->data();
    d.w2 = device_[2]->data();
    if (p_.bias) {
      d.b13 = static_cast<const float*>(device_[3]->data());
      d.b2 = static_cast<const float*>(device_[4]->data());
    }
    d.expert_begin = static_cast<const std::int32_t*>(device_[5]->data());
    d.expert_rows = static_cast<const std::int32_t*>(device_[6]->data());
    d.row_token = static_cast<const std::int32_t*>(device_[7]->data());
    d.row_weight = static_cast<const float*>(device_[8]->data());
    d.token_begin = static_cast<const std::int32_t*>(device_[9]->data());
    d.token_row = static_cast<const std::int32_t*>(device_[10]->data());
    d.act = device_[11]->data();
    d.sums = device_[12]->data();
    d.sync = static_cast<StreamingSync*>(device_[13]->data());
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
    call.sums = sums.data();
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
          cudaMemcpy(host.data(), sums.data(), count * sizeof(V), cudaMemcpyDeviceToHost));
      return host;
    };
    const std::vector<V> host = result();
    EXPECT_TRUE(counters_are_zero());
    // In one kernel or in two: the bits are the same.
    StreamingChip chip = streaming_chip();
    chip.hopper = chip.hopper && call.path != StreamingPath::kPortable;
    shape = choose_streaming(call, chip);
    shape->whole = false;
    SWITCHYARD_CUDA(cudaMemset(sums.data(), 0xff, count * sizeof(V)));
    const std::vector<V> by_two = result();
    EXPECT_EQ(std::memcmp(host.data(), by_two.data(), count * sizeof(V)), 0);
    return host;
  }

  [[nodiscard]] bool counters_are_zero() const {
    StreamingSync sync;
    SWITCHYARD_CUDA(cudaMemcpy(&sync, device_[13]->data(), sizeof(sync), cudaMemcpyDeviceToHost));
    const StreamingSync zero{};
    return std::memcmp(&sync, &zero, sizeof(sync)) == 0;
  }

  /// [T, H] sums by the fixed order, each with its bound.
  std::vector<reference::Bounded> expected() const;
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
  /// Of one expert, for the reference.
  reference::ExpertMatrices matrices(std::size_t expert) const;
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

inline reference::ExpertMatrices Fixture::matrices(std::size_t expert) const {
  const auto h = static_cast<std::size_t>(p_.hidden);
  const auto inner = static_cast<std::size_t>(p_.inner);
  const std::size_t halves = p_.gated ? 2 : 1;
  const auto part = [](const auto& values, std::size_t begin, std::size_t count) {
    return std::span(values).subspan(begin, count);
  };
  const auto doubles = [](std::span<const float> v) {
    return std::vector<double>(v.begin(), v.end());
  };
  const auto floats = [](std::span<const float> v) {
    return std::vector<float>(v.begin(), v.end());
  };
  const std::size_t gate = expert * halves * inner;
  const std::size_t up = gate + inner;
  reference::ExpertMatrices m;
  m.gate = doubles(part(w13_, gate * h, inner * h));
  if (p_.gated) m.up = doubles(part(w13_, up * h, inner * h));
  m.down = doubles(part(w2_, expert * h * inner, h * inner));
  if (!p_.bias) return m;
  m.gate_bias = floats(part(b13_, gate, inner));
  if (p_.gated) m.up_bias = floats(part(b13_, up, inner));
  m.down_bias = floats(part(b2_, expert * h, h));
  return m;
}

inline std::vector<reference::Bounded> Fixture::expected() const {
  constexpr std::size_t kGroups = 8;
  const auto h = static_cast<std::size_t>(p_.hidden);
  const ExpertConfig config{.num_experts = p_.num_experts,
                            .hidden = p_.hidden,
                            .inner = p_.inner,
                            .gated = p_.gated,
                            .activation = p_.activation,
                            .bias = p_.bias};
  const ReductionOrder order{p_.num_experts, kGroups};
  std::vector<std::vector<reference::Bounded>> sums(
      kGroups, std::vector<reference::Bounded>(p_.experts.size() * h));
  std::size_t group = 0;
  reference::ExpertMatrices weights;
  for (std::size_t r = 0; r < row_token_.size(); ++r) {  // in the order of experts
    const int e = row_expert_[r];
    if (r == 0 || e != row_expert_[r - 1]) weights = matrices(static_cast<std::size_t>(e));
    while (e >= order.begin(static_cast<std::int32_t>(group) + 1)) ++group;
    const auto token = static_cast<std::size_t>(row_token_[r]);
    const auto x = std::span(x_).subspan((p_.packed ? r : token) * h, h);
    const auto row = reference::expert_row(config, weights, std::vector<double>(x.begin(), x.end()),
                                           {.compute = p_.dtype});
    for (std::size_t k = 0; k < h; ++k) {
      const reference::Bounded y = reference::convert(p_.dtype, row[k]);
      reference::Bounded& sum = sums[group][token * h + k];
      const double weight = row_weight_[r];
      sum = reference::rounded({sum.value + weight * y.value, sum.error + weight * y.error});
    }
  }
  for (std::size_t step = 1; step < kGroups; step *= 2) {
    for (std::size_t g = 0; g < kGroups; g += 2 * step) {
      for (std::size_t i = 0; i < sums[g].size(); ++i) {
        sums[g][i] = reference::add(sums[g][i], sums[g + step][i]);
      }
    }
  }
  return sums[0];
}

}  // namespace switchyard

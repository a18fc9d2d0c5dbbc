// The experts of a few tokens on the device against plain loops in double: awkward counts, sizes
// that no tile divides, every activation and type, both copy paths; and bits against the order of
// sums.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numbers>
#include <random>
#include <string>
#include <vector>

#include "core/cuda_check.hpp"
#include "core/half.hpp"
#include "experts/decode.hpp"

namespace switchyard {
namespace {

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
  DecodePath path = DecodePath::kBest;
  bool batch_invariant = false;
  bool plan_is_older = false;
};

std::vector<std::vector<int>> spread(int tokens, int top_k, int num_experts, unsigned seed) {
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

double activate(Activation kind, double g, double u, bool gated, double alpha, double limit) {
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

  DecodeParams params() const {
    DecodeParams d;
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
  std::vector<V> run(const DecodeParams& d, std::size_t rows_per_token = 1) const {
    const std::size_t count = static_cast<std::size_t>(d.num_tokens * d.hidden) * rows_per_token;
    DeviceBytes sums(count * sizeof(V));
    DecodeParams call = d;
    call.sums = sums.data;
    launch_decode(call, nullptr);
    SWITCHYARD_CUDA(cudaDeviceSynchronize());
    std::vector<V> host(count);
    SWITCHYARD_CUDA(cudaMemcpy(host.data(), sums.data, count * sizeof(V), cudaMemcpyDeviceToHost));
    return host;
  }

  std::vector<double> expected() const;
  const std::vector<float>& row_weight() const { return row_weight_; }
  const std::vector<int>& row_expert() const { return row_expert_; }
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
  }

  Problem p_;
  std::vector<float> w13_, w2_, b13_, b2_, x_, row_weight_;
  std::vector<std::int32_t> expert_begin_, expert_rows_, row_token_, token_begin_, token_row_;
  std::vector<int> row_expert_;
  std::vector<std::unique_ptr<DeviceBytes>> device_;
};

std::vector<double> Fixture::expected() const {
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

void expect_close(const Problem& problem) {
  SCOPED_TRACE(problem.name);
  const Fixture fixture(problem);
  const std::vector<float> got = fixture.run(fixture.params());
  const std::vector<double> want = fixture.expected();
  ASSERT_EQ(got.size(), want.size());
  double error = 0;
  double norm = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double d = got[i] - want[i];
    ASSERT_FALSE(std::isnan(d)) << "element " << i;
    if (problem.dtype == DType::kF32) {
      ASSERT_LE(std::abs(d), 1e-5 + 1e-3 * std::abs(want[i])) << "element " << i;
    }
    error += d * d;
    norm += want[i] * want[i];
  }
  // The intermediate and the rows are rounded to the compute type: 2^-9 or 2^-12 of each.
  const double limit = problem.dtype == DType::kBF16  ? 5e-3
                       : problem.dtype == DType::kF16 ? 7e-4
                                                      : 2e-6;
  EXPECT_LE(std::sqrt(error), limit * std::sqrt(norm));
}

std::vector<Problem> problems() {
  std::vector<Problem> list = {
      {.name = "one token", .experts = {{3, 0, 5}}},
      {.name = "a token without experts", .experts = {{}, {1, 2}, {}}},
      {.name = "repeated ids", .experts = {{2, 2, 2}, {2, 7, 7}}},
      {.name = "all 70 tokens to one expert", .experts = spread(70, 1, 1, 3), .inner = 72},
      {.name = "K = E", .experts = spread(5, 8, 8, 4)},
      {.name = "E = 1", .experts = spread(9, 1, 1, 5), .num_experts = 1},
      {.name = "many experts, short rows",
       .experts = spread(7, 6, 300, 6),
       .num_experts = 300,
       .hidden = 136,
       .inner = 24},
      {.name = "rows of many blocks",
       .experts = spread(4, 2, 4, 7),
       .num_experts = 4,
       .hidden = 7168,
       .inner = 256},
      {.name = "long sums",
       .experts = spread(3, 2, 3, 8),
       .num_experts = 3,
       .hidden = 2048,
       .inner = 2056},
      {.name = "many rows of few experts",
       .experts = spread(50, 2, 3, 9),
       .num_experts = 3,
       .hidden = 520,
       .inner = 392},
      {.name = "smallest", .experts = {{0}}, .num_experts = 1, .hidden = 8, .inner = 8},
  };
  const std::size_t shapes = list.size();
  for (std::size_t i = 0; i < shapes; ++i) {
    Problem p = list[i];
    p.dtype = DType::kF32;
    p.name += ", f32";
    p.plan_is_older = true;
    list.push_back(p);
    p = list[i];
    p.dtype = DType::kF16;
    p.path = DecodePath::kPortable;
    p.name += ", f16, portable";
    list.push_back(p);
  }
  list.push_back({.name = "f32, multiples of 4",
                  .experts = spread(6, 3, 8, 10),
                  .hidden = 1028,
                  .inner = 36,
                  .dtype = DType::kF32,
                  .bias = true});
  list.push_back({.name = "f32, portable",
                  .experts = spread(6, 3, 8, 10),
                  .hidden = 1028,
                  .inner = 36,
                  .dtype = DType::kF32,
                  .bias = true,
                  .path = DecodePath::kPortable});
  list.push_back({.name = "packed", .experts = spread(6, 3, 8, 11), .packed = true});
  for (int kind = 0; kind <= static_cast<int>(Activation::kClampedSwiglu); ++kind) {
    for (const bool gated : {true, false}) {
      const auto activation = static_cast<Activation>(kind);
      if (!gated && activation == Activation::kClampedSwiglu) continue;
      list.push_back({.name = std::string(to_string(activation)) + (gated ? "" : ", plain"),
                      .experts = spread(12, 3, 8, 12),
                      .dtype = DType::kF32,
                      .gated = gated,
                      .activation = activation,
                      .bias = true});
    }
  }
  return list;
}

TEST(Decode, EveryProblemMatchesLoopsInDouble) {
  for (const Problem& problem : problems()) expect_close(problem);
}

TEST(Decode, NoTokenIsNoWork) {
  const Fixture fixture({.name = "no token", .experts = {}});
  EXPECT_TRUE(fixture.run(fixture.params()).empty());
}

TEST(Decode, RowsAreAddedInTheFixedOrder) {
  // Few tokens are added a lane for each group, many a thread for each output.
  for (const int tokens : {11, 90}) {
    const DType dtype = tokens == 11 ? DType::kBF16 : DType::kF32;
    const Problem problem{
        .name = "order", .experts = spread(tokens, 9, 21, 13), .num_experts = 21, .dtype = dtype};
    const Fixture fixture(problem);
    const Fixture apart(problem, true);
    const std::vector<float> y = apart.run(apart.params());
    DecodeParams each = fixture.params();
    each.each_group = true;
    const std::vector<float> sums = fixture.run(fixture.params());
    const std::vector<float> groups = fixture.run(each, 8);
    const auto h = static_cast<std::size_t>(problem.hidden);
    const ReductionOrder order{21, 8};
    for (std::size_t t = 0; t < problem.experts.size(); ++t) {
      for (std::size_t k = 0; k < h; ++k) {
        float g[8] = {};
        for (int i = fixture.token_begin()[t]; i < fixture.token_begin()[t + 1]; ++i) {
          const auto row =
              static_cast<std::size_t>(fixture.token_row()[static_cast<std::size_t>(i)]);
          int group = 0;
          while (fixture.row_expert()[row] >= order.begin(group + 1)) ++group;
          g[group] = std::fma(fixture.row_weight()[row], y[row * h + k], g[group]);
        }
        const float want = ((g[0] + g[1]) + (g[2] + g[3])) + ((g[4] + g[5]) + (g[6] + g[7]));
        ASSERT_EQ(sums[t * h + k], want) << "token " << t << ", column " << k;
        for (std::size_t group = 0; group < 8; ++group) {
          ASSERT_EQ(groups[(t * 8 + group) * h + k], g[group]);
        }
      }
    }
  }
}

TEST(Decode, BitsDoNotChangeFromRunToRun) {
  const Fixture fixture({.name = "bits",
                         .experts = spread(24, 4, 32, 14),
                         .num_experts = 32,
                         .hidden = 1024,
                         .inner = 256});
  const std::vector<float> first = fixture.run(fixture.params());
  for (int repeat = 0; repeat < 50; ++repeat) {
    const std::vector<float> again = fixture.run(fixture.params());
    ASSERT_EQ(std::memcmp(first.data(), again.data(), first.size() * sizeof(float)), 0);
  }
}

TEST(Decode, WithBatchInvariantATokenDoesNotSeeTheBatch) {
  Problem many{.name = "batch",
               .experts = spread(40, 2, 4, 15),
               .num_experts = 4,
               .hidden = 512,
               .inner = 320,
               .batch_invariant = true};
  Problem one = many;
  one.experts.resize(1);
  const Fixture alone(one);
  // Weights of rows are drawn in the order of the plan: give token 0 the same in both.
  const Fixture among(many);
  DecodeParams a = among.params();
  const std::vector<float> in_batch = among.run(a);
  const Fixture rows_alone(one, true);
  const std::vector<float> y = rows_alone.run(rows_alone.params());
  std::vector<float> want(512);
  float g[8][512] = {};
  const ReductionOrder order{4, 8};
  for (int i = among.token_begin()[0]; i < among.token_begin()[1]; ++i) {
    const auto row = static_cast<std::size_t>(among.token_row()[static_cast<std::size_t>(i)]);
    int group = 0;
    while (among.row_expert()[row] >= order.begin(group + 1)) ++group;
    const auto local = static_cast<std::size_t>(i - among.token_begin()[0]);
    for (std::size_t k = 0; k < 512; ++k) {
      g[group][k] = std::fma(among.row_weight()[row], y[local * 512 + k], g[group][k]);
    }
  }
  for (std::size_t k = 0; k < 512; ++k) {
    const float sum =
        ((g[0][k] + g[1][k]) + (g[2][k] + g[3][k])) + ((g[4][k] + g[5][k]) + (g[6][k] + g[7][k]));
    ASSERT_EQ(in_batch[k], sum) << "column " << k;
  }
}

TEST(Decode, SixteenBitSumsAreTheRoundedOnes) {
  const Fixture fixture({.name = "round", .experts = spread(5, 3, 8, 16)});
  const std::vector<float> sums = fixture.run(fixture.params());
  DecodeParams d = fixture.params();
  d.sums_dtype = DType::kBF16;
  const auto bf16 = fixture.run<std::uint16_t>(d);
  d.sums_dtype = DType::kF16;
  const auto f16 = fixture.run<std::uint16_t>(d);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    ASSERT_EQ(bf16[i], float_to_bf16(sums[i]));
    ASSERT_EQ(f16[i], float_to_f16(sums[i]));
  }
}

TEST(Decode, AGraphFollowsTheRoutingOfEachReplay) {
  const Problem a{.name = "a", .experts = spread(6, 2, 8, 17)};
  Problem b = a;
  b.experts = spread(6, 2, 8, 18);
  const Fixture first(a);
  const Fixture second(b);
  const std::vector<float> want = second.run(second.params());
  DeviceBytes sums(want.size() * sizeof(float));
  DecodeParams d = first.params();
  d.sums = sums.data;
  cudaStream_t stream = nullptr;
  SWITCHYARD_CUDA(cudaStreamCreate(&stream));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  SWITCHYARD_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  launch_decode(d, stream);
  SWITCHYARD_CUDA(cudaStreamEndCapture(stream, &graph));
  SWITCHYARD_CUDA(cudaGraphInstantiate(&replay, graph, 0));
  SWITCHYARD_CUDA(cudaGraphLaunch(replay, stream));
  const DecodeParams other = second.params();
  const auto overwrite = [&](const void* to, const void* from, std::int64_t count) {
    SWITCHYARD_CUDA(cudaMemcpyAsync(const_cast<void*>(to), from,
                                    static_cast<std::size_t>(count) * 4, cudaMemcpyDeviceToDevice,
                                    stream));
  };
  overwrite(d.expert_begin, other.expert_begin, 9);
  overwrite(d.expert_rows, other.expert_rows, 8);
  overwrite(d.row_token, other.row_token, 12);
  overwrite(d.row_weight, other.row_weight, 12);
  overwrite(d.token_begin, other.token_begin, 7);
  overwrite(d.token_row, other.token_row, 12);
  SWITCHYARD_CUDA(cudaGraphLaunch(replay, stream));
  SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
  std::vector<float> got(want.size());
  SWITCHYARD_CUDA(cudaMemcpy(got.data(), sums.data, got.size() * 4, cudaMemcpyDeviceToHost));
  EXPECT_EQ(got, want);
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST(Decode, ManyRowsOfAnExpertAreLeftToTheGroupedGemm) {
  const DecodeChip hopper{.num_sms = 132, .hopper = true};
  const DecodeChip other{.num_sms = 108};
  DecodeParams p;
  p.num_experts = 8;
  const auto worth = [&](DType dtype, std::int64_t rows, const DecodeChip& chip) {
    p.dtype = dtype;
    p.max_assignments = rows;
    return worth_streaming(p, chip);
  };
  EXPECT_TRUE(worth(DType::kBF16, 192, hopper));
  EXPECT_FALSE(worth(DType::kBF16, 193, hopper));
  EXPECT_FALSE(worth(DType::kF16, 193, other));
  EXPECT_TRUE(worth(DType::kF32, 64, hopper));
  EXPECT_FALSE(worth(DType::kF32, 65, hopper));
  EXPECT_TRUE(worth(DType::kF32, 2000, other));
}

TEST(Decode, WhatCannotRunIsRefusedBeforeAnyLaunch) {
  const Fixture fixture({.name = "refuse", .experts = spread(2, 1, 8, 19)});
  const auto code = [](const DecodeParams& d) {
    try {
      launch_decode(d, nullptr);
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::kIo;  // never thrown here
  };
  DecodeParams d = fixture.params();
  d.hidden = 260;
  EXPECT_EQ(code(d), ErrorCode::kInvalidArgument);
  d = fixture.params();
  d.w2 = static_cast<const std::byte*>(d.w2) + 2;
  EXPECT_EQ(code(d), ErrorCode::kInvalidArgument);
  d = fixture.params();
  d.num_experts = 1025;
  EXPECT_EQ(code(d), ErrorCode::kInvalidArgument);
  d = fixture.params();
  d.max_rows = d.max_assignments = 1 << 20;
  EXPECT_EQ(code(d), ErrorCode::kUnsupported);
}

}  // namespace
}  // namespace switchyard

// PERFT's adapters on a GPU beside their definition in double and its differences.
#include <gtest/gtest.h>

#include "switchyard/comm.hpp"
#include "testkit/expect_error.hpp"
#include "testkit/gpu/captured_graph.hpp"
#include "testkit/gpu/device_array.hpp"
#include "tests/layer/perft_case.hpp"

namespace switchyard::test {
namespace {

/// Widths that need zeros beside them and such that do not; tokens that fill no tile.
std::vector<PerftCase> gpu_cases() {
  const auto config = [](PerftKind kind, std::int32_t adapters, std::int64_t rank,
                         Activation activation = Activation::kIdentity) {
    return PerftConfig{.kind = kind,
                       .num_adapters = adapters,
                       .hidden = 24,
                       .rank = rank,
                       .alpha = 2 * static_cast<float>(rank),
                       .activation = activation};
  };
  std::vector<PerftCase> cases;
  const auto add = [&](PerftConfig of, std::int64_t tokens, const RouterConfig& router = {}) {
    of.router = router;
    PerftCase c{.config = of, .num_tokens = tokens};
    c.fill(cases.size() + 1);
    cases.push_back(c);
  };
  add(config(PerftKind::kRouted, 4, 4), 9, top_k(4, 2));
  add(config(PerftKind::kRouted, 3, 5, Activation::kGelu), 33, top_k(3, 1, true));
  add(config(PerftKind::kRouted, 2, 64, Activation::kRelu), 5, top_k(2, 2));
  add(config(PerftKind::kEmbedded, 5, 8), 17, top_k(5, 3));
  add(config(PerftKind::kDense, 3, 16, Activation::kSilu), 9);
  add(config(PerftKind::kDense, 40, 1), 6);
  add(config(PerftKind::kShared, 1, 17), 12);
  return cases;
}

/// Rows of many tiles, and widths that fill none.
std::vector<PerftCase> large_cases() {
  std::vector<PerftCase> cases;
  for (const PerftKind kind : {PerftKind::kRouted, PerftKind::kEmbedded, PerftKind::kDense}) {
    PerftCase c{.config = {.kind = kind,
                           .num_adapters = 6,
                           .hidden = 264,
                           .rank = 20,
                           .router = top_k(6, 2)},
                .num_tokens = 700};
    c.fill(cases.size() + 20);
    cases.push_back(c);
  }
  return cases;
}

/// The arrays of a case on the device, and calls with them.
class OnGpu {
 public:
  explicit OnGpu(const PerftCase& c, float start = 1e30F)
      : c_(c),
        x_(c.x),
        base_(c.base),
        dy_(c.dy),
        weight_(c.weight),
        expert_(c.expert),
        kept_(c.kept),
        y_(Floats(c.x.size(), 1e30F)),
        dx_(Floats(c.x.size(), 1e30F)),
        da_(Floats(c.a.size(), start)),
        db_(Floats(c.b.size(), start)),
        dgate_(Floats(c.gate.size(), start)),
        dweight_(Floats(c.weight.size(), 1e30F)) {}

  [[nodiscard]] PerftForwardArgs forward(SavedForward* saved, cudaStream_t stream = nullptr) const {
    const std::int64_t columns = c_.columns();
    PerftForwardArgs args{
        .tokens = rows(x_), .base = rows(base_), .out = rows(y_), .saved = saved, .stream = stream};
    if (c_.config.kind != PerftKind::kEmbedded) return args;
    args.expert = expert_.matrix(c_.num_tokens, columns);
    args.weight = weight_.matrix(c_.num_tokens, columns);
    if (!c_.kept.empty()) args.kept = kept_.vector();
    return args;
  }
  [[nodiscard]] PerftBackwardArgs backward(SavedForward& saved,
                                           cudaStream_t stream = nullptr) const {
    PerftBackwardArgs args{
        .saved = &saved,
        .dout = rows(dy_),
        .dtokens = rows(dx_),
        .da = {da_.bytes(), DType::kF32, c_.config.num_adapters * c_.config.rank, c_.config.hidden},
        .db = {db_.bytes(), DType::kF32, c_.config.num_adapters * c_.config.hidden, c_.config.rank},
        .accumulate = c_.accumulate,
        .stream = stream};
    if (c_.config.kind == PerftKind::kEmbedded) {
      args.dweight = dweight_.matrix(c_.num_tokens, c_.columns());
    }
    if (!c_.gate.empty()) {
      args.dgate = {dgate_.bytes(), DType::kF32, c_.config.num_adapters, c_.config.hidden};
    }
    return args;
  }
  void set(const PerftCase& c) const {
    x_.set(c.x);
    dy_.set(c.dy);
  }
  [[nodiscard]] PerftResults results() const {
    return {y_.get(), dx_.get(), da_.get(), db_.get(), dgate_.get(), dweight_.get()};
  }

 private:
  [[nodiscard]] RawMatrix rows(const DeviceArray<float>& array) const {
    return {array.bytes(), DType::kF32, c_.num_tokens, c_.config.hidden};
  }

  PerftCase c_;
  DeviceArray<float> x_, base_, dy_, weight_;
  DeviceArray<std::int32_t> expert_;
  DeviceArray<std::uint8_t> kept_;
  DeviceArray<float> y_, dx_, da_, db_, dgate_, dweight_;
};

PerftOptions gpu_options(const PerftCase& c) {
  return {.backend = Backend::kCuda, .compute = c.compute, .losses = c.losses};
}

PerftResults run_on_gpu(const PerftCase& c, float start = 1e30F, Communicator* ranks = nullptr) {
  const OnGpu arrays(c, start);
  PerftAdapters adapters(c.model(), gpu_options(c), ranks);
  SavedForward saved(c.recompute);
  adapters.forward(arrays.forward(&saved));
  adapters.check();
  adapters.backward(arrays.backward(saved));
  adapters.check();
  return arrays.results();
}

/// The tokens [begin, end) of a case.
PerftCase tokens_of(const PerftCase& c, std::int64_t begin, std::int64_t end) {
  PerftCase part = c;
  part.num_tokens = end - begin;
  const auto cut = [&](auto& values) {
    if (values.empty()) return;
    const std::int64_t of_token = std::ssize(values) / c.num_tokens;
    values = {values.begin() + begin * of_token, values.begin() + end * of_token};
  };
  cut(part.x), cut(part.base), cut(part.dy), cut(part.weight), cut(part.expert), cut(part.kept);
  return part;
}

TEST(GpuPerft, OutputsAreThoseOfTheReferenceAndGradientsItsDifferences) {
  using Problem = reference::PerftProblem;
  for (PerftCase c : gpu_cases()) {
    SCOPED_TRACE(testing::Message() << to_string(c.config.kind) << " of " << c.config.rank);
    const Doubles y = reference::perft(c.in_double()).y;
    const Doubles dx = differences(c, &Problem::x), da = differences(c, &Problem::a),
                  db = differences(c, &Problem::b), dgate = differences(c, &Problem::gate);
    Doubles dweight = differences(c, &Problem::weight);
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      c.compute = dtype;
      const double bound = dtype == DType::kF32 ? 2e-5 : dtype == DType::kF16 ? 1e-2 : 6e-2;
      const PerftResults r = run_on_gpu(c);
      expect_near(r.y, y, bound, "y");
      if (dtype != DType::kF32 && c.config.kind == PerftKind::kRouted) continue;  // other choices
      expect_near(r.dx, dx, bound, "dx");
      expect_near(r.da, da, bound, "da");
      expect_near(r.db, db, bound, "db");
      expect_near(r.dgate, dgate, bound, "dgate");
      expect_near(r.dweight, dweight, bound, "dweight");
    }
  }
}

TEST(GpuPerft, BitsAreThoseOfTheCallBefore) {
  for (const PerftCase& c : gpu_cases()) {
    const PerftResults first = run_on_gpu(c);
    EXPECT_TRUE(run_on_gpu(c) == first);
  }
}

/// A forward that keeps no pre-activations may be streamed, whose sums have an order of their own.
TEST(GpuPerft, GradientsHaveTheSameBitsWhateverIsKept) {
  for (PerftCase c : gpu_cases()) {
    SCOPED_TRACE(testing::Message() << to_string(c.config.kind) << " of " << c.config.rank);
    const PerftResults kept = run_on_gpu(c);
    c.recompute = Recompute::kActivationInput;
    const PerftResults made_again = run_on_gpu(c);
    EXPECT_EQ(made_again.dx, kept.dx);
    EXPECT_EQ(made_again.da, kept.da);
    EXPECT_EQ(made_again.db, kept.db);
    EXPECT_EQ(made_again.dgate, kept.dgate);
    EXPECT_EQ(made_again.dweight, kept.dweight);
    expect_near(made_again.y, Doubles(kept.y.begin(), kept.y.end()), 2e-6, "y");
  }
}

/// The CPU's, which tests/layer/perft_test.cpp holds against the reference.
TEST(GpuPerft, ManyTokensHaveTheNumbersOfACpu) {
  for (PerftCase c : large_cases()) {
    SCOPED_TRACE(to_string(c.config.kind));
    const PerftResults want = run_perft(c);
    const auto doubles = [](const Floats& values) { return Doubles(values.begin(), values.end()); };
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      c.compute = dtype;
      const double bound = dtype == DType::kF32 ? 2e-5 : 6e-2;
      const PerftResults r = run_on_gpu(c);
      if (dtype != DType::kF32 && c.config.kind == PerftKind::kRouted) continue;  // other choices
      expect_near(r.y, doubles(want.y), bound, "y");
      expect_near(r.dx, doubles(want.dx), bound, "dx");
      expect_near(r.da, doubles(want.da), bound, "da");
      expect_near(r.db, doubles(want.db), bound, "db");
      expect_near(r.dgate, doubles(want.dgate), bound, "dgate");
      expect_near(r.dweight, doubles(want.dweight), bound, "dweight");
    }
  }
}

TEST(GpuPerft, GradientsAreAddedToWhatIsThereOnce) {
  for (PerftCase c : gpu_cases()) {
    const PerftResults plain = run_on_gpu(c);
    c.accumulate = true;
    const PerftResults added = run_on_gpu(c, 2.0F);
    const auto expect_sum = [](const Floats& sum, const Floats& part) {
      for (std::size_t i = 0; i < part.size(); ++i) ASSERT_EQ(sum[i], 2.0F + part[i]) << i;
    };
    expect_sum(added.da, plain.da);
    expect_sum(added.db, plain.db);
    for (std::size_t i = 0; i < plain.dgate.size(); ++i) {
      ASSERT_NEAR(added.dgate[i], 2.0F + plain.dgate[i], 1e-5F);
    }
  }
}

TEST(GpuPerft, WhatTheLayerHasDroppedHasNoAdapter) {
  PerftCase c = gpu_cases()[3], dropped = c;
  for (std::size_t i = 0; i < c.expert.size(); ++i) {
    dropped.kept.push_back(i % 3 == 0 ? 0 : 1);
    if (i % 3 == 0) c.expert[i] = -1;
  }
  EXPECT_TRUE(run_on_gpu(dropped) == run_on_gpu(c));
}

TEST(GpuPerft, NoTokenLeavesGradientsOfNothing) {
  for (PerftCase c : gpu_cases()) {
    c.num_tokens = 0;
    c.x.clear(), c.base.clear(), c.dy.clear(), c.weight.clear(), c.expert.clear();
    const PerftResults r = run_on_gpu(c);
    EXPECT_EQ(r.da, Floats(r.da.size(), 0.0F));
    EXPECT_EQ(r.db, Floats(r.db.size(), 0.0F));
  }
}

TEST(GpuPerft, AGraphOfBothWaysServesNewTokens) {
  cudaStream_t stream = nullptr;
  SWITCHYARD_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (const PerftCase& c : gpu_cases()) {
    PerftCase other = c;
    std::reverse(other.x.begin(), other.x.end());
    std::reverse(other.dy.begin(), other.dy.end());
    const PerftResults want = run_on_gpu(other);
    const OnGpu arrays(c);
    PerftOptions options = gpu_options(c);
    options.max_tokens = c.num_tokens;
    PerftAdapters adapters(c.model(), options);
    SavedForward saved(c.recompute);
    const auto both = [&] {
      adapters.forward(arrays.forward(&saved, stream));
      adapters.backward(arrays.backward(saved, stream));
    };
    both();
    adapters.check();
    const CapturedGraph graph(stream, both);
    arrays.set(other);
    graph.launch();
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
    EXPECT_TRUE(arrays.results() == want) << to_string(c.config.kind);
  }
  SWITCHYARD_CUDA(cudaStreamDestroy(stream));
}

/// Adapters that read A and B where a caller has them on the GPU.
struct NumbersOnTheGpu {
  explicit NumbersOnTheGpu(const PerftCase& c)
      : a(c.a), b(c.b), adapters(model(c), gpu_options(c)) {}
  /// Others, in the case too.
  void change(PerftCase& c) const {
    std::reverse(c.a.begin(), c.a.end());
    std::reverse(c.b.begin(), c.b.end());
    a.set(c.a);
    b.set(c.b);
  }
  [[nodiscard]] PerftModel model(const PerftCase& c) const {
    PerftModel model = c.model();
    model.adapters =
        make_device_source(c.config.experts(), DType::kF32, a.data(), b.data(), nullptr, nullptr);
    return model;
  }

  DeviceArray<float> a, b;
  PerftAdapters adapters;
};

TEST(GpuPerft, NumbersOnTheGpuAreReadByEveryForward) {
  for (PerftCase c : gpu_cases()) {
    NumbersOnTheGpu numbers(c);
    for (int step = 0; step < 2; ++step) {
      const OnGpu arrays(c);
      SavedForward saved;
      numbers.adapters.forward(arrays.forward(&saved));
      numbers.adapters.backward(arrays.backward(saved));
      EXPECT_TRUE(arrays.results() == run_on_gpu(c)) << step;
      numbers.change(c);
    }
  }
}

/// Forwards that keep nothing, whose experts may read the weights before their predecessor ends.
TEST(GpuPerft, NewNumbersAreSeenByFewTokensAtOnce) {
  for (PerftCase c : gpu_cases()) {
    NumbersOnTheGpu numbers(c);
    const OnGpu arrays(c);
    for (int step = 0; step < 20; ++step) {
      numbers.adapters.forward(arrays.forward(nullptr));
      expect_near(arrays.results().y, reference::perft(c.in_double()).y, 2e-5, "y");
      numbers.change(c);
    }
  }
}

TEST(GpuPerft, OverRanksGradientsAreSumsAlikeOnAll) {
  for (PerftCase c : gpu_cases()) {
    SCOPED_TRACE(testing::Message() << to_string(c.config.kind) << " of " << c.config.rank);
    for (const bool accumulate : {false, true}) {
      c.accumulate = accumulate;
      const float start = accumulate ? 2.0F : 1e30F;
      const PerftResults want = run_on_gpu(c, start);
      std::vector<PerftResults> of(2);
      run_ranks(2, [&](Communicator& communicator) {
        const int r = communicator.rank();
        const PerftCase part = tokens_of(c, r * c.num_tokens / 2, (r + 1) * c.num_tokens / 2);
        of[at(r)] = run_on_gpu(part, start, &communicator);
      });
      EXPECT_TRUE(of[0].da == of[1].da && of[0].db == of[1].db && of[0].dgate == of[1].dgate);
      Floats y = of[0].y, dx = of[0].dx;
      y.insert(y.end(), of[1].y.begin(), of[1].y.end());
      dx.insert(dx.end(), of[1].dx.begin(), of[1].dx.end());
      const auto doubles = [](const Floats& values) {
        return Doubles(values.begin(), values.end());
      };
      expect_near(y, doubles(want.y), 2e-6, "y");
      expect_near(dx, doubles(want.dx), 3e-6, "dx");
      expect_near(of[0].da, doubles(want.da), 3e-6, "da");
      expect_near(of[0].db, doubles(want.db), 3e-6, "db");
      expect_near(of[0].dgate, doubles(want.dgate), 3e-6, "dgate");
    }
  }
}

TEST(GpuPerft, RefusesByNameWhatItDoesNotTake) {
  PerftCase c = gpu_cases()[4];
  PerftAdapters adapters(c.model(), gpu_options(c));
  const OnGpu arrays(c);
  PerftForwardArgs args = arrays.forward(nullptr);
  args.base = raw_of(std::as_const(c.base), c.config.hidden);
  expect_error(ErrorCode::kInvalidArgument, "base lies in host memory",
               [&] { adapters.forward(args); });
  c.config.hidden = 10;
  c.fill(1);
  expect_error(ErrorCode::kUnsupported, "hidden=10 in f32",
               [&] { PerftAdapters(c.model(), gpu_options(c)); });
}

}  // namespace
}  // namespace switchyard::test

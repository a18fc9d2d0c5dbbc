#pragma once

// One rank of an exchange between GPUs whose results are compared, bit by bit, with what the host's
// ExpertParallel makes of the same input.

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "comm/device/device_exchange.hpp"
#include "comm/host/wire.hpp"
#include "testkit/exchange_checker.hpp"
#include "testkit/gpu/captured_graph.hpp"
#include "testkit/gpu/device_array.hpp"

namespace switchyard {

/// How sums come home: fetched from the window where they can be, or sent all the same.
enum class WayHome : std::uint8_t { kPullIfPossible, kPush };

/// How a test's ranks exchange.
struct ExchangeWay {
  ExchangeWay(ExchangeMode its_mode, WayHome its_home = WayHome::kPullIfPossible)  // NOLINT
      : mode(its_mode), home(its_home) {}
  ExchangeMode mode;
  WayHome home;
};

/// One rank of an exchange between GPUs, checked against the host's.
class DeviceChecker {
 public:
  DeviceChecker(const ExchangeProblem& problem, Communicator& comm, ExchangeWay way,
                std::chrono::milliseconds timeout = std::chrono::seconds(20),
                DeviceEngine engine = DeviceEngine::kPeer)
      : problem_(problem), comm_(comm), host_(comm, problem.config), way_home_(way.home) {
    groups_ = problem.config.rank_invariant ? groups_per_rank(problem) : 1;
    SWITCHYARD_CUDA(cudaSetDevice(device()));
    SWITCHYARD_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    const ExpertParallelConfig& c = problem.config;
    const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
    x_ = std::make_unique<DeviceBytes>(size(c.max_tokens * c.hidden * 4), stream_);
    expert_ = std::make_unique<DeviceBytes>(size(c.max_tokens * c.top_k * 4), stream_);
    weight_ = std::make_unique<DeviceBytes>(size(c.max_tokens * c.top_k * 4), stream_);
    kept_ = std::make_unique<DeviceBytes>(size(c.max_tokens * c.top_k), stream_);
    partials_ = std::make_unique<DeviceBytes>(
        size(comm.size() * c.max_tokens * groups_ * c.hidden * 4), stream_);
    shared_ = std::make_unique<DeviceBytes>(size(c.max_tokens * c.hidden * 4), stream_);
    out_ = std::make_unique<DeviceBytes>(size(c.max_tokens * c.hidden * 4), stream_);
    device_ = std::make_unique<DeviceExchange>(
        comm, c,
        DeviceExchangeOptions{
            .device = device(), .mode = way.mode, .engine = engine, .ctas = 4, .timeout = timeout});
  }
  ~DeviceChecker() {
    try {
      comm_.barrier("no kernel runs any more");  // cudaFree waits for all of the device
    } catch (const std::exception&) {
    }
    cudaStreamDestroy(stream_);
  }
  DeviceChecker(const DeviceChecker&) = delete;
  DeviceChecker& operator=(const DeviceChecker&) = delete;

  DeviceExchange& device_exchange() { return *device_; }
  void end_exchange() { device_.reset(); }
  cudaStream_t stream() { return stream_; }

  void set_input(int epoch) {
    input_ = make_input(problem_, comm_.rank(), epoch);
    x_->set(input_.x);
    expert_->set(input_.expert);
    weight_->set(input_.weight);
    kept_->set(input_.kept);
  }
  DeviceReceived dispatch() {
    const std::int64_t tokens = input_.num_tokens;
    const std::int64_t top_k = problem_.config.top_k;
    return device_->dispatch(
        {.x = {x_->as<std::byte>(), problem_.config.dtype, tokens, problem_.config.hidden},
         .expert = {expert_->as<std::int32_t>(), {tokens, top_k}},
         .weight = {weight_->as<float>(), {tokens, top_k}},
         .kept = {kept_->as<std::uint8_t>(), {tokens, top_k}},
         .execution = {.backend = Backend::kCuda, .stream = stream_}});
  }
  void set_way_home(WayHome way) { way_home_ = way; }
  /// Adds made-up rows of shared experts.
  void add_shared() { adds_shared_ = true; }

  void combine(const DeviceReceived& received) {
    const std::int64_t hidden = problem_.config.hidden;
    device_->combine(
        {.partials = {partials(), partials_type(), received.x.rows * groups_, hidden},
         .shared = {adds_shared_ ? shared_->as<float>() : nullptr,
                    {adds_shared_ ? input_.num_tokens : 0, hidden}},
         .out = {out_->as<std::byte>(), DType::kF32, input_.num_tokens, problem_.config.hidden},
         .execution = {.backend = Backend::kCuda, .stream = stream_}});
  }
  void synchronize() {
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream_));
    device_->check();
  }

  void run(int epoch) {
    set_input(epoch);
    const DeviceReceived received = dispatch();
    synchronize();
    check_rows(received);
    if (adds_shared_) set_shared(epoch);
    combine(received);
    synchronize();
    check_out();
  }

 private:
  [[nodiscard]] int device() const { return comm_.rank() % std::max(1, num_devices()); }
  [[nodiscard]] std::byte* partials() const {
    std::byte* const window = device_->place_of_partials().data;
    const bool pulled = way_home_ == WayHome::kPullIfPossible && window != nullptr;
    return pulled ? window : partials_->as<std::byte>();
  }
  void set_shared(int epoch) {
    host_shared_.clear();
    for (std::int64_t i = 0; i < input_.num_tokens * problem_.config.hidden; ++i) {
      host_shared_.push_back(0.25F * static_cast<float>((i * 7 + epoch) % 33 - 16));
    }
    shared_->set(host_shared_);
  }
  [[nodiscard]] DType partials_type() const {
    const DType wire = problem_.config.combine_wire;
    return wire == DType::kF8E4M3 ? DType::kF32 : wire;
  }

  /// The device's rows equal the host's; then makes partial sums of them, for both.
  void check_rows(const DeviceReceived& received) {
    const ExpertParallelConfig& c = problem_.config;
    const std::int64_t tokens = input_.num_tokens;
    const Received want = host_.dispatch({.x = {input_.x.data(), c.dtype, tokens, c.hidden},
                                          .expert = {input_.expert.data(), {tokens, c.top_k}},
                                          .weight = {input_.weight.data(), {tokens, c.top_k}},
                                          .kept = {input_.kept.data(), {tokens, c.top_k}}});
    EXPECT_EQ(copy_out<std::int64_t>(received.num_rows, 1, stream_)[0], want.x.rows);
    EXPECT_EQ(copy_out<std::int64_t>(received.dropped_rows, 1, stream_)[0], want.dropped_rows);
    const std::int64_t places = received.x.rows;
    const auto x = copy_out<std::byte>(received.x.data, received.x.bytes(), stream_);
    const auto scale = copy_out<float>(received.scale.data, received.scale.size(), stream_);
    const auto ids = copy_out<std::int32_t>(received.expert.data, places * c.top_k, stream_);
    const auto weights = copy_out<float>(received.weight.data, places * c.top_k, stream_);
    const bool fixed = device_->mode() == ExchangeMode::kLowLatency;
    std::vector<std::byte> row(static_cast<std::size_t>(c.hidden * size_of(c.dtype)));
    std::vector<bool> used(static_cast<std::size_t>(places), false);
    host_partials_.clear();
    const std::int64_t partial_bytes = groups_ * c.hidden * size_of(partials_type());
    std::vector<std::byte> device_partials(static_cast<std::size_t>(places * partial_bytes));
    for (int source = 0; source < comm_.size(); ++source) {
      for (auto i = want.source_begin[source]; i < want.source_begin[source + 1]; ++i) {
        const std::int64_t place =
            fixed ? source * c.max_tokens + i - want.source_begin[source] : i;
        used[static_cast<std::size_t>(place)] = true;
        const auto first = static_cast<std::size_t>(place * c.top_k);
        for (std::int32_t k = 0; k < c.top_k; ++k) {
          const auto at = first + static_cast<std::size_t>(k);
          ASSERT_EQ(ids[at], want.expert.row(i)[k]) << "row " << i;
          ASSERT_EQ(weights[at], want.weight.row(i)[k]);
        }
        decode_row(&x[static_cast<std::size_t>(place * received.x.row_bytes())], received.x.dtype,
                   scale.data() + place * received.scale.shape[1], row.data(), c.dtype, c.hidden);
        ASSERT_EQ(std::memcmp(row.data(), want.x.row(i), row.size()), 0) << "row " << i;
        make_partial(want, i, device_partials.data() + place * partial_bytes);
      }
    }
    for (std::int64_t place = 0; place < places; ++place) {
      if (used[static_cast<std::size_t>(place)]) continue;
      for (std::int32_t k = 0; k < c.top_k; ++k) {
        ASSERT_EQ(ids[static_cast<std::size_t>(place * c.top_k + k)], -1) << "place " << place;
      }
    }
    SWITCHYARD_CUDA(cudaMemcpyAsync(partials(), device_partials.data(), device_partials.size(),
                                    cudaMemcpyHostToDevice, stream_));
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream_));
  }

  void make_partial(const Received& received, std::int64_t i, std::byte* out) {
    const std::int64_t hidden = problem_.config.hidden;
    std::vector<float> x;
    for (std::int64_t h = 0; h < hidden; ++h) {
      x.push_back(load_float(received.x.row(i), received.x.dtype, h));
    }
    const std::vector<float> sums = partial_rows(problem_, comm_.rank(), false, x.data(),
                                                 received.expert.row(i), received.weight.row(i));
    for (std::int64_t h = 0; h < groups_ * hidden; ++h) {
      store_float(out, partials_type(), h, sums[static_cast<std::size_t>(h)]);
    }
    const std::int64_t bytes = groups_ * hidden * size_of(partials_type());
    host_partials_.insert(host_partials_.end(), out, out + bytes);
  }

  void check_out() {
    const std::int64_t hidden = problem_.config.hidden;
    const std::int64_t tokens = input_.num_tokens;
    const auto rows = std::ssize(host_partials_) / (hidden * size_of(partials_type()));
    std::vector<float> want(static_cast<std::size_t>(tokens * hidden));
    host_.combine(
        {.partials = {host_partials_.data(), partials_type(), rows, hidden},
         .shared = {adds_shared_ ? host_shared_.data() : nullptr,
                    {adds_shared_ ? tokens : 0, hidden}},
         .out = {reinterpret_cast<std::byte*>(want.data()), DType::kF32, tokens, hidden}});
    const auto got = copy_out<float>(out_->as<float>(), tokens * hidden, stream_);
    for (std::size_t i = 0; i < want.size(); ++i) {
      ASSERT_EQ(got[i], want[i]) << "element " << i;
    }
  }

  const ExchangeProblem& problem_;
  Communicator& comm_;
  ExpertParallel host_;
  WayHome way_home_;
  cudaStream_t stream_ = nullptr;
  RankInput input_;
  std::vector<std::byte> host_partials_;
  std::vector<float> host_shared_;
  std::int64_t groups_ = 1;  ///< Rows that come home for one that was received.
  bool adds_shared_ = false;
  std::unique_ptr<DeviceBytes> x_, expert_, weight_, kept_, partials_, shared_, out_;
  std::unique_ptr<DeviceExchange> device_;
};

/// Two exchanges in a graph, replayed with other routing: no kernel may find anything wrong.
/// Collective.
inline void replay_twice_in_a_graph(DeviceChecker& checker, Communicator& comm, int replays) {
  checker.set_input(0);
  const CapturedGraph graph(checker.stream(), [&] {
    for (int i = 0; i < 2; ++i) checker.combine(checker.dispatch());
  });
  comm.barrier("captured");
  for (int replay = 0; replay < replays; ++replay) {
    checker.set_input(replay);
    graph.launch();
    checker.synchronize();
  }
  comm.barrier("replayed");
}

inline ExchangeProblem problem_of(int num_ranks, std::int32_t num_experts, std::int32_t top_k,
                                  std::int64_t hidden, std::int64_t max_tokens) {
  return {
      .name = fmt::format("R{} E{} K{} H{} T{}", num_ranks, num_experts, top_k, hidden, max_tokens),
      .num_ranks = num_ranks,
      .config = {.num_experts = num_experts,
                 .top_k = top_k,
                 .hidden = hidden,
                 .max_tokens = max_tokens,
                 .dtype = DType::kBF16,
                 .combine_wire = DType::kBF16}};
}

}  // namespace switchyard

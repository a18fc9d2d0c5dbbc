#pragma once

// A layer's step of training over ranks on GPUs, for its tests: ranks are threads.

#include <cstdlib>
#include <functional>
#include <optional>
#include <vector>

#include "switchyard/device.hpp"
#include "switchyard/layer.hpp"
#include "testkit/gpu/made_up_layer.hpp"

namespace switchyard::test {

/// The driver reads these when it is first called: no kernel is loaded while another spins, and
/// every rank's stream has a queue of its own.
[[maybe_unused]] inline const bool kPrepared = setenv("CUDA_MODULE_LOADING", "EAGER", 1) == 0 &&
                                               setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1) == 0;

inline constexpr std::int64_t kHidden = 64;
inline constexpr std::int64_t kInner = 48;
inline constexpr std::int64_t kShared = 32;
inline constexpr std::int32_t kTopK = 3;
/// So that `auto` takes the throughput mode; fewer take low latency.
inline constexpr std::int64_t kManyTokens = 600;

inline LayerConfig layer_config(std::int32_t num_experts) {
  LayerConfig config;
  config.router = {.num_experts = num_experts, .kind = TopKRouter{.top_k = kTopK}};
  config.experts = {.num_experts = num_experts, .hidden = kHidden, .inner = kInner};
  config.shared = config.experts;
  config.shared.num_experts = 1;
  config.shared.inner = kShared;
  config.shared_gated = true;
  return config;
}

struct Gradients {
  std::vector<float> dtokens{}, dweight{}, w13{}, w2{}, gate{}, shared13{}, shared_gate{};

  friend bool operator==(const Gradients&, const Gradients&) = default;
};

/// A rank's layer with its share of some tokens, forward and back on a stream of its own.
class Trainer {
 public:
  /// @param begin  Tokens of rank r: [begin[r], begin[r + 1]).
  Trainer(const MadeUp& made, LayerOptions options, Communicator* ranks,
          const std::vector<std::int64_t>& begin, DType dtype = DType::kBF16)
      : rank_(ranks == nullptr ? 0 : ranks->rank()),
        begin_(begin[index(rank_)]),
        num_tokens_(begin[index(rank_) + 1] - begin_),
        all_tokens_(begin.back()),
        dtype_(dtype),
        tokens_(index(num_tokens_ * kHidden * size_of(dtype))),
        dout_(tokens_.size()),
        out_(index(num_tokens_ * kHidden)),
        dtokens_(out_.size()),
        dweight_(index(num_tokens_ * kTopK)) {
    SWITCHYARD_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    options.backend = Backend::kCuda;
    num_experts_ = made.model.config.router.num_experts;
    for (std::size_t r = 0; r + 1 < begin.size(); ++r) {
      options.max_tokens = std::max({options.max_tokens, begin[r + 1] - begin[r], std::int64_t{1}});
    }
    const int num_ranks = ranks == nullptr ? 1 : ranks->size();
    local_ = first_expert_of(num_experts_, num_ranks, rank_ + 1) -
             first_expert_of(num_experts_, num_ranks, rank_);
    w13_.emplace(index(local_ * 2 * kInner * kHidden));
    w2_.emplace(index(local_ * kHidden * kInner));
    gate_.emplace(index(num_experts_ * kHidden));
    shared13_.emplace(index(2 * kShared * kHidden));
    shared_gate_.emplace(index(kHidden));
    SWITCHYARD_CUDA(cudaDeviceSynchronize());
    layer_.emplace(made.model, options, ranks);
    set(1);
  }
  ~Trainer() {
    layer_.reset();
    cudaStreamDestroy(stream_);
  }
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  /// Rows of tokens (which = 2 * seed) and of gradients of outputs (2 * seed + 1), as set() has
  /// them.
  static std::vector<float> made_up(std::int64_t num_tokens, unsigned which) {
    return random_floats(num_tokens * kHidden, which);
  }
  /// While no rank waits for this one.
  void set(unsigned seed) {
    const auto share = [&](unsigned which) {
      const std::vector<float> all = made_up(all_tokens_, 2 * seed + which);
      const auto first = all.begin() + begin_ * kHidden;
      return stored_as(dtype_, std::vector<float>(first, first + num_tokens_ * kHidden));
    };
    if (num_tokens_ == 0) return;
    tokens_.set(share(0));
    dout_.set(share(1));
  }
  void forward(SavedForward* saved, RoutingRecord* record = nullptr) {
    layer_->forward({.tokens = {tokens_.bytes(), dtype_, num_tokens_, kHidden},
                     .out = {out_.bytes(), DType::kF32, num_tokens_, kHidden},
                     .request = {.record = record},
                     .stream = stream_,
                     .saved = saved});
  }
  [[nodiscard]] RoutingRecord routing() {
    RoutingRecord record;
    forward(nullptr, &record);
    layer_->check();
    return record;
  }
  [[nodiscard]] BackwardArgs args(SavedForward& saved) const {
    return {.saved = &saved,
            .dout = {dout_.bytes(), dtype_, num_tokens_, kHidden},
            .dtokens = {dtokens_.bytes(), DType::kF32, num_tokens_, kHidden},
            .dweight = dweight_.matrix(num_tokens_, kTopK),
            .dgate = {gate_->bytes(), DType::kF32, num_experts_, kHidden},
            .experts = {.w13 = {w13_->bytes(), DType::kF32, local_ * 2 * kInner, kHidden},
                        .w2 = {w2_->bytes(), DType::kF32, local_ * kHidden, kInner}},
            .shared = {.w13 = {shared13_->bytes(), DType::kF32, 2 * kShared, kHidden}},
            .dshared_gate = shared_gate_->vector(),
            .stream = stream_};
  }
  void backward(SavedForward& saved) { layer_->backward(args(saved)); }
  void both(SavedForward& saved) {
    forward(&saved);
    backward(saved);
  }
  [[nodiscard]] Gradients step(SavedForward& saved) {
    both(saved);
    return gradients();
  }
  [[nodiscard]] Gradients gradients() {
    layer_->check();
    const auto get = [&](const DeviceArray<float>& array) {
      return copy_out<float>(array.data(), static_cast<std::int64_t>(array.size()), stream_);
    };
    return {.dtokens = get(dtokens_),
            .dweight = get(dweight_),
            .w13 = get(*w13_),
            .w2 = get(*w2_),
            .gate = get(*gate_),
            .shared13 = get(*shared13_),
            .shared_gate = get(*shared_gate_)};
  }
  [[nodiscard]] MoeLayer& layer() { return *layer_; }
  [[nodiscard]] cudaStream_t stream() const { return stream_; }

 private:
  static std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

  int rank_;
  std::int64_t begin_, num_tokens_, all_tokens_;
  DType dtype_;
  std::int64_t num_experts_ = 0, local_ = 0;
  cudaStream_t stream_ = nullptr;
  DeviceArray<std::byte> tokens_, dout_;
  DeviceArray<float> out_, dtokens_, dweight_;
  std::optional<DeviceArray<float>> w13_, w2_, gate_, shared13_, shared_gate_;
  std::optional<MoeLayer> layer_;
};

inline std::vector<std::int64_t> evenly(std::int64_t num_tokens, int ranks) {
  std::vector<std::int64_t> begin;
  for (int r = 0; r <= ranks; ++r) begin.push_back(r * num_tokens / ranks);
  return begin;
}

enum class Place { kOneGpu, kAllGpus };

/// On several GPUs with time for the first call on each, which loads all kernels.
inline void on_ranks(int num_ranks, Place place, const std::function<void(Communicator&)>& body) {
  const bool spread = place == Place::kAllGpus;
  run_ranks(
      num_ranks,
      [&](Communicator& ranks) {
        use_gpu_of_rank(spread ? ranks.rank() : 0);
        body(ranks);
      },
      std::chrono::seconds(spread ? 30 : 6));
}

}  // namespace switchyard::test

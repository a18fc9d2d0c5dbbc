// Times of routers on one GPU beside plain top-k's, from logits that are in L2, each captured often
// in one graph: the choice alone, with the noise of training, and with the sums that statistics and
// losses are made of. One line of JSON each.
#include <fmt/core.h>

#include <array>
#include <random>
#include <string>
#include <vector>

#include "bench/measure/graph_times.hpp"
#include "core/check.hpp"
#include "switchyard/device.hpp"
#include "switchyard/route.hpp"
#include "switchyard/routing/losses.hpp"
#include "switchyard/routing/router_kinds.hpp"
#include "testkit/gpu/device_array.hpp"
#include "testkit/random_values.hpp"

namespace switchyard {
namespace {

constexpr int kReplays = 60;
constexpr int kCalls = 20;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

struct Shape {
  std::int64_t num_tokens;
  std::int32_t num_experts, top_k;
};

/// A bar and whether `value` holds it; of no bar an empty string.
std::string judged(const char* bar, double value, double target) {
  if (bar == nullptr) return {};
  return fmt::format(R"(, "bar": "{}", "value": {:.2f}, "target": {:.2f}, "holds": {})", bar, value,
                     target, value <= target);
}

/// One router's calls on one shape.
class RouterBench {
 public:
  RouterBench(const std::string& spelling, const Shape& shape)
      : spelling_(spelling),
        shape_(shape),
        config_(parse_router(spelling, {.num_experts = shape.num_experts,
                                        .kind = TopKRouter{.top_k = shape.top_k}})),
        places_(shape.num_tokens * config_.top_k()),
        logits_(config_.has_logits()
                    ? random_floats(shape.num_tokens * config_.num_logits(), 5, 2.0F)
                    : std::vector<float>{}),
        noise_logits_(logits_.get()),
        weight_(index(places_)),
        expert_(index(places_)),
        ids_(index(shape.num_tokens)),
        status_(std::vector<DeviceStatus>(1)),
        counts_(index(shape.num_experts)),
        firsts_(index(shape.num_experts)),
        devices_(1),
        scores_(index(shape.num_experts)),
        token_sums_(kTokenSums),
        workspace_(index(routing_sums_workspace_bytes(1, shape.num_experts, 1))) {
    workspace_.fill(0);
    std::mt19937 random(11);
    std::vector<std::int32_t> ids(index(shape.num_tokens));
    for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random() % 50000);
    ids_.set(ids);
    SWITCHYARD_CUDA(cudaStreamCreate(&stream_));
  }
  RouterBench(const RouterBench&) = delete;
  RouterBench& operator=(const RouterBench&) = delete;
  ~RouterBench() { cudaStreamDestroy(stream_); }

  [[nodiscard]] double choice() {
    return median([&] { choose(); });
  }
  /// Each call adds to the logits that the last one left, so these are for the end.
  [[nodiscard]] double noisy_choice() {
    return median([&] { route_at_once(noisy_args()); });
  }
  [[nodiscard]] double noise_then_choice() {
    return median([&] {
      add_noise({.logits = logits(),
                 .noise_logits = {noise_logits_.data(), logits().shape},
                 .noise = config_.noise,
                 .request = request(),
                 .execution = execution()});
      choose();
    });
  }
  [[nodiscard]] double all() {
    RouteAtOnceArgs args = noisy_args();
    args.sums = sums();
    return median([&] { route_at_once(args); });
  }
  [[nodiscard]] double choice_and_sums() {
    return median([&] { route_at_once({.route = route_args(), .sums = sums()}); });
  }
  [[nodiscard]] double choice_then_sums() {
    return median([&] {
      choose();
      add_up();
    });
  }
  [[nodiscard]] bool has_noise() const { return config_.noise.is_on_logits(); }
  /// Sums are of as many scores as there are experts, and of rows of at most 32 choices.
  [[nodiscard]] bool has_sums() const {
    return config_.has_logits() && config_.num_logits() == shape_.num_experts &&
           config_.top_k() <= 32;
  }
  [[nodiscard]] std::string name() const {
    return fmt::format("{} {} x {} K {}", spelling_, shape_.num_tokens, shape_.num_experts,
                       shape_.top_k);
  }
  [[nodiscard]] std::int64_t bytes() const {
    return static_cast<std::int64_t>(4 * logits_.size()) + 8 * places_;
  }
  /// What has been routed; a NaN or an id out of range would have no expert.
  [[nodiscard]] bool is_well() const { return status_.get()[0].ok(); }

 private:
  template <typename F>
  [[nodiscard]] double median(const F& call) const {
    return bench::median_graph_us(kCalls, kReplays, stream_, [&](int) { call(); });
  }
  [[nodiscard]] Execution execution() const {
    return {.backend = Backend::kCuda,
            .stream = stream_,
            .workspace = workspace_.data(),
            .workspace_bytes = static_cast<std::int64_t>(workspace_.bytes()),
            .status = status_.data()};
  }
  [[nodiscard]] Matrix<float> logits() const {
    return logits_.matrix(shape_.num_tokens, config_.num_logits());
  }
  [[nodiscard]] RouteRequest request() const {
    return {
        .token_ids = {ids_.data(), {shape_.num_tokens}}, .seed = 7, .step = 3, .training = true};
  }
  [[nodiscard]] RouteArgs route_args() const {
    RouteArgs args{.config = config_, .request = request()};
    args.routing = {.expert = expert_.matrix(shape_.num_tokens, config_.top_k()),
                    .weight = weight_.matrix(shape_.num_tokens, config_.top_k())};
    if (config_.has_logits()) args.logits = {logits_.data(), logits().shape};
    args.execution = execution();
    return args;
  }
  [[nodiscard]] RouteAtOnceArgs noisy_args() const {
    return {.route = route_args(),
            .noisy_logits = logits(),
            .noise_logits = {noise_logits_.data(), logits().shape}};
  }
  void choose() const { route(route_args()); }
  [[nodiscard]] RoutingSums sums() const {
    const std::array<std::int64_t, 2> shape = {1, shape_.num_experts};
    return {.counts = {counts_.data(), shape},
            .first_choices = {firsts_.data(), shape},
            .device_tokens = {devices_.data(), {1, 1}},
            .scores = {scores_.data(), shape},
            .tokens = {token_sums_.data(), {kTokenSums}}};
  }
  void add_up() const {
    RoutingSumsArgs args{.logits = {logits_.data(), logits().shape}, .score = config_.score()};
    args.assignments =
        DenseAssignments{.expert = {expert_.data(), {shape_.num_tokens, config_.top_k()}}};
    args.sums = sums();
    args.execution = execution();
    routing_sums(args);
  }

  std::string spelling_;
  Shape shape_;
  RouterConfig config_;
  std::int64_t places_;
  cudaStream_t stream_ = nullptr;
  DeviceArray<float> logits_, noise_logits_, weight_;
  DeviceArray<std::int32_t> expert_, ids_;
  DeviceArray<DeviceStatus> status_;
  DeviceArray<std::int64_t> counts_, firsts_, devices_;
  DeviceArray<double> scores_, token_sums_;
  DeviceBytes workspace_;
};

void print(const RouterBench& router, const std::string& what, double us,
           const std::string& judgement) {
  fmt::print(
      R"({{"stage": "route", "case": {{"name": "{}, {}"}}, "backend": "cuda", "samples": {}, )"
      R"("median_us": {:.2f}, "bytes": {}{}}}
)",
      router.name(), what, kReplays, us, router.bytes(), judgement);
}

/// L1: with statistics within 1.5 of what plain top-k takes without; noise within 2 us.
void beside_top_k(const Shape& shape) {
  RouterBench plain("top-k", shape);
  const double top_k = plain.choice();
  print(plain, "the choice", top_k, {});
  for (const char* spelling :
       {"top-k", "switch", "gshard", "adamoe:null-experts=8", "noisy-top-k", "v-moe",
        "top-p:threshold=0.4", "relu", "expert-threshold", "hash"}) {
    RouterBench router(spelling, shape);
    const double choice = router.choice();
    if (std::string("top-k") != spelling) {
      print(router, "the choice", choice,
            judged(router.has_sums() ? nullptr : "L1", choice / top_k, 1.5));
    }
    if (router.has_sums()) {
      const double both = router.choice_and_sums();
      print(router, "the choice and sums", both, judged("L1", both / top_k, 1.5));
      print(router, "the choice, then sums", router.choice_then_sums(), {});
    }
    if (router.has_noise()) {
      const double noisy = router.noisy_choice();
      print(router, "noise and the choice", noisy, judged("L1", noisy - choice, 2));
      print(router, "noise, then the choice", router.noise_then_choice(), {});
      print(router, "noise, the choice and sums", router.all(), {});
    }
    if (!router.is_well()) fail(ErrorCode::kDevice, "{}: the routing is not whole", router.name());
  }
}

}  // namespace
}  // namespace switchyard

int main() {
  using switchyard::RouterBench;
  using switchyard::Shape;
  try {
    switchyard::beside_top_k({.num_tokens = 16384, .num_experts = 128, .top_k = 2});
    switchyard::beside_top_k({.num_tokens = 4096, .num_experts = 256, .top_k = 8});
    // L2: 512 tokens an expert.
    RouterBench choice("expert-choice", Shape{.num_tokens = 16384, .num_experts = 64, .top_k = 2});
    const double us = choice.choice();
    switchyard::print(choice, "the choice", us, switchyard::judged("L2", us, 20));
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}

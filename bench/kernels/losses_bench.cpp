// Times of the steps of auxiliary losses on one GPU, each captured often in one graph: sums of
// logits that the second cache level still has ("warm") or has not ("cold"), losses of them, and
// route's way back with and without. One line of JSON each.
#include <fmt/core.h>

#include <memory>
#include <string>
#include <vector>

#include "bench/measure/graph_times.hpp"
#include "switchyard/backward.hpp"
#include "switchyard/device.hpp"
#include "switchyard/routing/losses.hpp"
#include "testkit/gpu/device_array.hpp"
#include "testkit/loss_case.hpp"

namespace switchyard {
namespace {

using test::LossCase;

constexpr int kReplays = 60;
constexpr double kDeviceGbps = 4200;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

void print(const std::string& name, double us, std::int64_t bytes, const char* bar = nullptr,
           double target = 0) {
  std::string line =
      fmt::format(R"({{"stage": "{}", "case": {{"name": "{}"}}, "backend": "cuda", "samples": {}, )"
                  R"("median_us": {:.2f}, "bytes": {})",
                  name.substr(0, name.find(' ')), name, kReplays, us, bytes);
  if (bar != nullptr) {
    line += fmt::format(R"(, "bar": "{}", "value": {:.2f}, "target": {:.2f}, "holds": {})", bar, us,
                        target, us <= target);
  }
  fmt::print("{}}}\n", line);
}

/// Routings of one shape; each call takes the next.
class LossesBench {
 public:
  LossesBench(std::int64_t num_tokens, std::int32_t num_experts, std::int32_t top_k, int copies)
      : case_(num_tokens, num_experts, top_k, Score::kSoftmax, {.balance = 0.01, .z = 0.001}),
        copies_(copies),
        counts_(index(num_experts)),
        firsts_(index(num_experts)),
        devices_(1),
        scores_(index(num_experts)),
        token_sums_(kTokenSums),
        values_(kLossValues),
        prices_(index(num_experts)),
        dweight_(random_floats(num_tokens * top_k, 5)),
        expert_(case_.expert),
        workspace_(index(routing_sums_workspace_bytes(1, num_experts, 1))) {
    workspace_.fill(0);
    SWITCHYARD_CUDA(cudaStreamCreate(&stream_));
    for (int i = 0; i < copies; ++i) {
      logits_.push_back(std::make_unique<DeviceArray<float>>(case_.logits));
      dlogits_.push_back(std::make_unique<DeviceArray<float>>(case_.logits.size()));
    }
  }

  void run() {
    const std::int64_t size = case_.logits_view().size();
    const std::int64_t choices = case_.expert_view().size();
    const std::string shape =
        fmt::format("{} x {} K {} {}", case_.num_tokens, case_.router.num_experts,
                    case_.router.top_k(), copies_ > 1 ? "cold" : "warm");
    const double sums = median([&](int i) { add_up(i); });
    print("routing_sums " + shape, sums, 4 * (size + choices), copies_ == 1 ? "L6" : nullptr, 6);
    print("router_losses " + shape, median([&](int) { (void)price(); }), 0);
    const std::int64_t bytes = 8 * (size + choices);
    print("route_backward " + shape, median([&](int i) { back(i, {}); }), bytes);
    const LossPrices prices = price();
    print("route_backward " + shape + ", balance and z", median([&](int i) { back(i, prices); }),
          bytes, copies_ > 1 ? "L4" : nullptr,
          1.3 * static_cast<double>(bytes) / kDeviceGbps * 1e-3 + 4);
  }

 private:
  double median(const std::function<void(int)>& call) const {
    return bench::median_graph_us(20, kReplays, stream_, call);
  }
  [[nodiscard]] Execution execution() const {
    return {.backend = Backend::kCuda,
            .stream = stream_,
            .workspace = workspace_.data(),
            .workspace_bytes = static_cast<std::int64_t>(workspace_.bytes())};
  }
  [[nodiscard]] RoutingSums sums() const {
    const std::array<std::int64_t, 2> shape = {1, case_.router.num_experts};
    return {.counts = {counts_.data(), shape},
            .first_choices = {firsts_.data(), shape},
            .device_tokens = {devices_.data(), {1, 1}},
            .scores = {scores_.data(), shape},
            .tokens = {token_sums_.data(), {kTokenSums}}};
  }
  void add_up(int i) const {
    routing_sums(
        {.logits = {logits_[index(i % copies_)]->data(), case_.logits_view().shape},
         .assignments = DenseAssignments{.expert = {expert_.data(), case_.expert_view().shape}},
         .sums = sums(),
         .execution = execution()});
  }
  [[nodiscard]] LossPrices price() const {
    return router_losses({.sums = sums(),
                          .num_tokens = case_.num_tokens,
                          .config = case_.losses,
                          .values = {values_.data(), {kLossValues}},
                          .score_prices = {prices_.data(), {1, case_.router.num_experts}},
                          .execution = execution()});
  }
  void back(int i, const LossPrices& prices) const {
    const auto at = index(i % copies_);
    route_backward({.logits = {logits_[at]->data(), case_.logits_view().shape},
                    .expert = {expert_.data(), case_.expert_view().shape},
                    .dweight = {dweight_.data(), case_.expert_view().shape},
                    .config = case_.router,
                    .losses = prices,
                    .dlogits = {dlogits_[at]->data(), case_.logits_view().shape},
                    .execution = execution()});
  }

  LossCase case_;
  int copies_;
  cudaStream_t stream_ = nullptr;
  DeviceArray<std::int64_t> counts_, firsts_, devices_;
  DeviceArray<double> scores_, token_sums_, values_;
  DeviceArray<float> prices_, dweight_;
  DeviceArray<std::int32_t> expert_;
  DeviceBytes workspace_;
  std::vector<std::unique_ptr<DeviceArray<float>>> logits_, dlogits_;
};

}  // namespace
}  // namespace switchyard

int main() {
  try {
    for (const int copies : {4, 1}) switchyard::LossesBench(32768, 128, 8, copies).run();
    switchyard::LossesBench(16384, 128, 2, 1).run();
    switchyard::LossesBench(4096, 256, 8, 1).run();
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}

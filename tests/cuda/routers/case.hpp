#pragma once

// Calls of routers by name that run on both devices, for tests of routing and of the way back.

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "switchyard/device.hpp"
#include "switchyard/route.hpp"
#include "switchyard/routing/router_kinds.hpp"
#include "testkit/gpu/device_array.hpp"
#include "testkit/random_values.hpp"

namespace switchyard::test {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

struct Size {
  std::int64_t num_tokens;
  std::int32_t num_experts, top_k;
};

/// A call of a router by name with everything that it may need.
struct Call {
  RouterConfig config{};
  std::int64_t num_tokens = 0;
  std::vector<float> logits{}, selection_bias{};
  std::vector<std::int32_t> token_ids{};
  std::int64_t room = 0;  ///< Of an expert; 0: any.
  RouteRequest request{};

  Call(const std::string& spelling, const Size& size, unsigned seed, float scale = 2.0F)
      : num_tokens(size.num_tokens) {
    RouterConfig base{.num_experts = size.num_experts, .kind = TopKRouter{.top_k = size.top_k}};
    config = parse_router(spelling, base);
    std::mt19937 random(seed);
    if (config.has_logits())
      logits = random_floats(num_tokens * config.num_logits(), random, scale);
    for (std::int64_t t = 0; t < num_tokens; ++t) {
      token_ids.push_back(static_cast<std::int32_t>(random() % 1000));
    }
    request = {.seed = 7 + seed, .step = 1000, .layer = 3, .first_token = 40, .training = true};
  }

  [[nodiscard]] RouteArgs args() const {
    RouteArgs args{.config = config, .room = room, .request = request};
    if (config.has_logits()) args.logits = {logits.data(), {num_tokens, config.num_logits()}};
    if (!selection_bias.empty()) {
      args.selection_bias = {selection_bias.data(), {config.num_experts}};
    }
    return args;
  }
  [[nodiscard]] std::int64_t places() const { return num_tokens * config.top_k(); }
};

struct Result {
  std::vector<std::int32_t> expert;
  std::vector<float> weight;
  DeviceStatus status{};
};

inline Result on_cpu(const Call& call) {
  Result result{.expert = std::vector<std::int32_t>(at(call.places()), -7),
                .weight = std::vector<float>(at(call.places()), kNan)};
  RouteArgs args = call.args();
  args.request.token_ids = {call.token_ids.data(), {call.num_tokens}};
  args.routing = {.expert = {result.expert.data(), {call.num_tokens, call.config.top_k()}},
                  .weight = {result.weight.data(), {call.num_tokens, call.config.top_k()}}};
  route(args);
  return result;
}

inline Result on_gpu(const Call& call) {
  const DeviceArray<float> logits(call.logits), bias(call.selection_bias);
  const DeviceArray<float> weight(at(call.places()));
  const DeviceArray<std::int32_t> expert(at(call.places())), ids(call.token_ids);
  const DeviceArray<DeviceStatus> status(std::vector<DeviceStatus>(1));
  RouteArgs args = call.args();
  if (args.logits.data != nullptr) args.logits.data = logits.data();
  if (args.selection_bias.data != nullptr) args.selection_bias.data = bias.data();
  args.request.token_ids = {ids.data(), {call.num_tokens}};
  const auto* hash = std::get_if<HashRouter>(&call.config.kind);
  const bool has_table = hash != nullptr && hash->table != nullptr;
  const DeviceArray<std::int32_t> table(has_table ? *hash->table : std::vector<std::int32_t>{});
  if (has_table) {
    args.hash_table = {table.data(), {std::ssize(*hash->table) / hash->top_k, hash->top_k}};
  }
  args.routing = {.expert = expert.matrix(call.num_tokens, call.config.top_k()),
                  .weight = weight.matrix(call.num_tokens, call.config.top_k())};
  args.execution = {.backend = Backend::kCuda, .status = status.data()};
  route(args);
  return {.expert = expert.get(), .weight = weight.get(), .status = status.get()[0]};
}

inline constexpr const char* kOfLogits[] = {"gshard",
                                            "gshard:second=all,sampled=yes",
                                            "gshard:second=threshold,threshold=0.4",
                                            "adamoe",
                                            "adamoe:null-experts=5",
                                            "top-p:threshold=0.6",
                                            "top-p:threshold=1",
                                            "relu",
                                            "expert-threshold",
                                            "expert-choice",
                                            "expert-choice:capacity-factor=1.7"};
inline constexpr const char* kPlaced[] = {"hash",     "uniform",       "round-robin",
                                          "zipf",     "hot:share=0.4", "dirichlet",
                                          "zipf:s=3", "hash:salt=99"};
inline constexpr Size kSmall[] = {{0, 8, 2}, {1, 1, 1}, {1, 2, 2},
                                  {3, 8, 2}, {7, 5, 5}, {33, 40, 6}};
inline constexpr Size kLarge[] = {
    {257, 64, 8}, {129, 129, 7}, {9, 512, 32}, {70, 32, 32}, {2050, 128, 4}};

/// GShard has two experts.
inline bool goes_with(const std::string& router, const Size& size) {
  return !router.starts_with("gshard") || size.num_experts >= 2;
}

}  // namespace switchyard::test

// C interface: routing.
#include <algorithm>
#include <optional>
#include <vector>

#include "capi/capi.hpp"
#include "core/gpu/device_scope.hpp"
#include "layer/gpu/stage_calls.hpp"
#include "switchyard/backward.hpp"
#include "switchyard/routing/selection_bias.hpp"

using namespace switchyard;  // NOLINT: this file is the border between the two namespaces

namespace {

sy_route_request default_request() {
  return {.struct_size = sizeof(sy_route_request),
          .seed = 0,
          .step = 0,
          .layer = 0,
          .training = 0,
          .first_token = 0,
          .token_ids = nullptr,
          .noise_logits = nullptr,
          .selection_bias = nullptr,
          .stream = nullptr,
          .logits = nullptr,
          .previous_logits = nullptr};
}

/// Where the tensors of a call lie, and for as long as it lives the current device.
class Place {
 public:
  Place(const char* name, const sy_tensor* tensor, const sy_route_request* request)
      : backend_(capi::backend_of(name, tensor)),
        device_(backend_ == Backend::kCuda ? tensor->device_id : -1),
        stream_(capi::taken("request", request, default_request()).stream) {
    if (device_ >= 0) scope_.emplace(device_);
  }
  [[nodiscard]] Backend backend() const { return backend_; }
  [[nodiscard]] std::int32_t device() const { return device_; }
  [[nodiscard]] Execution execution() const {
    return {.backend = backend_, .stream = backend_ == Backend::kCuda ? stream_ : nullptr};
  }

 private:
  Backend backend_;
  std::int32_t device_;
  void* stream_;
  std::optional<DeviceScope> scope_;
};

/// Of learned noise that a call draws, else empty.
Matrix<const float> noise_logits_of(const RouterConfig& config, const sy_route_request* request,
                                    std::int64_t num_tokens, Backend where) {
  const sy_route_request given = capi::taken("request", request, default_request());
  const bool learned = config.noise.kind == RouterNoise::Kind::kLearned;
  require(learned || given.noise_logits == nullptr,
          "request.noise_logits is given, and the router's noise is not learned: noisy-top-k's is");
  if (!learned || given.training == 0) return {};
  return capi::matrix<const float>("request.noise_logits", given.noise_logits, num_tokens,
                                   config.num_experts, where);
}

/// Logits of a rule that has them, and nothing else.
Matrix<float> logits_of(const RouterConfig& config, const sy_tensor* logits, Backend where) {
  require(config.has_logits() == (logits != nullptr), "logits are {}, and the router {}",
          logits == nullptr ? "NULL" : "given",
          config.has_logits() ? "chooses by them" : "has none");
  if (logits == nullptr) return {};
  require(
      config.network.is_linear(),
      "the router has network={}, which makes logits of tokens: a layer's; here logits are given",
      to_string(config.network.kind));
  return capi::matrix<float>("logits", logits, capi::kAny, config.num_logits(), where);
}

}  // namespace

RouteRequest capi::to_request(const sy_route_request* request, std::int64_t num_tokens,
                              Backend where) {
  const sy_route_request given = taken("request", request, default_request());
  RouteRequest result{.seed = given.seed,
                      .step = given.step,
                      .layer = given.layer,
                      .first_token = given.first_token,
                      .training = given.training != 0};
  if (given.token_ids != nullptr) {
    check_tensor("request.token_ids", given.token_ids, {num_tokens}, where);
    check_dtype("request.token_ids", *given.token_ids, DType::kI32);
    result.token_ids = {reinterpret_cast<const std::int32_t*>(data_of(*given.token_ids)),
                        {num_tokens}};
  }
  return result;
}

void sy_route_request_init(sy_route_request* request, size_t struct_size) {
  capi::give(request, default_request(), struct_size);
}

void sy_router_config_init(sy_router_config* config, size_t struct_size) {
  capi::give(config,
             {.struct_size = 0,
              .num_experts = 0,
              .top_k = 0,
              .score = SY_SOFTMAX,
              .renormalize = 1,
              .scale = 1.0F,
              .groups = 1,
              .top_groups = 1,
              .group_score = SY_GROUP_MAX,
              .router = nullptr,
              .hash_table = nullptr},
             struct_size);
}

sy_status sy_router_columns(const sy_router_config* config, int32_t* columns, int32_t* has_logits) {
  return capi::guarded([&] {
    const RouterConfig router = capi::to_config(capi::taken("config", config));
    check(router);
    if (columns != nullptr) *columns = router.top_k();
    if (has_logits != nullptr) *has_logits = router.has_logits() ? 1 : 0;
  });
}

sy_status sy_router_num_experts(const sy_router_config* config, int32_t* num_experts) {
  return capi::guarded([&] {
    const RouterConfig router = capi::to_config(capi::taken("config", config));
    check(router);
    require(num_experts != nullptr, "num_experts is NULL");
    *num_experts = router.num_experts;
  });
}

sy_status sy_router_num_logits(const sy_router_config* config, int32_t* num_logits) {
  return capi::guarded([&] {
    const RouterConfig router = capi::to_config(capi::taken("config", config));
    check(router);
    require(num_logits != nullptr, "num_logits is NULL");
    *num_logits = router.num_logits();
  });
}

sy_status sy_route(const sy_router_config* config, const sy_tensor* logits,
                   const sy_tensor* selection_bias, const sy_tensor* expert,
                   const sy_tensor* weight, void* stream) {
  return capi::guarded([&] {
    const sy_router_config given = capi::taken("config", config);
    require(given.router == nullptr || *given.router == 0,
            "config.router is '{}': sy_route_with() takes it", given.router);
    const Backend backend = capi::backend_of("logits", logits);
    const auto scores =
        capi::matrix<float>("logits", logits, capi::kAny, given.num_experts, backend);
    const std::int64_t num_tokens = scores.shape[0];
    const RouteArgs args{.logits = scores,
                         .selection_bias = capi::optional_vector("selection_bias", selection_bias,
                                                                 given.num_experts, backend),
                         .config = capi::to_config(given),
                         .routing = {.expert = capi::matrix<std::int32_t>(
                                         "expert", expert, num_tokens, given.top_k, backend),
                                     .weight = capi::matrix<float>("weight", weight, num_tokens,
                                                                   given.top_k, backend)},
                         .execution = {.backend = backend, .stream = stream}};
    if (backend == Backend::kCpu) {
      route(args);
      return;
    }
    const DeviceScope scope(logits->device_id);
    route_on_gpu(logits->device_id, args);
  });
}

sy_status sy_route_check(int32_t device_id, void* stream) {
  return capi::guarded([&] {
    require(device_id >= 0, "device_id={} is no device", device_id);
    const DeviceScope scope(device_id);
    check_routes(device_id, stream);
  });
}

sy_status sy_balanced_hash_table(const int64_t* frequency, int64_t vocabulary, int32_t num_experts,
                                 int32_t top_k, const sy_tensor* table) {
  return capi::guarded([&] {
    require(vocabulary >= 0 && (frequency != nullptr || vocabulary == 0),
            "frequency is NULL, or vocabulary={} is negative", vocabulary);
    const std::vector<std::int32_t> made =
        balanced_hash_table({frequency, frequency + vocabulary}, num_experts, top_k);
    const auto out = capi::matrix<std::int32_t>("table", table, vocabulary, top_k, Backend::kCpu);
    std::copy(made.begin(), made.end(), out.data);
  });
}

sy_status sy_route_with(const sy_router_config* config, const sy_route_request* request,
                        const sy_tensor* logits, const sy_tensor* expert, const sy_tensor* weight) {
  return capi::guarded([&] {
    const RouterConfig router = capi::to_config(capi::taken("config", config));
    check(router);
    const Place place("expert", expert, request);
    const Backend where = place.backend();
    const auto* hash = std::get_if<HashRouter>(&router.kind);
    if (where == Backend::kCuda && hash != nullptr && hash->table != nullptr) {
      fail(ErrorCode::kUnsupported,
           "a hash_table is on a GPU a layer's alone: want tensors in host memory");
    }
    const Matrix<float> scores = logits_of(router, logits, where);
    const auto ids =
        capi::matrix<std::int32_t>("expert", expert, capi::kAny, router.top_k(), where);
    const std::int64_t num_tokens = ids.shape[0];
    const RouteRequest of_call = capi::to_request(request, num_tokens, where);
    const Matrix<const float> of_noise = noise_logits_of(router, request, num_tokens, where);
    const sy_route_request given = capi::taken("request", request, default_request());
    const RouteArgs args{
        .logits = scores,
        .selection_bias = capi::optional_vector("request.selection_bias", given.selection_bias,
                                                router.num_experts, where),
        .config = router,
        .routing = {.expert = ids,
                    .weight =
                        capi::matrix<float>("weight", weight, num_tokens, router.top_k(), where)},
        .request = of_call,
        .execution = place.execution()};
    if (of_call.training && router.noise.is_on_logits()) {
      add_noise({.logits = scores,
                 .noise_logits = of_noise,
                 .noise = router.noise,
                 .request = of_call,
                 .execution = place.execution()});
    }
    if (where == Backend::kCpu) return route(args);
    route_on_gpu(place.device(), args);
  });
}

sy_status sy_route_backward(const sy_router_config* config, const sy_route_request* request,
                            const sy_tensor* logits, const sy_tensor* expert,
                            const sy_tensor* dweight, const sy_tensor* dlogits) {
  return capi::guarded([&] {
    const RouterConfig router = capi::to_config(capi::taken("config", config));
    check(router);
    const Place place("expert", expert, request);
    const Backend where = place.backend();
    const Matrix<float> scores = logits_of(router, logits, where);
    const std::int64_t num_tokens = scores.shape[0];
    const std::int64_t columns = router.top_k();
    route_backward(
        {.logits = scores,
         .expert = capi::matrix<std::int32_t>("expert", expert, num_tokens, columns, where),
         .dweight = capi::matrix<float>("dweight", dweight, num_tokens, columns, where),
         .config = router,
         .request = capi::to_request(request, num_tokens, where),
         .dlogits = capi::matrix<float>("dlogits", dlogits, num_tokens, router.num_logits(), where),
         .execution = place.execution()});
  });
}

sy_status sy_noise_backward(const sy_router_config* config, const sy_route_request* request,
                            const sy_tensor* dlogits, const sy_tensor* dnoise_logits) {
  return capi::guarded([&] {
    const RouterConfig router = capi::to_config(capi::taken("config", config));
    check(router);
    const Place place("dlogits", dlogits, request);
    const Backend where = place.backend();
    const auto gradient =
        capi::matrix<const float>("dlogits", dlogits, capi::kAny, router.num_experts, where);
    const std::int64_t num_tokens = gradient.shape[0];
    noise_backward({.noise_logits = noise_logits_of(router, request, num_tokens, where),
                    .dlogits = gradient,
                    .noise = router.noise,
                    .request = capi::to_request(request, num_tokens, where),
                    .dnoise_logits = capi::matrix<float>("dnoise_logits", dnoise_logits, num_tokens,
                                                         router.num_experts, where),
                    .execution = place.execution()});
  });
}

sy_status sy_update_selection_bias(const int64_t* counts, const sy_tensor* bias, double rate,
                                   int32_t centered, sy_communicator communicator) {
  return capi::guarded([&] {
    require(counts != nullptr, "counts is NULL");
    capi::check_tensor("bias", bias, {capi::kAny}, Backend::kCpu);
    capi::check_dtype("bias", *bias, DType::kF32);
    const std::int64_t num_experts = bias->shape[0];
    SelectionBiasUpdate update{
        .counts = {counts, {num_experts}},
        .rate = rate,
        .centered = centered != 0,
        .bias = {reinterpret_cast<float*>(capi::data_of(*bias)), {num_experts}}};
    if (communicator == nullptr) return update_selection_bias(update);
    const auto call = communicator->calls.begin();
    update.communicator = communicator->communicator.get();
    update_selection_bias(update);
  });
}

sy_status sy_update_thresholds(const sy_tensor* logits, int32_t top_k, double momentum,
                               const sy_tensor* bias, sy_communicator communicator) {
  return capi::guarded([&] {
    capi::check_tensor("bias", bias, {capi::kAny}, Backend::kCpu);
    capi::check_dtype("bias", *bias, DType::kF32);
    const std::int64_t num_experts = bias->shape[0];
    ThresholdUpdate update{.logits = capi::matrix<const float>("logits", logits, capi::kAny,
                                                               num_experts, Backend::kCpu),
                           .top_k = top_k,
                           .momentum = momentum,
                           .bias = {reinterpret_cast<float*>(capi::data_of(*bias)), {num_experts}}};
    if (communicator == nullptr) return update_thresholds(update);
    const auto call = communicator->calls.begin();
    update.communicator = communicator->communicator.get();
    update_thresholds(update);
  });
}

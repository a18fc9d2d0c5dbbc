// The router's stages in order on one GPU. What each stage computes is said in its own header.
#include "layer/gpu/router/router.hpp"

#include <algorithm>

#include "core/check.hpp"
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/cuda_memory.hpp"
#include "layer/network_work.hpp"
#include "layer/routing_stats.hpp"
#include "layer/saved_losses.hpp"

namespace switchyard {

void CudaRouter::rehearse(ConstRawMatrix tokens, const Execution& execution) {
  const auto* by_groups = std::get_if<ExpertChoiceRouter>(&config_.kind);
  if (by_groups != nullptr && by_groups->group > 0) tokens.rows -= tokens.rows % by_groups->group;
  Execution quiet = execution;
  quiet.status = nullptr;  // the ids are anybody's
  for (const bool training : {false, true}) {
    ForwardArgs args{};
    args.request.training = training;
    if (config_.gating_residual) {
      args.request.previous_logits = logits_.matrix<float>(tokens.rows, config_.num_logits());
    }
    if (std::holds_alternative<HashRouter>(config_.kind)) {
      args.request.token_ids = token_ids_.vector<std::int32_t>(tokens.rows);
    }
    run(args, tokens, quiet);
    if (config_.noise.kind == RouterNoise::Kind::kNone) return;
  }
}

void CudaRouter::run(const ForwardArgs& args, ConstRawMatrix tokens, const Execution& execution,
                     SavedForward::State* saved) {
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  const std::int64_t num_tokens = tokens.rows;
  const std::int64_t top_k = config_.top_k();
  const bool given = args.expert.data != nullptr;
  if (saved != nullptr) {
    routing_ = {.expert = saved->room<std::int32_t>(SavedMemory::kExpert, num_tokens, top_k),
                .weight = saved->room<float>(SavedMemory::kWeight, num_tokens, top_k)};
  } else {
    routing_ = {.expert = expert_.matrix<std::int32_t>(num_tokens, top_k),
                .weight = weight_.matrix<float>(num_tokens, top_k)};
  }
  top_score_ = {};
  kept_view_ = {};
  own_logits_ = {};
  own_ = !given && saved == nullptr;
  if (given) {
    take_given(args, saved == nullptr, stream);
  } else {
    top_score_ = args.request.top_score;
    // Of other rules bpr goes by the largest weight.
    if (top_score_.data == nullptr && capacity_factor_ && drop_policy_ == DropPolicy::kBpr &&
        config_.is_top_k()) {
      top_score_ = score_.vector<float>(num_tokens);
    }
    Matrix<float> logits{};
    Matrix<const float> noise_logits{};
    if (config_.has_logits()) {
      logits = saved == nullptr
                   ? logits_.matrix<float>(num_tokens, config_.num_logits())
                   : saved->room<float>(SavedMemory::kLogits, num_tokens, config_.num_logits());
      if (saved != nullptr) saved->logits = logits;
      if (saved != nullptr && config_.gating_residual) keep_previous(args.request, *saved, stream);
      noise_logits = make_logits(tokens, args.request, logits, execution);
      if (own_) own_logits_ = logits;
    }
    RouteRequest request = args.request;
    request.top_score = top_score_;
    request.record = nullptr;
    request.token_ids = ids_on_device(args.request.token_ids, stream);
    select(logits, noise_logits, request, execution, saved);
    if (args.request.logits.data != nullptr) {
      SWITCHYARD_CUDA(cudaMemcpyAsync(args.request.logits.data, logits.data,
                                      static_cast<std::size_t>(4 * logits.size()),
                                      cudaMemcpyDefault, stream));
    }
  }
  const bool keeps = saved != nullptr && capacity_factor_;
  // Without a limit this only counts, for those who ask.
  if (capacity_factor_ || args.request.record != nullptr) {
    limit(keeps ? saved->room<std::uint8_t>(SavedMemory::kKept, num_tokens, top_k)
                : kept_.matrix<std::uint8_t>(num_tokens, top_k),
          execution);
  }
  if (saved == nullptr) return;
  saved->num_tokens = num_tokens;
  saved->routed = !given && config_.has_logits();
  saved->draws_upon(args.request);
  saved->expert = routing_.expert;
  saved->weight = routing_.weight;
  if (keeps) saved->kept = kept_view_;
}

void CudaRouter::keep_previous(const RouteRequest& request, SavedForward::State& saved,
                               cudaStream_t stream) const {
  const auto [rows, cols] = saved.logits.shape;
  saved.previous_logits = saved.room<float>(SavedMemory::kPreviousLogits, rows, cols);
  const auto bytes = static_cast<std::size_t>(4 * saved.previous_logits.size());
  SWITCHYARD_CUDA(cudaMemcpyAsync(saved.previous_logits.data, request.previous_logits.data, bytes,
                                  cudaMemcpyDefault, stream));
}

void CudaRouter::take_given(const ForwardArgs& args, bool may_stay, cudaStream_t stream) {
  const bool on_device =
      args.on_device || (is_on_device(args.expert.data) && is_on_device(args.weight.data));
  const bool in_place =
      may_stay && on_device && is_aligned_16(args.expert.data) && is_aligned_16(args.weight.data);
  if (in_place) {  // two copies of a few bytes take longer than the plan of one token
    routing_.expert.data = const_cast<std::int32_t*>(args.expert.data);  // only read from here on
    routing_.weight.data = const_cast<float*>(args.weight.data);
    return;
  }
  const auto bytes = static_cast<std::size_t>(4 * routing_.expert.size());
  SWITCHYARD_CUDA(
      cudaMemcpyAsync(routing_.expert.data, args.expert.data, bytes, cudaMemcpyDefault, stream));
  SWITCHYARD_CUDA(
      cudaMemcpyAsync(routing_.weight.data, args.weight.data, bytes, cudaMemcpyDefault, stream));
}

Vector<const std::int32_t> CudaRouter::ids_on_device(Vector<const std::int32_t> ids,
                                                     cudaStream_t stream) {
  const bool wanted = std::holds_alternative<HashRouter>(config_.kind);
  if (!wanted || ids.data == nullptr || ids.shape[0] == 0) {
    return wanted ? ids : Vector<const std::int32_t>{};
  }
  if (is_on_device(ids.data)) return ids;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  SWITCHYARD_CUDA(cudaStreamIsCapturing(stream, &capture));
  require(capture == cudaStreamCaptureStatusNone,
          "token_ids lie in host memory, which a graph would read again: want them on the GPU "
          "while a stream is captured");
  const Vector<std::int32_t> copy = token_ids_.vector<std::int32_t>(ids.shape[0]);
  SWITCHYARD_CUDA(cudaMemcpyAsync(copy.data, ids.data,
                                  sizeof(std::int32_t) * static_cast<std::size_t>(ids.shape[0]),
                                  cudaMemcpyHostToDevice, stream));
  return copy;
}

ConstRawMatrix CudaRouter::seen(ConstRawMatrix tokens, const RouteRequest& request,
                                const Execution& execution) {
  if (!draws_noise(request, RouterNoise::Kind::kInputJitter)) return tokens;
  const Matrix<float> jittered = jittered_.matrix<float>(tokens.rows, tokens.cols);
  const ScopedStage stage(execution, "noise",
                          {.bytes = static_cast<double>(tokens.bytes() + 4 * jittered.size())});
  add_noise({.tokens = tokens,
             .jittered = jittered,
             .noise = config_.noise,
             .request = request,
             .execution = execution});
  return {reinterpret_cast<const std::byte*>(jittered.data), DType::kF32, tokens.rows, tokens.cols};
}

Matrix<const float> CudaRouter::noise_logits(ConstRawMatrix tokens, const Execution& execution) {
  const Matrix<float> logits = noise_logits_.matrix<float>(tokens.rows, config_.num_logits());
  multiply(tokens, noise_gate(), used_in_place_, noise_gate_maps_, {}, logits, execution);
  return logits;
}

void CudaRouter::multiply(ConstRawMatrix tokens, ConstRawMatrix gate, bool fresh, TensorMaps& maps,
                          Vector<const float> bias, Matrix<float> logits,
                          const Execution& execution) const {
  const double flops = 2 * static_cast<double>(logits.size() * tokens.cols);
  const ScopedStage stage(execution, "router_gemm", {.flops = flops, .flops_executed = flops});
  router_gemm({.tokens = tokens,
               .gate = gate,
               .gate_is_fresh = fresh,
               .gate_maps = &maps,
               .bias = bias,
               .logits = logits,
               .execution = execution});
}

Matrix<const float> CudaRouter::make_logits(ConstRawMatrix tokens, const RouteRequest& request,
                                            Matrix<float> logits, const Execution& execution) {
  const bool is_linear = config_.network.is_linear();
  ConstRawMatrix features = seen(tokens, request, execution);
  ConstRawMatrix gate = this->gate();
  if (!is_linear) {
    const ScopedStage stage(execution, "router_network",
                            network_work(config_.network, tokens.rows, hidden_));
    features = network_.features(features, execution);
    gate = network_.scaled(gate, execution);
  }
  multiply(features, gate, used_in_place_ || !is_linear, gate_maps_,
           bias(bias_, config_.num_logits()), logits, execution);
  if (config_.gating_residual && tokens.rows > 0) {
    residual_.add(request.previous_logits, logits, execution);
  }
  if (!draws_noise(request, RouterNoise::Kind::kLearned) || noise_gate_.empty()) return {};
  return noise_logits(tokens, execution);
}

void CudaRouter::select(Matrix<float> logits, Matrix<const float> noise_logits,
                        const RouteRequest& request, const Execution& execution,
                        SavedForward::State* saved) {
  const ScopedStage stage(execution, "select", {.bytes = 4 * static_cast<double>(logits.size())});
  RouteArgs args{.logits = logits,
                 .selection_bias = bias(selection_bias_, config_.num_experts),
                 .config = config_,
                 .routing = routing_,
                 .room = drop_policy_ == DropPolicy::kReroute
                             ? capacity_for(routing_.expert.shape[0]).computing
                             : 0,
                 .request = request,
                 .execution = execution};
  if (hash_table_.data() != nullptr) {
    const std::int64_t size = hash_table_.bytes() / std::int64_t{sizeof(std::int32_t)};
    args.hash_table = {reinterpret_cast<const std::int32_t*>(hash_table_.data()),
                       {size / config_.top_k(), config_.top_k()}};
  }
  RouteAtOnceArgs at_once{.route = args, .noise_logits = noise_logits};
  if (request.training && config_.noise.is_on_logits()) at_once.noisy_logits = logits;
  if (saved != nullptr) return route_with_losses(at_once, losses_, *saved);
  route_at_once(at_once);
}

void CudaRouter::limit(Matrix<std::uint8_t> kept, const Execution& execution) {
  const std::int64_t num_tokens = routing_.expert.shape[0];
  kept_view_ = kept;
  const ScopedStage stage(execution, "plan",
                          {.bytes = 9 * static_cast<double>(routing_.expert.size())});
  Execution unchecked = execution;
  unchecked.status = nullptr;  // plan() counts bad ids
  const RouterCapacity slots = capacity_for(num_tokens);
  apply_capacity(
      {.assignments = DenseAssignments{.expert = routing_.expert, .weight = routing_.weight},
       .top_score = top_score_,
       .num_experts = config_.num_experts,
       .capacity = slots.computing,
       .zero_computation = config_.zero_computation.total(),
       .zero_computation_capacity = slots.zero_computation,
       // Behind a router that has rerouted, what is too much comes last.
       .policy = drop_policy_ == DropPolicy::kReroute ? DropPolicy::kToken : drop_policy_,
       .kept = flat(kept_view_),
       .counts = counts_.vector<std::int64_t>(config_.num_experts),
       .counts_kept = counts_kept_.vector<std::int64_t>(config_.num_experts),
       .execution = unchecked});
}

RouterCapacity CudaRouter::capacity_for(std::int64_t num_tokens) const {
  if (!capacity_factor_) return {};
  return switchyard::capacity_for(config_, *capacity_factor_, num_tokens);
}

void CudaRouter::download(RoutingRecord& record, cudaStream_t stream, HostStaging* staging) const {
  const auto picks = static_cast<std::size_t>(routing_.expert.size());
  const auto experts = static_cast<std::size_t>(config_.num_experts);
  const auto copy = [&](auto& to, const void* from, std::size_t size) {
    to.resize(size);
    const std::size_t bytes = size * sizeof(to[0]);
    if (staging != nullptr) {
      staging->download(to.data(), from, bytes, stream);
      return;
    }
    SWITCHYARD_CUDA(cudaMemcpyAsync(to.data(), from, bytes, cudaMemcpyDeviceToHost, stream));
  };
  copy(record.expert, routing_.expert.data, picks);
  copy(record.weight, routing_.weight.data, picks);
  copy(record.kept, kept_view_.data, picks);
  copy(record.counts, counts_.data(), experts);
  copy(record.counts_kept, counts_kept_.data(), experts);
}

metrics::Routing CudaRouter::stats(int num_ranks) const {
  require_own_routing(own_ ? Matrix<const std::int32_t>(routing_.expert)
                           : Matrix<const std::int32_t>{});
  const auto on_host = [](const auto& view) {
    std::vector<std::remove_cv_t<std::remove_pointer_t<decltype(view.data)>>> values(
        static_cast<std::size_t>(view.size()));
    SWITCHYARD_CUDA(cudaMemcpy(values.data(), view.data, values.size() * sizeof(values[0]),
                               cudaMemcpyDeviceToHost));
    return values;
  };
  const auto expert = on_host(routing_.expert);
  const auto weight = on_host(routing_.weight);
  const auto logits = on_host(own_logits_);
  const auto kept = on_host(capacity_factor_ ? kept_view_ : Matrix<const std::uint8_t>{});
  return routing_stats(
      {.num_experts = config_.num_experts,
       .assignments = DenseAssignments{.expert = {expert.data(), routing_.expert.shape},
                                       .weight = {weight.data(), routing_.weight.shape}},
       .kept = {capacity_factor_ ? kept.data() : nullptr, {std::ssize(kept)}},
       .logits = {logits.data(), own_logits_.shape},
       .score = config_.score()},
      num_ranks);
}

}  // namespace switchyard

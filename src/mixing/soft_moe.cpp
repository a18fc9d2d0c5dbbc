// Contract checks of Soft-MoE, what it saves, and which implementation runs it.
#include "switchyard/routing/soft_moe.hpp"

#include <cmath>

#include "core/shape_check.hpp"
#include "mixing/implementations.hpp"
#include "mixing/saved_soft_moe.hpp"
#include "mixing/slot_groups.hpp"

namespace switchyard {
namespace {

constexpr const Implementation<SoftMoeArgs>* kForwards[] = {
#ifdef SWITCHYARD_WITH_CUDA
    &kSoftMoeCuda,
#endif
    &kSoftMoeCpu};
constexpr const Implementation<SoftMoeBackwardArgs>* kBackwards[] = {
#ifdef SWITCHYARD_WITH_CUDA
    &kSoftMoeBackwardCuda,
#endif
    &kSoftMoeBackwardCpu};

void check_weights(const ExpertWeights* weights, const Execution& execution) {
  require(weights != nullptr, "weights is null");
  require(execution.backend == weights->backend(), "weights are on {}, the call is for {}",
          to_string(weights->backend()), to_string(execution.backend));
  const std::int32_t num_experts = weights->config().num_experts;
  require(weights->first_expert() == 0 && weights->num_local() == num_experts,
          "Soft-MoE mixes all {} experts, but the weights hold [{}, {})", num_experts,
          weights->first_expert(), weights->first_expert() + weights->num_local());
}

void check_phi(ConstRawMatrix phi, const ExpertConfig& experts, std::int64_t slots) {
  require_float("phi", phi.dtype);
  require(phi.rows == experts.num_experts * slots,
          "phi has {} rows, want num_experts={} times slots={}", phi.rows, experts.num_experts,
          slots);
  require_shape("phi", phi, phi.rows, experts.hidden);
}

void check_slots(const SoftMoeConfig& config) {
  require(config.slots >= 1, "slots={}, want at least 1", config.slots);
}

SlotGroups groups_of(const ExpertWeights& weights, const SoftMoeConfig& config,
                     std::int64_t num_tokens) {
  check_slots(config);
  return {config, num_tokens, weights.config().num_experts};
}

std::string sizes_of(const SoftMoeArgs& args) {
  return fmt::format("{} tokens x {} {}, {} slots of {} experts", args.x.rows, args.x.cols,
                     to_string(args.x.dtype), args.phi.rows, args.weights->config().num_experts);
}

std::string sizes_of(const SoftMoeBackwardArgs& args) {
  return fmt::format("{} tokens x {}, {} slots", args.dout.rows, args.dout.cols, args.phi.rows);
}

}  // namespace

SavedSoftMoe::SavedSoftMoe(Recompute recompute) : state_(std::make_unique<State>()) {
  state_->recompute = recompute;
}
SavedSoftMoe::~SavedSoftMoe() = default;
SavedSoftMoe::SavedSoftMoe(SavedSoftMoe&&) noexcept = default;
SavedSoftMoe& SavedSoftMoe::operator=(SavedSoftMoe&&) noexcept = default;

Recompute SavedSoftMoe::recompute() const { return state_->recompute; }
bool SavedSoftMoe::ready() const { return state_->use == State::Use::kReady; }
std::int64_t SavedSoftMoe::bytes() const { return state_->bytes; }

void SavedSoftMoe::State::begin(const SoftMoeArgs& args, const SlotGroups& groups,
                                DType of_outputs) {
  using Memory = SavedMixingMemory;
  backend = args.execution.backend;
  config = args.config;
  bytes = 0;
  const auto room = [&](Memory::Part part, DType dtype, std::int64_t rows, std::int64_t cols) {
    const std::int64_t size = rows * cols * size_of(dtype);
    bytes += size;
    return RawMatrix{memory->reserve(part, size), dtype, rows, cols};
  };
  const DType compute = args.x.dtype;
  const std::int64_t num_tokens = args.x.rows, hidden = args.x.cols;
  const std::int64_t rows = groups.num_sets() * groups.slots();
  const ExpertConfig& experts = args.weights->config();
  x = room(Memory::kX, compute, num_tokens, hidden);
  logits = {
      reinterpret_cast<float*>(room(Memory::kLogits, DType::kF32, num_tokens, groups.slots()).data),
      {num_tokens, groups.slots()}};
  slots = room(Memory::kSlots, compute, rows, hidden);
  slot_outputs = room(Memory::kSlotOutputs, of_outputs, rows, hidden);
  preactivation = {};
  if (recompute != Recompute::kNone) return;
  preactivation =
      room(Memory::kPreactivation, compute, rows, (experts.gated ? 2 : 1) * experts.inner);
}

std::int64_t soft_moe_workspace_bytes([[maybe_unused]] const ExpertWeights& weights,
                                      const SoftMoeConfig& config, std::int64_t num_tokens) {
  [[maybe_unused]] const SlotGroups groups = groups_of(weights, config, num_tokens);
#ifdef SWITCHYARD_WITH_CUDA
  if (weights.backend() == Backend::kCuda) return mixing::forward_workspace_bytes(weights, groups);
#endif
  return 0;
}

std::int64_t soft_moe_backward_workspace_bytes([[maybe_unused]] const ExpertWeights& weights,
                                               const SoftMoeConfig& config,
                                               std::int64_t num_tokens) {
  [[maybe_unused]] const SlotGroups groups = groups_of(weights, config, num_tokens);
#ifdef SWITCHYARD_WITH_CUDA
  if (weights.backend() == Backend::kCuda) return mixing::backward_workspace_bytes(weights, groups);
#endif
  return 0;
}

void soft_moe(const SoftMoeArgs& args) {
  check_weights(args.weights, args.execution);
  const ExpertConfig& experts = args.weights->config();
  const std::int64_t num_tokens = args.x.rows;
  require(std::isfinite(args.config.scale), "scale={} is not finite", args.config.scale);
  require(args.x.dtype == args.weights->dtype(), "x is {}, but the weights are {}",
          to_string(args.x.dtype), to_string(args.weights->dtype()));
  require_shape("x", args.x, num_tokens, experts.hidden);
  check_slots(args.config);
  check_phi(args.phi, experts, args.config.slots);
  require_float("out", args.out.dtype);
  require_shape("out", args.out, num_tokens, experts.hidden);
  require_apart("out", args.out, "x", args.x);
  const SlotGroups groups(args.config, num_tokens, experts.num_experts);
  for (const auto& [name, matrix] :
       {std::pair{"dispatch", args.dispatch}, std::pair{"combine", args.combine}}) {
    if (matrix.data != nullptr) require_shape(name, matrix, num_tokens, args.phi.rows);
  }
  if (args.saved != nullptr) args.saved->state().use = SavedSoftMoe::State::Use::kNothing;
  select<SoftMoeArgs>("soft_moe", kForwards, args, sizes_of).run(args);
}

void soft_moe_backward(const SoftMoeBackwardArgs& args) {
  require(args.saved != nullptr, "saved is null");
  check_weights(args.weights, args.execution);
  SavedSoftMoe::State& saved = args.saved->state();
  using Use = SavedSoftMoe::State::Use;
  require(saved.use != Use::kUsed, "what is saved was used by a backward already");
  require(saved.use == Use::kReady, "no soft_moe() has filled what is saved");
  require(saved.backend == args.execution.backend,
          "what is saved is of a forward on {}, the backward is for {}", to_string(saved.backend),
          to_string(args.execution.backend));
  const ExpertConfig& experts = args.weights->config();
  require(saved.x.cols == experts.hidden && saved.x.dtype == args.weights->dtype(),
          "what is saved is of {} tokens [{}, {}], but the weights are {} with hidden={}",
          to_string(saved.x.dtype), saved.x.rows, saved.x.cols, to_string(args.weights->dtype()),
          experts.hidden);
  check_phi(args.phi, experts, saved.config.slots);
  require_float("dout", args.dout.dtype);
  require_shape("dout", args.dout, saved.x.rows, experts.hidden);
  if (args.dx.data != nullptr) {
    require_float("dx", args.dx.dtype);
    require_shape("dx", args.dx, saved.x.rows, experts.hidden);
    require_apart("dx", args.dx, "dout", args.dout);
  }
  if (args.dphi.data != nullptr) {
    require_float("dphi", args.dphi.dtype);
    require_shape("dphi", args.dphi, args.phi.rows, experts.hidden);
  }
  select<SoftMoeBackwardArgs>("soft_moe_backward", kBackwards, args, sizes_of).run(args);
  saved.use = Use::kUsed;
}

}  // namespace switchyard

// The way back through Soft-MoE on a GPU, enqueued one product or pass after the other; nothing
// waits. Both softmaxes are made again from the logits. The lengths' way back needs no pass over
// tokens by slots of its own: with h = r g, the product of the logits' gradient scaled by both
// lengths, <x, h> of a token is scale times its sum of dl u, and alike of a slot.
#include "core/check.hpp"
#include "experts/raw_matrix.hpp"
#include "mixing/gpu/call.hpp"
#include "mixing/implementations.hpp"
#include "mixing/saved_soft_moe.hpp"

namespace switchyard {
namespace mixing {
namespace {

class DeviceBackward {
 public:
  explicit DeviceBackward(const SoftMoeBackwardArgs& args)
      : args_(args),
        saved_(args.saved->state()),
        groups_(saved_.config, saved_.x.rows, args.weights->config().num_experts),
        shape_(groups_),
        places_(*args.weights, groups_),
        call_("soft_moe_backward", args.execution, places_.common, places_.bytes),
        num_tokens_(saved_.x.rows),
        hidden_(saved_.x.cols),
        slots_(args.phi.rows),
        rows_(groups_.num_sets() * slots_),
        wants_logits_(args.dx.data != nullptr || args.dphi.data != nullptr ||
                      args.dscale != nullptr),
        weights_(call_.floats(places_.common.weights, num_tokens_, slots_)),
        dlogits_(call_.floats(places_.dlogits, num_tokens_, slots_)),
        gradient_(call_.floats(places_.gradient, num_tokens_, slots_)) {}

  void run() {
    call_.zero_counters_of_products();
    through_combine();
    through_experts();
    if (wants_logits_) through_dispatch();
  }

 private:
  [[nodiscard]] StageWork work(std::int64_t groups, int products) const {
    const auto pairs = static_cast<double>(groups * groups_.tokens() * slots_);
    const double flops = 2.0 * products * pairs * static_cast<double>(hidden_);
    return {.bytes = 4 * pairs, .flops = flops, .flops_executed = flops};
  }

  /// dY~ = C^T dy of every set, and of C the way back to its logits.
  void through_combine() {
    const ScopedStage stage(args_.execution, "soft_combine_backward",
                            work(groups_.num_sets(), wants_logits_ ? 2 : 1));
    dslot_outputs_ = {call_.data(places_.dslot_outputs), saved_.x.dtype, rows_, hidden_};
    combine_weights(shape_, saved_.logits.data, saved_.config.scale, {weights_.data},
                    call_.stream());
    ConstRawMatrix outputs{};
    if (wants_logits_) {
      outputs = call_.as_right(saved_.slot_outputs, args_.dout.dtype, places_.slot_outputs);
    }
    for (std::int64_t g = 0; g < groups_.count(); ++g) {
      const std::int64_t set = groups_.reads(g);
      if (set == SlotGroups::kNone) continue;
      const ConstRawMatrix dout = rows_of(args_.dout, groups_.first_token(g), groups_.tokens());
      call_.collect(of_group(weights_, g), dout, rows_of(dslot_outputs_, set * slots_, slots_));
      if (!wants_logits_) continue;
      call_.multiply(dout, rows_of(outputs, set * slots_, slots_), of_group(dlogits_, g));
    }
    if (!wants_logits_) return;
    combine_weights_backward(shape_, weights_.data, dlogits_.data, call_.stream());
  }

  /// dX~ of every set, and the gradients of the experts' parameters.
  void through_experts() {
    const PlanView plan = call_.plan(groups_);
    plan_of_slots(groups_, plan, call_.stream());
    const bool in_place = groups_.num_sets() == 1;
    dslots_ = call_.floats(places_.dslots, rows_, hidden_);
    const Matrix<float> dx_rows =
        in_place ? dslots_ : call_.floats(places_.common.rows, rows_, hidden_);
    experts_backward({.x = saved_.slots,
                      .dout = dslot_outputs_,
                      .preactivation = saved_.preactivation,
                      .plan = plan,
                      .weights = args_.weights,
                      .dx_rows = wants_logits_ ? raw(dx_rows) : RawMatrix{},
                      .gradients = args_.experts,
                      .accumulate = args_.accumulate,
                      .execution = call_.with(places_.experts)});
    if (!wants_logits_ || in_place) return;
    rows_by_slots(raw(dx_rows), plan.token_row.data, raw(dslots_), call_.stream());
  }

  /// Logits' gradients, and from them those of tokens, slots' parameters and the scale.
  void through_dispatch() {
    const ScopedStage stage(args_.execution, "soft_dispatch_backward", work(groups_.count(), 4));
    logits_gradient();
    if (args_.dx.data != nullptr) tokens_gradient();
    if (args_.dphi.data != nullptr) phi_gradient();
    if (args_.dscale == nullptr) return;
    sum_all(call_.floats(places_.token_sums), num_tokens_, args_.accumulate, args_.dscale,
            call_.stream());
  }

  [[nodiscard]] bool normalizes() const { return saved_.config.normalize; }
  [[nodiscard]] const float* of_token() const {
    return normalizes() ? call_.floats(places_.common.of_token) : nullptr;
  }
  [[nodiscard]] const float* of_slot() const {
    return normalizes() ? call_.floats(places_.common.of_slot) : nullptr;
  }

  /// Leaves D in weights_, and in dlogits_ the gradient of the bare product of tokens and phi.
  void logits_gradient() {
    sum_columns(
        shape_,
        {.logits = saved_.logits.data, .scale = saved_.config.scale, .sums = call_.column_sums()},
        call_.stream());
    dispatch_weights(shape_, saved_.logits.data, saved_.config.scale, call_.column_sums(),
                     {weights_.data}, call_.stream());
    for_sets([&](std::int64_t g, std::int64_t set) {
      call_.multiply(of_group(saved_.x, g),
                     raw(Matrix<const float>(rows_of(dslots_, set * slots_, slots_))),
                     of_group(gradient_, g));
    });
    const ColumnSums columns = call_.column_sums();
    dot_columns(shape_,
                {.weights = weights_.data,
                 .gradient = gradient_.data,
                 .dots = columns.sum,
                 .chunk_dots = columns.chunk_sum},
                call_.stream());
    if (normalizes()) {
      inverse_lengths(saved_.x, call_.floats(places_.common.of_token), call_.stream());
      inverse_lengths(args_.phi, call_.floats(places_.common.of_slot), call_.stream());
    }
    dispatch_weights_backward(shape_,
                              {.dispatch = weights_.data,
                               .gradient = gradient_.data,
                               .dots = columns.sum,
                               .logits = saved_.logits.data,
                               .of_token = of_token(),
                               .of_slot = of_slot(),
                               .scale = saved_.config.scale,
                               .dlogits = dlogits_.data,
                               .token_sums = call_.floats(places_.token_sums),
                               .slot_sums = call_.floats(places_.slot_sums),
                               .token_parts = call_.floats(places_.token_parts),
                               .slot_parts = call_.floats(places_.slot_parts)},
                              call_.stream());
  }

  /// Through the logits, and what the slots have of each token.
  void tokens_gradient() {
    const Matrix<float> through_logits = call_.floats(places_.dx, num_tokens_, hidden_);
    const Matrix<float> through_slots = call_.floats(places_.dx_of_slots, num_tokens_, hidden_);
    call_.mix(dlogits_, args_.phi, through_logits);
    for_sets([&](std::int64_t g, std::int64_t set) {
      call_.mix(of_group(weights_, g),
                raw(Matrix<const float>(rows_of(dslots_, set * slots_, slots_))),
                of_group(through_slots, g));
    });
    row_gradients({.first = through_logits,
                   .second = through_slots.data,
                   .rows = saved_.x,
                   .inverse = of_token(),
                   .sums = call_.floats(places_.token_sums),
                   .scale = saved_.config.scale,
                   .out = args_.dx},
                  &shape_, call_.stream());
  }

  /// One sum over all tokens.
  void phi_gradient() {
    if (!normalizes()) {
      call_.collect(dlogits_, saved_.x, args_.dphi, args_.accumulate);
      return;
    }
    const Matrix<float> dphi = call_.floats(places_.dphi, slots_, hidden_);
    call_.collect(dlogits_, saved_.x, raw(dphi));
    row_gradients({.first = dphi,
                   .rows = args_.phi,
                   .inverse = of_slot(),
                   .sums = call_.floats(places_.slot_sums),
                   .scale = saved_.config.scale,
                   .out = args_.dphi,
                   .accumulate = args_.accumulate},
                  nullptr, call_.stream());
  }

  template <typename Body>
  void for_sets(const Body& body) const {
    for (std::int64_t g = 0; g < groups_.count(); ++g) {
      if (groups_.makes(g) != SlotGroups::kNone) body(g, groups_.makes(g));
    }
  }
  template <typename M>
  [[nodiscard]] M of_group(M all, std::int64_t g) const {
    return rows_of(all, groups_.first_token(g), groups_.tokens());
  }

  const SoftMoeBackwardArgs& args_;
  const SavedSoftMoe::State& saved_;
  SlotGroups groups_;
  GroupShape shape_;
  BackwardPlaces places_;
  Call call_;
  std::int64_t num_tokens_;
  std::int64_t hidden_;
  std::int64_t slots_;  ///< S.
  std::int64_t rows_;   ///< B * S.
  bool wants_logits_;
  Matrix<float> weights_;   ///< C, then D.
  Matrix<float> dlogits_;   ///< G, then the gradients of logits.
  Matrix<float> gradient_;  ///< F.
  RawMatrix dslot_outputs_{};
  Matrix<float> dslots_{};
};

std::optional<std::string> reject(const SoftMoeBackwardArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  if (args.phi.cols % 8 != 0) return "hidden size is not a multiple of 8";
  if (!all_aligned_16({args.phi.data, args.dout.data, args.dx.data, args.dphi.data})) {
    return "phi, dout, dx or dphi are not aligned to 16 bytes";
  }
  return std::nullopt;
}

void run(const SoftMoeBackwardArgs& args) { DeviceBackward(args).run(); }

}  // namespace

std::int64_t backward_workspace_bytes(const ExpertWeights& weights, const SlotGroups& groups) {
  return BackwardPlaces(weights, groups).bytes;
}

}  // namespace mixing

const Implementation<SoftMoeBackwardArgs> kSoftMoeBackwardCuda{"cuda.products", mixing::reject,
                                                               mixing::run};

}  // namespace switchyard

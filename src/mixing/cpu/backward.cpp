// The way back through Soft-MoE on a CPU. Both softmaxes are made again from the logits: they are
// as large, and their exponentials cost a fraction of the product beside them. Seven dense products
// of a group's tokens by its slots, through the experts' kernels; bound by their multiply-adds.
#include <algorithm>
#include <vector>

#include "experts/raw_matrix.hpp"
#include "mixing/cpu/group_values.hpp"
#include "mixing/cpu/lengths.hpp"
#include "mixing/cpu/product.hpp"
#include "mixing/cpu/softmaxes.hpp"
#include "mixing/implementations.hpp"
#include "mixing/saved_soft_moe.hpp"

namespace switchyard {
namespace mixing {
namespace {

/// Memory of the calling thread for its group, or for the whole call.
struct Scratch {
  Values x, dout, weights, gradient, dx;
  Values phi, normal_phi, normal_x, dlogits, dphi, rows, dslots;
  cpu::HugeBuffer dslot_outputs;
  Plan plan;
};

Scratch& scratch_of_thread() {
  thread_local Scratch scratch;
  return scratch;
}

class BackwardPass {
 public:
  explicit BackwardPass(const SoftMoeBackwardArgs& args)
      : args_(args),
        saved_(args.saved->state()),
        groups_(saved_.config, saved_.x.rows, args.weights->config().num_experts),
        hidden_(saved_.x.cols),
        slots_(args.phi.rows),
        wants_logits_(args.dx.data != nullptr || args.dphi.data != nullptr ||
                      args.dscale != nullptr) {}

  void run() {
    through_combine();
    through_experts();
    if (wants_logits_) through_dispatch();
  }

 private:
  [[nodiscard]] ThreadPool* pool() const { return args_.execution.pool; }
  [[nodiscard]] StageWork work(std::int64_t groups, int products) const {
    const auto pairs = static_cast<double>(groups * groups_.tokens() * slots_);
    const double flops = 2.0 * products * pairs * static_cast<double>(hidden_);
    return {.bytes = 4 * pairs, .flops = flops, .flops_executed = flops};
  }

  /// dY~ = C^T dy of every set.
  void through_combine() {
    const ScopedStage stage(args_.execution, "soft_combine_backward", work(groups_.num_sets(), 1));
    const std::int64_t rows = groups_.num_sets() * slots_;
    const DType dtype = saved_.x.dtype;
    scratch_.dslot_outputs.reserve(static_cast<std::size_t>(rows * hidden_ * size_of(dtype)));
    dslot_outputs_ = {scratch_.dslot_outputs.data(), dtype, rows, hidden_};
    for_groups(groups_, pool(), [&](std::int64_t g, ThreadPool* inner) {
      if (groups_.reads(g) == SlotGroups::kNone) return;
      multiply({.left = combine_weights(g, inner),
                .left_transposed = true,
                .right = dout_of(g),
                .out = rows_of(dslot_outputs_, groups_.reads(g) * slots_, slots_),
                .pool = inner});
    });
  }

  /// dX~ of every set, and the gradients of the experts' parameters.
  void through_experts() {
    const std::int64_t rows = groups_.num_sets() * slots_;
    const PlanView plan = groups_.plan_into(scratch_.plan);
    if (wants_logits_) dslots_ = scratch_.dslots.matrix(rows, hidden_);
    const bool in_place = groups_.num_sets() == 1;
    const Matrix<float> dx_rows = !wants_logits_ ? Matrix<float>{}
                                  : in_place     ? dslots_
                                                 : scratch_.rows.matrix(rows, hidden_);
    experts_backward({.x = saved_.slots,
                      .dout = dslot_outputs_,
                      .preactivation = saved_.preactivation,
                      .plan = plan,
                      .weights = args_.weights,
                      .dx_rows = raw(dx_rows),
                      .gradients = args_.experts,
                      .accumulate = args_.accumulate,
                      .execution = args_.execution});
    if (!wants_logits_ || in_place) return;
    parallel_for(pool(), rows, [&](std::int64_t slot, int) {
      std::copy_n(dx_rows.row(plan.token_row[slot]), hidden_, dslots_.row(slot));
    });
  }

  /// Logits' gradients, and from them those of tokens, slots' parameters and the scale.
  void through_dispatch() {
    const ScopedStage stage(args_.execution, "soft_dispatch_backward", work(groups_.count(), 5));
    prepare_phi();
    dlogits_ = scratch_.dlogits.matrix(saved_.x.rows, slots_);
    if (wants_phi()) normal_x_ = scratch_.normal_x.matrix(saved_.x.rows, hidden_);
    std::vector<double> dscales(static_cast<std::size_t>(groups_.count()));
    for_groups(groups_, pool(), [&](std::int64_t g, ThreadPool* inner) {
      dscales[static_cast<std::size_t>(g)] = logits_gradient(g, inner);
      if (wants_phi()) keep_normal_x(g, inner);
      if (args_.dx.data != nullptr) tokens_gradient(g, inner);
    });
    if (wants_phi()) phi_gradient();
    if (args_.dscale == nullptr) return;
    double sum = 0;
    for (const double one : dscales) sum += one;
    *args_.dscale = static_cast<float>((args_.accumulate ? double{*args_.dscale} : 0.0) + sum);
  }

  [[nodiscard]] bool wants_phi() const { return args_.dphi.data != nullptr; }
  [[nodiscard]] bool normalizes() const { return saved_.config.normalize; }

  void prepare_phi() {
    phi_ = widened(args_.phi, scratch_.phi);
    normal_phi_ = phi_;
    if (!normalizes()) return;
    const Matrix<float> normal = scratch_.normal_phi.matrix(slots_, hidden_);
    parallel_for(pool(), slots_,
                 [&](std::int64_t s, int) { normalize_row(phi_.row(s), hidden_, normal.row(s)); });
    normal_phi_ = normal;
  }

  /// Leaves scale * dl in dlogits, and returns the group's part of the scale's gradient.
  double logits_gradient(std::int64_t g, ThreadPool* inner) const {
    const Matrix<float> dlogits = of_group(dlogits_, g);
    std::fill_n(dlogits.data, dlogits.size(), 0.0F);
    Scratch& scratch = scratch_of_thread();
    const Matrix<float> gradient = scratch.gradient.matrix(groups_.tokens(), slots_);
    if (const std::int64_t set = groups_.makes(g); set != SlotGroups::kNone) {
      multiply({.left = tokens_of(g),
                .right = rows_of(dslots_, set * slots_, slots_),
                .right_transposed = true,
                .out = raw(gradient),
                .pool = inner});
      softmax_over_tokens_backward({.weights = dispatch_weights(g, inner),
                                    .gradient = gradient,
                                    .dlogits = dlogits,
                                    .pool = inner});
    }
    if (const std::int64_t set = groups_.reads(g); set != SlotGroups::kNone) {
      multiply({.left = dout_of(g),
                .right = rows_of(floats_of(saved_.slot_outputs), set * slots_, slots_),
                .right_transposed = true,
                .out = raw(gradient),
                .pool = inner});
      softmax_over_slots_backward({.weights = combine_weights(g, inner),
                                   .gradient = gradient,
                                   .dlogits = dlogits,
                                   .pool = inner});
    }
    return through_scale(dlogits, of_group(saved_.logits, g), inner);
  }

  double through_scale(Matrix<float> dlogits, Matrix<const float> logits, ThreadPool* inner) const {
    std::vector<double> of_token(static_cast<std::size_t>(dlogits.shape[0]));
    parallel_for(inner, dlogits.shape[0], [&](std::int64_t t, int) {
      float* dl = dlogits.row(t);
      const float* u = logits.row(t);
      double sum = 0;
      for (std::int64_t s = 0; s < slots_; ++s) {
        sum += double{dl[s]} * double{u[s]};
        dl[s] *= saved_.config.scale;
      }
      of_token[static_cast<std::size_t>(t)] = sum;
    });
    double sum = 0;
    for (const double one : of_token) sum += one;
    return sum;
  }

  void keep_normal_x(std::int64_t g, ThreadPool* inner) const {
    const Matrix<const float> x = tokens_of(g);
    const Matrix<float> normal = of_group(normal_x_, g);
    parallel_for(inner, x.shape[0], [&](std::int64_t t, int) {
      if (normalizes()) {
        normalize_row(x.row(t), hidden_, normal.row(t));
      } else {
        std::copy_n(x.row(t), hidden_, normal.row(t));
      }
    });
  }

  /// Through the logits, then what the slots have of each token.
  void tokens_gradient(std::int64_t g, ThreadPool* inner) const {
    const Matrix<float> dx = scratch_of_thread().dx.matrix(groups_.tokens(), hidden_);
    multiply({.left = of_group(dlogits_, g), .right = normal_phi_, .out = raw(dx), .pool = inner});
    if (normalizes()) {
      const Matrix<const float> x = tokens_of(g);
      parallel_for(inner, x.shape[0], [&](std::int64_t t, int) {
        normalize_row_backward(x.row(t), hidden_, dx.row(t));
      });
    }
    if (const std::int64_t set = groups_.makes(g); set != SlotGroups::kNone) {
      multiply({.left = dispatch_weights(g, inner),
                .right = rows_of(dslots_, set * slots_, slots_),
                .out = raw(dx),
                .accumulate = true,
                .pool = inner});
    }
    const RawMatrix out = rows_of(args_.dx, groups_.first_token(g), groups_.tokens());
    parallel_for(inner, out.rows, [&](std::int64_t t, int) {
      row_ops::narrow(out.dtype, dx.row(t), out.row(t), hidden_);
    });
  }

  /// One sum over all tokens.
  void phi_gradient() {
    const Matrix<float> dphi = scratch_.dphi.matrix(slots_, hidden_);
    multiply({.left = dlogits_,
              .left_transposed = true,
              .right = normal_x_,
              .out = raw(dphi),
              .pool = pool()});
    parallel_for(pool(), slots_, [&](std::int64_t s, int) {
      if (normalizes()) normalize_row_backward(phi_.row(s), hidden_, dphi.row(s));
      row_ops::write_gradient(dphi.row(s), args_.dphi.dtype, args_.dphi.row(s), hidden_,
                              args_.accumulate);
    });
  }

  template <typename T>
  [[nodiscard]] Matrix<T> of_group(Matrix<T> all, std::int64_t g) const {
    return rows_of(all, groups_.first_token(g), groups_.tokens());
  }
  [[nodiscard]] Matrix<const float> tokens_of(std::int64_t g) const {
    return widened(rows_of(saved_.x, groups_.first_token(g), groups_.tokens()),
                   scratch_of_thread().x);
  }
  [[nodiscard]] Matrix<const float> dout_of(std::int64_t g) const {
    return widened(rows_of(args_.dout, groups_.first_token(g), groups_.tokens()),
                   scratch_of_thread().dout);
  }
  /// Of the group, until the next of either.
  [[nodiscard]] Matrix<const float> dispatch_weights(std::int64_t g, ThreadPool* inner) const {
    const SoftmaxArgs args = softmax_of(g, inner);
    softmax_over_tokens(args);
    return args.weights;
  }
  [[nodiscard]] Matrix<const float> combine_weights(std::int64_t g, ThreadPool* inner) const {
    const SoftmaxArgs args = softmax_of(g, inner);
    softmax_over_slots(args);
    return args.weights;
  }
  [[nodiscard]] SoftmaxArgs softmax_of(std::int64_t g, ThreadPool* inner) const {
    return {.logits = of_group(saved_.logits, g),
            .scale = saved_.config.scale,
            .weights = scratch_of_thread().weights.matrix(groups_.tokens(), slots_),
            .pool = inner};
  }

  const SoftMoeBackwardArgs& args_;
  const SavedSoftMoe::State& saved_;
  SlotGroups groups_;
  std::int64_t hidden_;
  std::int64_t slots_;  ///< S.
  bool wants_logits_;
  Scratch& scratch_ = scratch_of_thread();
  RawMatrix dslot_outputs_{};
  Matrix<float> dslots_{};
  Matrix<float> dlogits_{};
  Matrix<float> normal_x_{};  ///< Or the tokens themselves.
  Matrix<const float> phi_{};
  Matrix<const float> normal_phi_{};
};

std::optional<std::string> reject(const SoftMoeBackwardArgs& args) {
  if (args.execution.backend != Backend::kCpu) return "runs on the CPU";
  return std::nullopt;
}

void run(const SoftMoeBackwardArgs& args) { BackwardPass(args).run(); }

}  // namespace
}  // namespace mixing

const Implementation<SoftMoeBackwardArgs> kSoftMoeBackwardCpu{"cpu.products", mixing::reject,
                                                              mixing::run};

}  // namespace switchyard

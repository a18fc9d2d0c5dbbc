// Soft-MoE on a CPU: logits, slots, experts, outputs. Three dense products beside the experts',
// each through the experts' kernels; a group's weights are made where they are used and stay in the
// thread's memory. Bound by the multiply-adds, with few slots by logits and their exponentials.
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>

#include "core/check.hpp"
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
  Values x, normal, weights;
  Values phi, normal_phi, logits, slot_outputs, rows;
  cpu::HugeBuffer slots;
  Plan plan;
};

Scratch& scratch_of_thread() {
  thread_local Scratch scratch;
  return scratch;
}

RawMatrix matrix_in(cpu::HugeBuffer& memory, DType dtype, std::int64_t rows, std::int64_t cols) {
  memory.reserve(static_cast<std::size_t>(rows * cols * size_of(dtype)));
  return {memory.data(), dtype, rows, cols};
}

/// Of what a forward saves.
class HostMemory final : public SavedMixingMemory {
 public:
  [[nodiscard]] std::byte* reserve(Part part, std::int64_t bytes) override {
    parts_[part].reserve(static_cast<std::size_t>(bytes));
    return parts_[part].data();
  }

 private:
  std::array<cpu::HugeBuffer, kParts> parts_;
};

class Forward {
 public:
  explicit Forward(const SoftMoeArgs& args)
      : args_(args),
        groups_(args.config, args.x.rows, args.weights->config().num_experts),
        hidden_(args.x.cols),
        slots_(args.phi.rows) {}

  void run() {
    reserve();
    make_logits();
    make_slots();
    run_experts();
    mix_outputs();
    if (args_.saved != nullptr) args_.saved->state().use = SavedSoftMoe::State::Use::kReady;
  }

 private:
  [[nodiscard]] ThreadPool* pool() const { return args_.execution.pool; }
  [[nodiscard]] double product_flops(std::int64_t groups) const {
    return 2.0 * static_cast<double>(groups * groups_.tokens() * slots_) *
           static_cast<double>(hidden_);
  }

  void reserve() {
    const DType dtype = args_.x.dtype;
    const std::int64_t rows = groups_.num_sets() * slots_;
    if (args_.saved == nullptr) {
      logits_ = scratch_.logits.matrix(args_.x.rows, slots_);
      slot_inputs_ = matrix_in(scratch_.slots, dtype, rows, hidden_);
      slot_outputs_ = scratch_.slot_outputs.matrix(rows, hidden_);
      return;
    }
    SavedSoftMoe::State& saved = args_.saved->state();
    if (dynamic_cast<HostMemory*>(saved.memory.get()) == nullptr) {
      saved.memory = std::make_unique<HostMemory>();
    }
    saved.begin(args_, groups_, DType::kF32);
    std::copy_n(args_.x.data, args_.x.bytes(), saved.x.data);
    logits_ = saved.logits;
    slot_inputs_ = saved.slots;
    slot_outputs_ = floats_of(saved.slot_outputs);
  }

  void make_logits() {
    const ScopedStage stage(args_.execution, "soft_logits",
                            work(product_flops(groups_.count()),
                                 args_.x.bytes() + args_.phi.bytes(), 4 * logits_.size()));
    Matrix<const float> phi = widened(args_.phi, scratch_.phi);
    if (args_.config.normalize) {
      const Matrix<float> normal = scratch_.normal_phi.matrix(slots_, hidden_);
      parallel_for(pool(), slots_,
                   [&](std::int64_t s, int) { normalize_row(phi.row(s), hidden_, normal.row(s)); });
      phi = normal;
    }
    std::atomic<std::int64_t> bad_token{std::numeric_limits<std::int64_t>::max()};
    for_groups(groups_, pool(), [&](std::int64_t g, ThreadPool* inner) {
      Matrix<const float> x = tokens_of(g);
      if (args_.config.normalize) x = normalized(x, inner);
      const Matrix<float> logits = logits_of(g);
      multiply(
          {.left = x, .right = phi, .right_transposed = true, .out = raw(logits), .pool = inner});
      parallel_for(inner, logits.shape[0], [&](std::int64_t t, int) {
        const bool fine =
            std::all_of(logits.row(t), logits.row(t) + slots_, [&](float u) { return is_fine(u); });
        if (!fine) note_lowest(bad_token, groups_.first_token(g) + t);
      });
    });
    const std::int64_t token = bad_token.load();
    if (token < args_.x.rows) refuse(token);
  }

  [[nodiscard]] bool is_fine(float u) const { return std::isfinite(args_.config.scale * u); }

  static void note_lowest(std::atomic<std::int64_t>& lowest, std::int64_t token) {
    std::int64_t seen = lowest.load();
    while (token < seen && !lowest.compare_exchange_weak(seen, token)) {
    }
  }

  [[noreturn]] void refuse(std::int64_t token) const {
    const float* row = logits_.row(token);
    const auto* const bad =
        std::find_if_not(row, row + slots_, [&](float u) { return is_fine(u); });
    fail(ErrorCode::kInvalidArgument, "the logit of token {} and slot {} is {}", token, bad - row,
         args_.config.scale * *bad);
  }

  void make_slots() {
    const ScopedStage stage(
        args_.execution, "soft_dispatch",
        work(product_flops(groups_.num_sets()),
             4 * groups_.num_sets() * groups_.tokens() * slots_ + args_.x.bytes(),
             slot_inputs_.bytes()));
    for_groups(groups_, pool(), [&](std::int64_t g, ThreadPool* inner) {
      const Matrix<float> weights = weights_of(g, args_.dispatch);
      if (groups_.makes(g) == SlotGroups::kNone) {
        if (args_.dispatch.data != nullptr) std::fill_n(weights.data, weights.size(), 0.0F);
        return;
      }
      softmax_over_tokens(
          {.logits = logits_of(g), .scale = args_.config.scale, .weights = weights, .pool = inner});
      multiply({.left = weights,
                .left_transposed = true,
                .right = tokens_of(g),
                .out = rows_of(slot_inputs_, groups_.makes(g) * slots_, slots_),
                .pool = inner});
    });
  }

  void run_experts() {
    if (groups_.num_sets() == 0) return;
    const PlanView plan = groups_.plan_into(scratch_.plan);
    const std::int64_t rows = groups_.num_sets() * slots_;
    // Rows of one set lie as its slots do.
    const bool in_place = groups_.num_sets() == 1;
    const Matrix<float> out = in_place ? slot_outputs_ : scratch_.rows.matrix(rows, hidden_);
    experts(
        {.x = slot_inputs_,
         .plan = plan,
         .weights = args_.weights,
         .rows = raw(out),
         .preactivation = args_.saved == nullptr ? RawMatrix{} : args_.saved->state().preactivation,
         .execution = args_.execution});
    if (in_place) return;
    parallel_for(pool(), rows, [&](std::int64_t slot, int) {
      std::copy_n(out.row(plan.token_row[slot]), hidden_, slot_outputs_.row(slot));
    });
  }

  void mix_outputs() {
    const ScopedStage stage(
        args_.execution, "soft_combine",
        work(product_flops(groups_.num_sets()),
             4 * (groups_.num_sets() * groups_.tokens() * slots_ + slot_outputs_.size()),
             args_.out.bytes()));
    for_groups(groups_, pool(), [&](std::int64_t g, ThreadPool* inner) {
      const RawMatrix out = rows_of(args_.out, groups_.first_token(g), groups_.tokens());
      const Matrix<float> weights = weights_of(g, args_.combine);
      const std::int64_t set = groups_.reads(g);
      if (set == SlotGroups::kNone) {
        std::fill_n(out.data, out.bytes(), std::byte{0});
        if (args_.combine.data != nullptr) std::fill_n(weights.data, weights.size(), 0.0F);
        return;
      }
      softmax_over_slots(
          {.logits = logits_of(g), .scale = args_.config.scale, .weights = weights, .pool = inner});
      multiply({.left = weights,
                .right = rows_of(slot_outputs_, set * slots_, slots_),
                .out = out,
                .pool = inner});
    });
  }

  [[nodiscard]] static StageWork work(double flops, std::int64_t read, std::int64_t written) {
    return {.bytes = static_cast<double>(read + written), .flops = flops, .flops_executed = flops};
  }

  [[nodiscard]] Matrix<float> logits_of(std::int64_t g) const {
    return rows_of(logits_, groups_.first_token(g), groups_.tokens());
  }
  /// Where the weights of a group go: the caller's matrix, or the thread's memory.
  [[nodiscard]] Matrix<float> weights_of(std::int64_t g, Matrix<float> wanted) const {
    if (wanted.data != nullptr) return rows_of(wanted, groups_.first_token(g), groups_.tokens());
    return scratch_of_thread().weights.matrix(groups_.tokens(), slots_);
  }
  [[nodiscard]] Matrix<const float> tokens_of(std::int64_t g) const {
    return widened(rows_of(args_.x, groups_.first_token(g), groups_.tokens()),
                   scratch_of_thread().x);
  }
  [[nodiscard]] Matrix<const float> normalized(Matrix<const float> x, ThreadPool* inner) const {
    const Matrix<float> out = scratch_of_thread().normal.matrix(x.shape[0], x.shape[1]);
    parallel_for(inner, x.shape[0],
                 [&](std::int64_t t, int) { normalize_row(x.row(t), hidden_, out.row(t)); });
    return out;
  }

  const SoftMoeArgs& args_;
  SlotGroups groups_;
  std::int64_t hidden_;
  std::int64_t slots_;  ///< S.
  Scratch& scratch_ = scratch_of_thread();
  Matrix<float> logits_{};
  RawMatrix slot_inputs_{};
  Matrix<float> slot_outputs_{};
};

std::optional<std::string> reject(const SoftMoeArgs& args) {
  if (args.execution.backend != Backend::kCpu) return "runs on the CPU";
  return std::nullopt;
}

void run(const SoftMoeArgs& args) { Forward(args).run(); }

}  // namespace
}  // namespace mixing

const Implementation<SoftMoeArgs> kSoftMoeCpu{"cpu.products", mixing::reject, mixing::run};

}  // namespace switchyard

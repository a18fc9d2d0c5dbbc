// Soft-MoE on a GPU: logits, slots, experts, outputs, enqueued one after the other; nothing waits.
// The dense products are bound by the tensor cores; between them passes over [T, S], by memory.
#include "core/check.hpp"
#include "core/gpu/saved_memory.hpp"
#include "experts/raw_matrix.hpp"
#include "mixing/gpu/call.hpp"
#include "mixing/implementations.hpp"
#include "mixing/saved_soft_moe.hpp"

namespace switchyard {
namespace mixing {
namespace {

class DeviceForward {
 public:
  explicit DeviceForward(const SoftMoeArgs& args)
      : args_(args),
        groups_(args.config, args.x.rows, args.weights->config().num_experts),
        shape_(groups_),
        places_(*args.weights, groups_),
        call_("soft_moe", args.execution, places_.common, places_.bytes),
        hidden_(args.x.cols),
        slots_(args.phi.rows),
        rows_(groups_.num_sets() * slots_) {}

  void run() {
    reserve();
    if (args_.x.rows > 0) {
      make_logits();
      make_slots();
      run_experts();
      mix_outputs();
    }
    if (args_.saved != nullptr) args_.saved->state().use = SavedSoftMoe::State::Use::kReady;
  }

 private:
  void reserve() {
    const DType dtype = args_.x.dtype;
    if (args_.saved == nullptr) {
      logits_ = call_.floats(places_.logits, args_.x.rows, slots_);
      slot_inputs_ = {call_.data(places_.slots), dtype, rows_, hidden_};
      slot_outputs_ = {call_.data(places_.slot_outputs), dtype, rows_, hidden_};
      return;
    }
    SavedSoftMoe::State& saved = args_.saved->state();
    (void)SavedOnDevice<SavedMixingMemory>::prepare(saved.memory, call_.stream());
    saved.begin(args_, groups_, dtype);
    logits_ = saved.logits;
    slot_inputs_ = saved.slots;
    slot_outputs_ = saved.slot_outputs;
    if (args_.x.rows == 0) return;
    SWITCHYARD_CUDA(cudaMemcpyAsync(saved.x.data, args_.x.data,
                                    static_cast<std::size_t>(args_.x.bytes()),
                                    cudaMemcpyDeviceToDevice, call_.stream()));
  }

  void make_logits() {
    const ScopedStage stage(args_.execution, "soft_logits",
                            work(product_flops(groups_.count()),
                                 args_.x.bytes() + args_.phi.bytes(), 4 * logits_.size()));
    call_.zero_counters_of_products();
    call_.multiply(args_.x, call_.as_right(args_.phi, args_.x.dtype, places_.common.phi), logits_);
    ColumnSumArgs args{.logits = logits_.data,
                       .scale = args_.config.scale,
                       .sums = call_.column_sums(),
                       .status = args_.execution.status};
    if (args_.config.normalize) {
      inverse_lengths(args_.x, call_.floats(places_.common.of_token), call_.stream());
      inverse_lengths(args_.phi, call_.floats(places_.common.of_slot), call_.stream());
      args.of_token = call_.floats(places_.common.of_token);
      args.of_slot = call_.floats(places_.common.of_slot);
    }
    sum_columns(shape_, args, call_.stream());
  }

  void make_slots() {
    const ScopedStage stage(
        args_.execution, "soft_dispatch",
        work(product_flops(groups_.num_sets()),
             4 * groups_.num_sets() * groups_.tokens() * slots_ + args_.x.bytes(),
             slot_inputs_.bytes()));
    if (rows_ == 0 && args_.dispatch.data == nullptr) return;
    const RawMatrix weights = weights_in(args_.dispatch, args_.x);
    dispatch_weights(shape_, logits_.data, args_.config.scale, call_.column_sums(),
                     {weights.data, weights.dtype}, call_.stream());
    for (std::int64_t g = 0; g < groups_.count(); ++g) {
      const std::int64_t set = groups_.makes(g);
      if (set == SlotGroups::kNone) continue;
      with_weights(of_group(weights, g), [&](const auto& of_group) {
        call_.collect(of_group, rows_of(args_.x, groups_.first_token(g), groups_.tokens()),
                      rows_of(slot_inputs_, set * slots_, slots_));
      });
    }
  }

  void run_experts() {
    if (rows_ == 0) return;
    call_.zero(places_.experts, kActAt);
    const PlanView plan = call_.plan(groups_);
    plan_of_slots(groups_, plan, call_.stream());
    // Rows of one set lie as its slots do.
    const bool in_place = groups_.num_sets() == 1;
    RawMatrix out = slot_outputs_;
    if (!in_place) out.data = call_.data(places_.common.rows);
    experts(
        {.x = slot_inputs_,
         .plan = plan,
         .weights = args_.weights,
         .rows = out,
         .preactivation = args_.saved == nullptr ? RawMatrix{} : args_.saved->state().preactivation,
         .execution = call_.with(places_.experts)});
    if (!in_place) rows_by_slots(out, plan.token_row.data, slot_outputs_, call_.stream());
  }

  void mix_outputs() {
    const ScopedStage stage(
        args_.execution, "soft_combine",
        work(product_flops(groups_.num_sets()),
             4 * groups_.num_sets() * groups_.tokens() * slots_ + slot_outputs_.bytes(),
             args_.out.bytes()));
    const RawMatrix weights = weights_in(args_.combine, slot_outputs_);
    if (rows_ > 0 || args_.combine.data != nullptr) {
      combine_weights(shape_, logits_.data, args_.config.scale, {weights.data, weights.dtype},
                      call_.stream());
    }
    const bool is_f32 = args_.out.dtype == DType::kF32;
    const Matrix<float> sums{
        is_f32 ? reinterpret_cast<float*>(args_.out.data) : call_.floats(places_.out),
        {args_.out.rows, hidden_}};
    for (std::int64_t g = 0; g < groups_.count(); ++g) {
      const std::int64_t set = groups_.reads(g);
      const Matrix<float> out = of_group(sums, g);
      if (set == SlotGroups::kNone) {
        SWITCHYARD_CUDA(
            cudaMemsetAsync(out.data, 0, static_cast<std::size_t>(4 * out.size()), call_.stream()));
        continue;
      }
      with_weights(of_group(weights, g), [&](const auto& of_group) {
        call_.mix(of_group, rows_of(slot_outputs_, set * slots_, slots_), out);
      });
    }
    if (!is_f32) row_gradients({.first = sums, .out = args_.out}, nullptr, call_.stream());
  }

  [[nodiscard]] double product_flops(std::int64_t groups) const {
    return 2.0 * static_cast<double>(groups * groups_.tokens() * slots_) *
           static_cast<double>(hidden_);
  }
  [[nodiscard]] static StageWork work(double flops, std::int64_t read, std::int64_t written) {
    return {.bytes = static_cast<double>(read + written), .flops = flops, .flops_executed = flops};
  }
  template <typename M>
  [[nodiscard]] M of_group(M all, std::int64_t g) const {
    return rows_of(all, groups_.first_token(g), groups_.tokens());
  }
  /// Where weights [T, S] go that rows like these are multiplied with: the caller's matrix, or the
  /// workspace, there as the product takes them.
  [[nodiscard]] RawMatrix weights_in(Matrix<float> wanted, ConstRawMatrix rows) const {
    if (wanted.data != nullptr) return raw(wanted);
    const DType dtype = call_.rounds(rows, slots_) ? DType::kBF16 : DType::kF32;
    return {call_.data(places_.common.weights), dtype, args_.x.rows, slots_};
  }
  /// Calls then(weights) as f32 or as bf16.
  template <typename Then>
  static void with_weights(ConstRawMatrix weights, const Then& then) {
    if (weights.dtype == DType::kBF16) return then(weights);
    then(Matrix<const float>{reinterpret_cast<const float*>(weights.data),
                             {weights.rows, weights.cols}});
  }

  const SoftMoeArgs& args_;
  SlotGroups groups_;
  GroupShape shape_;
  ForwardPlaces places_;
  Call call_;
  std::int64_t hidden_;
  std::int64_t slots_;  ///< S.
  std::int64_t rows_;   ///< B * S.
  Matrix<float> logits_{};
  RawMatrix slot_inputs_{};
  RawMatrix slot_outputs_{};
};

std::optional<std::string> reject(const SoftMoeArgs& args) {
  if (args.execution.backend != Backend::kCuda) return "needs the backend cuda";
  if (args.x.cols % 8 != 0) return "hidden size is not a multiple of 8";
  if (!all_aligned_16(
          {args.x.data, args.phi.data, args.out.data, args.dispatch.data, args.combine.data})) {
    return "x, phi, out, dispatch or combine are not aligned to 16 bytes";
  }
  return std::nullopt;
}

void run(const SoftMoeArgs& args) { DeviceForward(args).run(); }

}  // namespace

std::int64_t forward_workspace_bytes(const ExpertWeights& weights, const SlotGroups& groups) {
  return ForwardPlaces(weights, groups).bytes;
}

}  // namespace mixing

const Implementation<SoftMoeArgs> kSoftMoeCuda{"cuda.products", mixing::reject, mixing::run};

}  // namespace switchyard

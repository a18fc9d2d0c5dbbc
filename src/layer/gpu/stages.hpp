#pragma once

#include <optional>

#include "core/gpu/stage_ranges.hpp"
#include "layer/gpu/expert_tokens.hpp"
#include "layer/gpu/experts.hpp"
#include "layer/gpu/router/router.hpp"
#include "layer/gpu/scratch.hpp"
#include "layer/gpu/shared_experts.hpp"
#include "layer/gpu/status_of_calls.hpp"
#include "switchyard/layer.hpp"

namespace switchyard {

/// What a layer on a GPU has on one rank and over ranks alike: its stages but the exchange, their
/// memory, how they run, and what their kernels have found wrong.
class CudaStages {
 public:
  /// @throws Error{kUnsupported}: rank_invariant with a wire of fp8.
  CudaStages(const LayerModel& model, const LayerOptions& options, int rank, int num_ranks);

  /// All memory that calls of so many tokens need.
  void reserve(std::int64_t num_tokens);
  /// A call: its stream, and who is told of its stages (or null).
  void begin(cudaStream_t stream, StageRecorder* recorder);

  [[nodiscard]] DType compute() const { return compute_; }
  [[nodiscard]] cudaStream_t stream() const { return stream_; }
  [[nodiscard]] const Execution& execution() const { return execution_; }
  /// Of the call: who asks for the times of stages gets them one by one.
  [[nodiscard]] bool recorded() const { return recorded_; }
  [[nodiscard]] CudaRouter& router() { return router_; }
  /// Of a chain: its gate, its biases and its report from here on.
  void use_iteration(std::int32_t iteration) {
    router_.use_iteration(iteration);
    status_.use_part(iteration);
  }
  [[nodiscard]] CudaExperts& experts() { return *experts_; }
  [[nodiscard]] const CudaExperts& experts() const { return *experts_; }
  [[nodiscard]] CudaScratch& scratch() { return *scratch_; }
  [[nodiscard]] bool has_shared() const { return shared_.has_value(); }
  [[nodiscard]] CudaSharedExperts& shared() { return *shared_; }
  [[nodiscard]] std::int64_t hidden() const { return hidden_; }

  /// The tokens in the compute type. Reports "pack" where they were not.
  [[nodiscard]] ConstRawMatrix to_compute(ConstRawMatrix tokens);
  /// The same of tokens on the device for `saved`: a copy in its memory, but where the caller's
  /// own stay.
  [[nodiscard]] ConstRawMatrix keep(ConstRawMatrix tokens, const ForwardArgs& args,
                                    SavedForward::State& saved);
  /// [T, H] of the shared experts, or empty. @param saved  Or null.
  [[nodiscard]] Matrix<const float> run_shared(ConstRawMatrix tokens,
                                               SavedForward::State* saved = nullptr);
  /// What the experts are given of the tokens behind the router, and what is added to their sums.
  /// @param shared  As run_shared().
  [[nodiscard]] TokensForExperts to_experts(ConstRawMatrix tokens, Matrix<const float> shared) {
    return expert_tokens_.run({.x = tokens, .routing = router_.routing(), .kept = router_.kept()},
                              shared, execution_);
  }
  /// Of a forward that has kept its tokens and routing: what they were given.
  [[nodiscard]] TokensForExperts to_experts(const SavedForward::State& saved) {
    return expert_tokens_.again(chosen_of(saved), execution_);
  }
  [[nodiscard]] bool weight_on_input() const { return expert_tokens_.weight_on_input(); }
  [[nodiscard]] CudaZeroComputation& zero_computation() {
    return expert_tokens_.zero_computation();
  }
  /// Something is added to the experts' sums in every call.
  [[nodiscard]] bool adds_to_sums() { return has_shared() || zero_computation().any(); }
  /// Reads the weights of all experts again. Waits for what runs.
  void reload_experts();

  /// Every group's partial sums travel by themselves.
  [[nodiscard]] bool each_group() const { return each_group_; }
  [[nodiscard]] std::int32_t groups_per_row() const;
  /// Rows of sums that calls of so many tokens a rank may have.
  [[nodiscard]] std::int64_t rows_of_sums(std::int64_t num_tokens) const;

  /// Tokens reach the experts in another type than the experts compute with.
  [[nodiscard]] bool crosses() const;
  /// Where they are widened again: [rows, cols] of the compute type.
  [[nodiscard]] RawMatrix crossed(std::int64_t rows, std::int64_t cols);
  /// Rows of the compute type as e4m3 with their scales, valid until the next call; where `expert`
  /// [N, K] is given, those that have one. Reports "quantize".
  [[nodiscard]] RowsForExperts quantised(ConstRawMatrix x, Matrix<const std::int32_t> expert = {});
  /// Room for so many tokens in the compute type.
  [[nodiscard]] RawMatrix converted(std::int64_t rows, std::int64_t cols);

  /// Where the experts' kernels report to.
  [[nodiscard]] PlanReport place_of_report() const { return status_.place_of_report(); }
  /// Enqueues the report of a call whose kernels do not. @param rows_used  On the device.
  void report(const std::int32_t* rows_used, const std::int64_t* rows_between_ranks,
              std::int32_t num_rank_pairs);
  /// Of a chain; else 1.
  [[nodiscard]] std::int32_t num_iterations() const { return status_.num_parts(); }
  /// What the last call has reported of an iteration, once its stream has been waited for.
  [[nodiscard]] const CallStatus& told(std::int32_t iteration) const {
    return status_.told(iteration);
  }
  /// Throws what an earlier call has left, once.
  void raise_status();

 private:
  LayerOptions options_;
  std::shared_ptr<CudaScratch> scratch_;
  std::int32_t num_experts_, num_logits_, top_k_;
  std::int64_t hidden_;
  DType compute_;
  CudaRouter router_;
  bool each_group_;
  bool recorded_ = false;
  Execution execution_;
  StageRanges ranges_;
  cudaStream_t stream_ = nullptr;
  CudaExpertTokens expert_tokens_;
  std::optional<CudaExperts> experts_;
  std::optional<CudaSharedExperts> shared_;
  ExpertConfig shared_config_;
  std::shared_ptr<const ExpertSource> source_, shared_source_;
  StatusOfCalls status_;
  std::int64_t reserved_tokens_ = -1;
  DeviceBuffer workspace_, crossed_, codes_, scales_;
};

}  // namespace switchyard

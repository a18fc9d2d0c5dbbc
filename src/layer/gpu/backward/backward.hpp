#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "layer/gpu/backward/gradient_exchange.hpp"
#include "layer/gpu/backward/kernels.hpp"
#include "layer/gpu/stages.hpp"
#include "layer/saved_forward.hpp"

namespace switchyard {

/// The way back through a layer on GPUs: its stages in order, in memory that is made once.
class CudaLayerBackward {
 public:
  /// All memory that calls of so many tokens need beside what they are lent by the forward's stages
  /// (for which they have been reserved) and by what is saved.
  /// @param ranks  Over ranks, else null.
  void reserve(std::int64_t num_tokens, Recompute recompute, CudaStages& stages,
               const CudaGradientExchange* ranks = nullptr);
  [[nodiscard]] bool is_reserved(std::int64_t num_tokens, Recompute recompute) const {
    return num_tokens <= reserved_tokens_[index_of(recompute)];
  }
  /// @param losses Of the router.
  /// @param input  The routing of this rank's tokens as it was sent, and what this rank's experts
  /// were
  ///               given, x [N, H] after the wire.
  /// @param ranks  Or null: one rank, whose tokens these are.
  void run(const BackwardArgs& args, const SavedForward::State& saved,
           const TokensForExperts& input, const LossConfig& losses, CudaStages& stages,
           CudaGradientExchange* ranks = nullptr);

 private:
  struct Call {
    const BackwardArgs& args;
    const SavedForward::State& saved;
    CudaStages& stages;
    const LossConfig& losses;
    CudaGradientExchange* ranks;
    bool to_router;
    bool to_choice;  ///< Gradients of the tokens' weights are wanted.
    ConstRawMatrix dout{};
    BackwardArgs here{};  ///< `args` with a rank's own parts of what ranks add up.
  };
  /// What the experts of this rank go back through.
  struct Rows {
    ConstRawMatrix x{}, dout{};   ///< [N, H].
    RowAssignments work{};        ///< Of them, as the forward's.
    Vector<float> drow_weight{};  ///< Of the layout's rows, or empty: not wanted,
    RawMatrix dx{};               ///< likewise, of the compute type,
    Matrix<float> dweight{};      ///< [N, K] by choice, where drow_weight is.
  };

  [[nodiscard]] ConstRawMatrix to_compute(const BackwardArgs& args, CudaStages& stages);
  [[nodiscard]] Rows own_rows(const Call& call, const TokensForExperts& input);
  /// Of weights on the inputs: what the rows say of the tokens, and of their weights.
  [[nodiscard]] Matrix<float> run_weighted(const Call& call);
  /// The same over ranks, of sums that are made here.
  [[nodiscard]] Matrix<float> run_weighted_over_ranks(const Call& call, ConstRawMatrix sums);
  /// Of zero-computation experts, the gradients of their weights and of constants.
  void run_zero_computation(const Call& call);
  [[nodiscard]] Rows arrived_rows(const Call& call, const TokensForExperts& input);
  /// What losses of LossScope::kGlobal go by, where nobody else has summed them.
  void add_up_counts(Call& call);
  void run_over_ranks(const Call& call, const TokensForExperts& input);
  /// @param then  Called between what is made of rows and gradients of weights; or null.
  void run_experts(const Call& call, const Rows& rows, const std::function<void()>* then = nullptr);
  void give_to_choices(const Call& call, const Rows& rows);
  [[nodiscard]] static DeviceBuffer& workspace_of(Recompute recompute, CudaStages& stages) {
    return stages.scratch().backward[index_of(recompute)];
  }
  [[nodiscard]] const DeviceBuffer& workspace_of_rest(const Call& call) const {
    return call.ranks == nullptr ? workspace_of(call.saved.recompute, call.stages)
                                 : rest_workspace_;
  }
  [[nodiscard]] TokenGradientParts run_router_and_shared(const Call& call);
  /// [T, H] for the router's part of dtokens.
  [[nodiscard]] Matrix<float> place_of_router_part(const Call& call);
  void run_router(const Call& call, Matrix<float> dtokens);
  /// What learned noise adds to `dtokens` [T, H], if that is wanted, and the gradient of its gate.
  void run_noise(const Call& call, Matrix<const float> dlogits, Matrix<float> dtokens,
                 const Execution& execution);
  void sum_rows(const Call& call, RawMatrix sums, Matrix<const float> added);
  [[nodiscard]] Matrix<const float> rest_of(const Call& call, const TokenGradientParts& parts);
  void add_up(const Call& call, const TokenGradientParts& parts, Matrix<const float> weighted);
  [[nodiscard]] RawMatrix sums_of_rows(const Call& call);
  void bring_home(const Call& call, ConstRawMatrix sums, const TokenGradientParts& parts);
  [[nodiscard]] Matrix<float> weights_of_choice(const Call& call);

  static std::size_t index_of(Recompute recompute) { return recompute == Recompute::kNone ? 0 : 1; }

  std::array<std::int64_t, 2> reserved_tokens_{-1, -1};
  DeviceBuffer rest_workspace_, row_sums_, row_weight_, ones_, dweight_, dlogits_, noise_dlogits_,
      router_, noise_, shared_, shared_dlogit_, weighted_, zero_computation_, loss_counts_;
};

}  // namespace switchyard

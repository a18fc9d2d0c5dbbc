// What all parts of a layer say of its tokens on one GPU, added up with one rounding; and what over
// ranks the losses of its router go by.
#include "experts/raw_matrix.hpp"
#include "layer/gpu/backward/backward.hpp"
#include "layer/gpu/backward/expert_tokens.hpp"
#include "switchyard/combine.hpp"

namespace switchyard {

void CudaLayerBackward::add_up_counts(Call& call) {
  const SavedForward::State& saved = call.saved;
  if (call.losses.scope != LossScope::kGlobal || saved.losses.values.data == nullptr ||
      call.args.loss_counts.data != nullptr) {
    return;
  }
  const RoutingSums& sums = saved.losses.sums;
  const Matrix<std::int64_t>& own =
      call.losses.share == BalanceShare::kFirstChoice ? sums.first_choices : sums.counts;
  const Vector<std::int64_t> all = loss_counts_.vector<std::int64_t>(own.size());
  call.ranks->add_up_counts({own.data, {own.size()}}, all, call.stages.execution());
  call.here.loss_counts = {all.data, all.shape};
}

/// The rows' parts of dx by the forward's order of sums, then `added`, and one rounding.
void CudaLayerBackward::sum_rows(const Call& call, RawMatrix sums, Matrix<const float> added) {
  PlanView plan = call.stages.experts().plan();
  const std::int64_t rows = plan.row_token.shape[0];
  plan.row_weight = ones_.vector<float>(rows);
  combine({.rows = call.stages.experts().lend_rows(call.saved.num_tokens),
           .plan = plan,
           .first_expert = call.stages.experts().weights().first_expert(),
           .added = added,
           .reduced = {.sums = sums, .subtree = call.stages.experts().subtree()},
           .execution = call.stages.execution()});
}

/// What is not of the experts' rows, as one part [T, H]; empty where there is none.
Matrix<const float> CudaLayerBackward::rest_of(const Call& call, const TokenGradientParts& parts) {
  const std::int64_t num_tokens = call.saved.num_tokens;
  const std::int64_t hidden = call.stages.hidden();
  Matrix<const float> rest = parts.router;
  if (parts.shared.data != nullptr) {
    const Matrix<float> both = shared_.matrix<float>(num_tokens, hidden);
    const std::int64_t read = parts.router.size() + parts.shared.size();
    const ScopedStage stage(call.stages.execution(), "combine",
                            {.bytes = 4 * static_cast<double>(read + both.size())});
    add_token_gradients(parts, raw(both), call.stages.stream());
    rest = both;
  }
  CudaZeroComputation& others = call.stages.zero_computation();
  if (!others.any()) return rest;
  const Matrix<float> all = zero_computation_.matrix<float>(num_tokens, hidden);
  others.tokens_backward(chosen_of(call.saved), call.dout, rest, all, call.stages.execution());
  return all;
}

/// dtokens = the rows' sums, which are there where `weighted` is, then the others' parts, and one
/// rounding.
void CudaLayerBackward::add_up(const Call& call, const TokenGradientParts& others,
                               Matrix<const float> weighted) {
  const RawMatrix& out = call.args.dtokens;
  const Matrix<const float> rest = rest_of(call, others);
  if (weighted.data != nullptr) {
    const ScopedStage stage(call.stages.execution(), "combine",
                            {.bytes = 4 * static_cast<double>(weighted.size() + rest.size()) +
                                      static_cast<double>(out.bytes())});
    add_token_gradients({.experts = weighted, .router = rest}, out, call.stages.stream());
    return;
  }
  const std::int64_t rows = call.stages.experts().plan().row_token.shape[0];
  const std::int64_t bytes_per_row = size_of(call.stages.compute()) * out.cols;
  const ScopedStage stage(
      call.stages.execution(), "combine",
      {.bytes = static_cast<double>(rows * bytes_per_row + 4 * rest.size() + out.bytes()),
       .most_rows = rows,
       .bytes_per_row = static_cast<double>(bytes_per_row)});
  sum_rows(call, out, rest);
}

Matrix<float> CudaLayerBackward::run_weighted(const Call& call) {
  const SavedForward::State& saved = call.saved;
  const Matrix<float> dx = weighted_.matrix<float>(saved.num_tokens, call.stages.hidden());
  const RawMatrix sums = raw(dx);
  {
    const ScopedStage stage(call.stages.execution(), "combine",
                            {.bytes = 2 * static_cast<double>(sums.bytes())});
    sum_rows(call, sums, {});
  }
  weighted_backward_on_gpu(saved.tokens, saved.weight, dx,
                           call.to_choice ? weights_of_choice(call) : Matrix<float>{},
                           call.stages.execution());
  return dx;
}

Matrix<float> CudaLayerBackward::run_weighted_over_ranks(const Call& call, ConstRawMatrix sums) {
  const SavedForward::State& saved = call.saved;
  const Matrix<float> dx = weighted_.matrix<float>(saved.num_tokens, call.stages.hidden());
  call.ranks->bring_home(sums, {}, raw(dx), false, call.stages.execution());
  weighted_backward_on_gpu(saved.tokens, saved.weight, dx,
                           call.to_choice ? weights_of_choice(call) : Matrix<float>{},
                           call.stages.execution());
  return dx;
}

void CudaLayerBackward::run_zero_computation(const Call& call) {
  CudaZeroComputation& others = call.stages.zero_computation();
  if (!others.any()) return;
  others.backward(chosen_of(call.saved),
                  {.dout = call.dout,
                   .dweight = call.to_choice ? weights_of_choice(call) : Matrix<float>{},
                   .dconstant = call.here.dconstant_experts,
                   .dtokens = call.args.dtokens.data != nullptr,
                   .accumulate = call.here.accumulate},
                  call.stages.execution());
}

}  // namespace switchyard

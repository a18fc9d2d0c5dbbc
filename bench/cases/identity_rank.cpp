// One rank of a layer whose experts give back what they get: router, plan, exchange, pack, combine.
#include "bench/cases/identity_rank.hpp"

#include <algorithm>

#include "bench/layer/layer_run.hpp"
#include "switchyard/combine.hpp"
#include "switchyard/device.hpp"
#include "switchyard/pack.hpp"

namespace switchyard::bench {

IdentityRank::IdentityRank(IdentityProblem& problem, Communicator* communicator, int num_threads)
    : c_(problem.c),
      backend_(c_.options.backend),
      pool_(num_threads),
      memory_(backend_),
      num_ranks_(c_.num_ranks),
      rank_(communicator == nullptr ? 0 : communicator->rank()),
      begin_(first_token(c_.num_tokens, rank_, num_ranks_)),
      end_(first_token(c_.num_tokens, rank_ + 1, num_ranks_)) {
  const std::int64_t hidden = c_.config.experts.hidden;
  const std::int64_t top_k = c_.config.router.top_k();
  const std::int64_t row_bytes = hidden * size_of(c_.dtype);
  x_ = memory_.place(
      ConstRawMatrix{problem.tokens.data() + begin_ * row_bytes, c_.dtype, end_ - begin_, hidden});
  host_out_ = problem.out.data() + begin_ * row_bytes;
  out_ = {backend_ == Backend::kCpu ? host_out_ : memory_.make(x_.bytes()), c_.dtype, x_.rows,
          hidden};
  host_expert_ = {problem.routing.expert.data() + begin_ * top_k, {end_ - begin_, top_k}};
  expert_ = memory_.place(host_expert_);
  weight_ = memory_.place(
      Matrix<const float>{problem.routing.weight.data() + begin_ * top_k, {end_ - begin_, top_k}});
  execution_ = {.backend = backend_, .pool = &pool_};
#ifdef SWITCHYARD_WITH_CUDA
  if (backend_ == Backend::kCuda) {
    execution_.workspace_bytes =
        stage_workspace_bytes(x_.rows, top_k, c_.config.router.num_experts, hidden);
    execution_.workspace = memory_.make(execution_.workspace_bytes);
  }
#endif
  router_ = std::make_unique<RouterAlone>(problem.model, x_, backend_, num_threads);
  subtree_ = subtree_of_rank({.num_experts = c_.config.router.num_experts}, rank_, num_ranks_);
  if (communicator != nullptr) make_exchange(*communicator);
}

void IdentityRank::run(StageRecorder* recorder, void* stream) {
  use(recorder, stream);
  router_->run(recorder, stream);
  Received received{.x = x_, .expert = expert_, .weight = weight_};
  if (exchange_) {
    ScopedStage stage(execution_, "exchange", {});
    received = exchange_->dispatch(
        {.x = x_, .expert = expert_, .weight = weight_, .kept = {}, .execution = execution_});
    stage.set_work({.bytes = static_cast<double>(x_.bytes() + received.x.bytes())});
  }
  make_plan(received);
  pack_and_combine(received.x);
  if (!exchange_) return;
  const ScopedStage stage(execution_, "exchange",
                          {.bytes = static_cast<double>(sums_.bytes() + out_.bytes())});
  exchange_->combine({.partials = sums_, .shared = {}, .out = out_, .execution = execution_});
}

void IdentityRank::run_pair(void* stream) {
  use(nullptr, stream);
  pack_and_combine(x_);
}

void IdentityRank::fetch() const {
  if (backend_ != Backend::kCpu) memory_.fetch(host_out_, out_.data, out_.bytes());
}

void IdentityRank::use(StageRecorder* recorder, void* stream) {
  execution_.recorder = recorder;
  execution_.stream = stream;
}

void IdentityRank::make_exchange(Communicator& communicator) {
  exchange_ = std::make_unique<ExpertParallel>(
      communicator, ExpertParallelConfig{.num_experts = c_.config.router.num_experts,
                                         .top_k = c_.config.router.top_k(),
                                         .hidden = c_.config.experts.hidden,
                                         .max_tokens = std::max<std::int64_t>(
                                             1, (c_.num_tokens + num_ranks_ - 1) / num_ranks_),
                                         .dtype = c_.dtype,
                                         .dispatch_wire = std::nullopt,
                                         .combine_wire = c_.options.combine_wire});
}

void IdentityRank::make_plan(const Received& received) {
  const std::int32_t first = first_expert_of(c_.config.router.num_experts, num_ranks_, rank_);
  const std::int32_t local =
      first_expert_of(c_.config.router.num_experts, num_ranks_, rank_ + 1) - first;
  const std::int64_t assignments = received.expert.size();
  const bool is_first = view_.token_begin.data == nullptr;
  if (is_first) reserve_plan(received, local);
  {
    const ScopedStage stage(execution_, "plan", {.bytes = 21 * static_cast<double>(assignments)});
    plan({.assignments = DenseAssignments{.expert = received.expert, .weight = received.weight},
          .first_expert = first,
          .layout = c_.options.layout,
          .padded_rows = padded_rows_,
          .plan = view_,
          .execution = execution_});
  }
  if (is_first) reserve_rows(received.x);
}

void IdentityRank::reserve_plan(const Received& received, std::int32_t local) {
  const std::int64_t top_k = c_.config.router.top_k();
  if (c_.options.layout.kind == LayoutKind::kPadded) {
    padded_rows_ = fullest(exchange_ ? received.expert : host_expert_);
  }
  const std::int64_t rows =
      max_rows(c_.options.layout, received.x.rows, top_k, local, padded_rows_);
  const auto ints = [this](std::int64_t size) {
    return Vector<std::int32_t>{memory_.make_matrix<std::int32_t>(size, 1).data, {size}};
  };
  view_ = {.num_experts = local,
           .expert_begin = ints(std::int64_t{local} + 1),
           .expert_rows = ints(local),
           .row_token = ints(rows),
           .row_weight = {memory_.make_matrix<float>(rows, 1).data, {rows}},
           .token_begin = ints(received.x.rows + 1),
           .token_row = ints(received.x.rows * top_k),
           .most_rows = top_k};
}

/// As many rows as the plan has, which only the backend knows.
void IdentityRank::reserve_rows(ConstRawMatrix x) {
  const auto value_of = [this](const std::int32_t* value) {
    std::int32_t out = 0;
    memory_.fetch(&out, reinterpret_cast<const std::byte*>(value), sizeof(out));
    return std::int64_t{out};
  };
  const std::int64_t rows = value_of(view_.expert_begin.data + view_.num_experts);
  used_rows_ = value_of(view_.token_begin.data + x.rows);
  packed_ = {memory_.make(rows * x.row_bytes()), x.dtype, rows, x.cols};
  // What goes to another rank is a partial sum; at home it is the output.
  sums_ = exchange_ ? RawMatrix{memory_.make(x.rows * x.cols * size_of(DType::kF32)), DType::kF32,
                                x.rows, x.cols}
                    : out_;
}

void IdentityRank::pack_and_combine(ConstRawMatrix x) {
  {
    const ScopedStage stage(execution_, "pack",
                            {.bytes = static_cast<double>(x.bytes() + packed_.bytes())});
    pack({.x = x, .plan = view_, .rows = packed_, .execution = execution_});
  }
  const double flops = 2 * static_cast<double>(used_rows_ * x.cols);
  const ScopedStage stage(execution_, "combine",
                          {.bytes = static_cast<double>(used_rows_ * x.row_bytes() + sums_.bytes()),
                           .flops = flops,
                           .flops_executed = flops});
  combine({.rows = packed_,
           .plan = view_,
           .first_expert = first_expert_of(c_.config.router.num_experts, num_ranks_, rank_),
           .reduced = {.sums = sums_, .subtree = subtree_},
           .execution = execution_});
}

/// Rows of the fullest expert here.
std::int64_t IdentityRank::fullest(Matrix<const std::int32_t> ids) const {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(c_.config.router.num_experts));
  for (std::int64_t i = 0; i < ids.size(); ++i) {
    const std::int32_t expert = ids.data[i];
    if (expert >= 0) ++rows[static_cast<std::size_t>(expert)];
  }
  return *std::max_element(rows.begin(), rows.end());
}

}  // namespace switchyard::bench

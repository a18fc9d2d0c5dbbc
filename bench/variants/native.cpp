// The library's own exchange under the interface of the variants: a token crosses once per rank,
// experts read it by index, and sums are made where the experts are.
#include <vector>

#include "bench/variants/transports.hpp"
#include "switchyard/combine.hpp"
#include "switchyard/dispatch.hpp"
#include "switchyard/plan.hpp"

namespace switchyard {
namespace {

class NativeTransport final : public Transport {
 public:
  NativeTransport(Communicator& communicator, const TransportConfig& config)
      : communicator_(communicator),
        config_(config),
        exchange_(communicator, {.num_experts = config.num_experts,
                                 .top_k = config.top_k,
                                 .hidden = config.hidden,
                                 .max_tokens = config.max_tokens,
                                 .dtype = config.dtype,
                                 .combine_wire = config.dtype}) {}

  ExpertInput dispatch(const TransportInput& input) override {
    const Execution execution{.pool = config_.pool};
    const Received received = exchange_.dispatch(
        {.x = input.x, .expert = input.expert, .weight = input.weight, .execution = execution});
    num_rows_ = received.x.rows;
    const int rank = communicator_.rank();
    const int ranks = communicator_.size();
    first_ = first_expert_of(config_.num_experts, ranks, rank);
    const std::int32_t local = first_expert_of(config_.num_experts, ranks, rank + 1) - first_;
    view_ = plan_.reserve(num_rows_, config_.top_k, local, num_rows_ * config_.top_k);
    plan({.assignments = DenseAssignments{.expert = received.expert, .weight = received.weight},
          .first_expert = first_,
          .plan = view_,
          .execution = execution});
    expert_.clear();
    for (std::int32_t e = 0; e < local; ++e) {
      expert_.resize(expert_.size() + static_cast<std::size_t>(view_.expert_rows[e]), first_ + e);
    }
    return {.x = received.x,
            .x_row = {view_.row_token.data, {std::ssize(expert_)}},
            .expert = {expert_.data(), {std::ssize(expert_)}}};
  }

  void combine(ConstRawMatrix rows, RawMatrix out) override {
    const Execution execution{.pool = config_.pool};
    sums_.resize(static_cast<std::size_t>(num_rows_ * config_.hidden * size_of(config_.dtype)));
    const RawMatrix sums{sums_.data(), config_.dtype, num_rows_, config_.hidden};
    switchyard::combine({.rows = rows,
                         .plan = view_,
                         .first_expert = first_,
                         .reduced = {.sums = sums, .subtree = exchange_.subtree()},
                         .execution = execution});
    exchange_.combine({.partials = sums, .out = out, .execution = execution});
  }

  [[nodiscard]] std::int64_t wire_bytes() const override {
    const Traffic& traffic = exchange_.traffic();
    const auto ranks = static_cast<std::size_t>(communicator_.size());
    const auto rank = static_cast<std::size_t>(communicator_.rank());
    std::int64_t bytes = 0;
    for (std::size_t to = 0; to < ranks; ++to) {
      const std::size_t pair = rank * ranks + to;
      if (to == rank) continue;
      bytes += traffic.payload_bytes[pair] + traffic.meta_bytes[pair] +
               traffic.return_payload_bytes[pair] + traffic.return_meta_bytes[pair];
    }
    return bytes;
  }

 private:
  Communicator& communicator_;
  const TransportConfig config_;
  ExpertParallel exchange_;
  Plan plan_;
  PlanView view_;
  std::int64_t num_rows_ = 0;
  std::int32_t first_ = 0;
  std::vector<std::int32_t> expert_;
  std::vector<std::byte> sums_;
};

}  // namespace

std::unique_ptr<Transport> make_native_transport(Communicator& communicator,
                                                 const TransportConfig& config) {
  return std::make_unique<NativeTransport>(communicator, config);
}

}  // namespace switchyard

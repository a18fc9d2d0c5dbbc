#include "layer/saved_losses.hpp"

#include <algorithm>

#include "switchyard/device.hpp"

namespace switchyard {
namespace {

/// Pieces of a part's memory, one behind the other.
class Pieces {
 public:
  explicit Pieces(std::byte* memory) : next_(memory) {}
  template <typename T>
  [[nodiscard]] Matrix<T> matrix(std::int64_t rows, std::int64_t cols) {
    auto* const data = reinterpret_cast<T*>(next_);
    next_ += rows * cols * std::int64_t{sizeof(T)};
    return {data, {rows, cols}};
  }
  template <typename T>
  [[nodiscard]] Vector<T> vector(std::int64_t size) {
    return {matrix<T>(size, 1).data, {size}};
  }

 private:
  std::byte* next_;
};

std::int64_t bytes_to_prices(const LossConfig& config, std::int64_t groups,
                             std::int64_t num_experts) {
  const std::int64_t numbers =
      groups * (3 * num_experts + config.devices) + kTokenSums + kLossValues;
  return (8 * numbers + 15) / 16 * 16;
}

/// Memory for the sums of the logits. Prices come last and begin at a multiple of 16 bytes,
/// whatever the number of 8-byte numbers before them: a GPU reads them four at a time.
void make_room(SavedForward::State& saved, const LossConfig& config) {
  const auto [num_tokens, num_experts] = saved.logits.shape;
  const std::int64_t groups = loss_groups(config, num_tokens);
  const std::int64_t devices = config.devices;
  const std::int64_t to_prices = bytes_to_prices(config, groups, num_experts);
  std::byte* const memory =
      saved.room<std::byte>(SavedMemory::kLosses, 1, to_prices + 4 * groups * num_experts).data;
  Pieces pieces(memory);
  SavedForward::State::Losses& losses = saved.losses;
  losses.sums = {.counts = pieces.matrix<std::int64_t>(groups, num_experts),
                 .first_choices = pieces.matrix<std::int64_t>(groups, num_experts),
                 .device_tokens = pieces.matrix<std::int64_t>(groups, devices),
                 .scores = pieces.matrix<double>(groups, num_experts),
                 .tokens = pieces.vector<double>(kTokenSums)};
  losses.values = pieces.vector<double>(kLossValues);
  losses.score_prices = Pieces(memory + to_prices).matrix<float>(groups, num_experts);
}

Execution with_room_for_sums(const Execution& execution, SavedForward::State& saved) {
  Execution with_room = execution;
#ifdef SWITCHYARD_WITH_CUDA
  if (execution.backend == Backend::kCuda) {
    const Matrix<std::int64_t>& counts = saved.losses.sums.counts;
    with_room.workspace_bytes = routing_sums_workspace_bytes(
        counts.shape[0], counts.shape[1], saved.losses.sums.device_tokens.shape[1]);
    with_room.workspace =
        saved.memory->reserve(SavedMemory::kLossWorkspace, with_room.workspace_bytes);
  }
#else
  (void)saved;
#endif
  return with_room;
}

RouterLossesArgs losses_args(const LossConfig& config, const Execution& execution,
                             const SavedForward::State& saved) {
  return {.sums = saved.losses.sums,
          .num_tokens = saved.num_tokens,
          .config = config,
          .values = saved.losses.values,
          .score_prices = saved.losses.score_prices,
          .execution = execution};
}

}  // namespace

LossBytes most_loss_bytes(const LossConfig& config, std::int64_t num_tokens,
                          std::int64_t num_experts) {
  if (!config.any()) return {};
  const std::int64_t groups = config.scope == LossScope::kSequence
                                  ? std::max<std::int64_t>(1, num_tokens / config.sequence_length)
                                  : 1;
  LossBytes bytes{.sums = bytes_to_prices(config, groups, num_experts) + 4 * groups * num_experts,
                  .of_chain = 8 * (kLossValues + groups * num_experts)};
#ifdef SWITCHYARD_WITH_CUDA
  bytes.workspace = routing_sums_workspace_bytes(groups, num_experts, config.devices);
#endif
  return bytes;
}

SavedForward::State::Losses room_for_chain_losses(SavedForward::State& part) {
  const auto [groups, num_experts] = part.losses.sums.counts.shape;
  Pieces pieces(
      part.room<std::byte>(SavedMemory::kChainLosses, 1, 8 * (kLossValues + groups * num_experts))
          .data);
  SavedForward::State::Losses sums;
  sums.values = pieces.vector<double>(kLossValues);
  sums.sums.counts = pieces.matrix<std::int64_t>(groups, num_experts);
  return sums;
}

void route_with_losses(const RouteAtOnceArgs& args, const LossConfig& config,
                       SavedForward::State& saved) {
  if (!config.any()) return route_at_once(args);
  make_room(saved, config);
  RouteAtOnceArgs with_sums = args;
  with_sums.route.execution = with_room_for_sums(args.route.execution, saved);
  with_sums.sums = saved.losses.sums;
  route_at_once(with_sums);
  saved.losses.are_summed = true;
}

void save_losses(const RouterConfig& router, const LossConfig& config, const Execution& execution,
                 SavedForward::State& saved) {
  if (!config.any() || !saved.routed) return;
  const ScopedStage stage(
      execution, "losses",
      {.bytes = static_cast<double>(4 * saved.logits.size() + 4 * saved.expert.size())});
  if (!saved.losses.are_summed) {
    make_room(saved, config);
    routing_sums({.logits = saved.logits,
                  .assignments = DenseAssignments{.expert = saved.expert},
                  .score = router.score(),
                  .sums = saved.losses.sums,
                  .execution = with_room_for_sums(execution, saved)});
  }
  LossConfig of_call = config;  // counts of other ranks and steps come with the backward
  if (config.scope == LossScope::kGlobal) of_call.scope = LossScope::kBatch;
  saved.losses.prices = router_losses(losses_args(of_call, execution, saved));
}

LossPrices prices_of_losses(const BackwardArgs& args, const LossConfig& config,
                            const Execution& execution, const SavedForward::State& saved) {
  if (saved.losses.values.data == nullptr) return {};
  if (args.loss_scale == 1 && config.scope != LossScope::kGlobal) return saved.losses.prices;
  RouterLossesArgs again = losses_args(config, execution, saved);
  again.global_counts = args.loss_counts;
  again.scale = args.loss_scale;
  return router_losses(again);
}

}  // namespace switchyard

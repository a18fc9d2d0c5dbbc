#include "layer/saved_forward.hpp"

#include <atomic>

#include "core/check.hpp"

namespace switchyard {

SavedForward::SavedForward(Recompute recompute) : state_(std::make_unique<State>()) {
  state_->recompute = recompute;
}
SavedForward::~SavedForward() = default;
SavedForward::SavedForward(SavedForward&&) noexcept = default;
SavedForward& SavedForward::operator=(SavedForward&&) noexcept = default;

Recompute SavedForward::recompute() const { return state_->recompute; }
bool SavedForward::ready() const { return state_->use == State::Use::kReady; }
std::int64_t SavedForward::bytes() const { return state_->bytes; }
Matrix<const float> SavedForward::logits() const { return state_->logits; }
Vector<const double> SavedForward::losses() const { return state_->losses.values; }
Matrix<const std::int64_t> SavedForward::counts() const { return state_->losses.sums.counts; }

void SavedForward::State::begin(std::uint64_t number, std::int64_t of_layer) {
  use = Use::kNothing;
  layer = number;
  reloads = of_layer;
  bytes = 0;
  logits = {};
  previous_logits = {};
  kept = {};
  preactivation = shared_preactivation = {};
  received = {};
  losses = {};
}

void SavedForward::State::draws_upon(const RouteRequest& from) {
  request = {.seed = from.seed,
             .step = from.step,
             .layer = from.layer,
             .first_token = from.first_token,
             .training = from.training};
}

RawMatrix SavedForward::State::room(SavedMemory::Part part, DType dtype, std::int64_t rows,
                                    std::int64_t cols) {
  return {reserve(part, rows * cols * size_of(dtype)), dtype, rows, cols};
}

std::byte* SavedForward::State::reserve(SavedMemory::Part part, std::int64_t size) {
  bytes += size;
  return memory->reserve(part, size);
}

void SavedForward::State::require_of(std::uint64_t number, std::int64_t of_layer) const {
  require(layer == number, "this saved forward is another layer's");
  require(reloads == of_layer, "the experts were reloaded after this saved forward");
}

std::uint64_t next_layer_number() {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

}  // namespace switchyard

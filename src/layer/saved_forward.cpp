#include "layer/saved_forward.hpp"

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

}  // namespace switchyard

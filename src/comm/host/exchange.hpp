#pragma once

#include <cstdint>
#include <vector>

#include "comm/exchange_layout.hpp"
#include "switchyard/comm.hpp"

namespace switchyard {

/// One rank's end of an exchange: the window by its layout, and the messages that go through it.
class Exchange {
 public:
  Exchange(Communicator& communicator, const ExchangeLayout& layout);

  [[nodiscard]] const ExchangeLayout& layout() const { return layout_; }
  [[nodiscard]] Window& window() { return *window_; }
  [[nodiscard]] Communicator& communicator() { return communicator_; }
  [[nodiscard]] std::byte* at(std::int64_t offset) { return window_->local() + offset; }
  template <typename T>
  [[nodiscard]] T* at(std::int64_t offset) {
    return reinterpret_cast<T*>(window_->local() + offset);
  }

  /// Ranks in the order in which this one writes to them: itself first, then its successors, so
  /// that no rank is everybody's first.
  [[nodiscard]] std::int32_t in_turn(std::int32_t i) const {
    return (communicator_.rank() + i) % layout_.num_ranks;
  }

  /// Publish a message of counts ([R], one per rank) to all, at `offset` of their windows, and set
  /// the signal.
  void publish(const char* phase, std::uint64_t epoch, const std::vector<std::int64_t>& counts,
               std::int64_t offset, int signal);
  /// Wait for rank `from`'s message and read its counts into `counts`.
  /// @throws Error{kCommunication} if the message is damaged or a count exceeds `limit`.
  void read(const char* phase, std::uint64_t epoch, std::int32_t from, std::int64_t offset,
            int signal, std::int64_t limit, std::int64_t* counts);

 private:
  Communicator& communicator_;
  ExchangeLayout layout_;
  std::unique_ptr<Window> window_;
  std::vector<std::uint64_t> message_;
};

}  // namespace switchyard

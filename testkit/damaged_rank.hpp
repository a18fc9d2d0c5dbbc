#pragma once

// A rank that finds other bytes in its memory than were sent.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "comm/ranks/forwarding.hpp"
#include "switchyard/comm.hpp"

namespace switchyard {

/// Gets all of a window's memory on this rank.
using Damage = std::function<void(std::byte* memory, std::size_t bytes)>;

/// Passes everything on; when the rows of the last rank have come, `damage` gets the memory before
/// it is read.
class DamagedWindow final : public ForwardingWindow {
 public:
  DamagedWindow(std::unique_ptr<Window> inner, int last_rank, const Damage& damage)
      : ForwardingWindow(std::move(inner)), last_rank_(last_rank), damage_(damage) {}

  std::uint64_t wait(int index, std::uint64_t value, const WaitTarget& target) override {
    const std::uint64_t seen = ForwardingWindow::wait(index, value, target);
    const bool all_have_come = std::string(target.phase) == "rows" && target.rank == last_rank_;
    if (all_have_come && damage_) damage_(local(), bytes());
    return seen;
  }

 private:
  int last_rank_;
  const Damage& damage_;
};

class DamagedRank final : public ForwardingCommunicator<> {
 public:
  explicit DamagedRank(Communicator& inner) : ForwardingCommunicator(inner) {}

  Damage damage{};

  std::unique_ptr<Window> create_window(std::size_t bytes, int num_signals) override {
    return std::make_unique<DamagedWindow>(
        ForwardingCommunicator::create_window(bytes, num_signals), size() - 1, damage);
  }
};

}  // namespace switchyard

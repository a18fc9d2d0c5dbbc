// Faults at the only place where ranks meet: the puts and signals of one rank's windows.
#include "comm/ranks/faults.hpp"

#include <array>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "comm/ranks/forwarding.hpp"

namespace switchyard {
namespace {

struct Armed {
  std::optional<Fault> fault;
  std::uint64_t recoveries = 0;  // of the communicator when the rank went silent
  bool silent = false;
};

class FaultyWindow final : public ForwardingWindow {
 public:
  FaultyWindow(std::unique_ptr<Window> inner, Communicator& communicator, Armed& armed)
      : ForwardingWindow(std::move(inner)), communicator_(communicator), armed_(armed) {}

  void put(int rank, std::size_t offset, const void* data, std::size_t bytes) override {
    if (armed_.fault == Fault::kCorruptCount && bytes >= 16) {
      armed_.fault.reset();
      std::vector<std::byte> damaged(bytes);
      std::memcpy(damaged.data(), data, bytes);
      damaged[8] ^= std::byte{1};  // the first count, by one: still a possible number
      ForwardingWindow::put(rank, offset, damaged.data(), bytes);
      return;
    }
    ForwardingWindow::put(rank, offset, data, bytes);
  }

  void signal(int rank, int index, std::uint64_t value) override {
    if (armed_.silent && armed_.recoveries == communicator_.recoveries()) return;
    armed_.silent = false;
    const std::optional<Fault> fault = armed_.fault;
    if (fault.has_value() && fault != Fault::kCorruptCount) armed_.fault.reset();
    if (fault == Fault::kThrow) throw std::runtime_error("a fault was asked for");
    if (fault == Fault::kLate) std::this_thread::sleep_for(2 * communicator_.timeout());
    if (fault == Fault::kAbsent) {
      armed_.silent = true;
      armed_.recoveries = communicator_.recoveries();
      return;
    }
    ForwardingWindow::signal(rank, index, value);
  }

 private:
  Communicator& communicator_;
  Armed& armed_;
};

class Faulty final : public ForwardingCommunicator<FaultyCommunicator> {
 public:
  explicit Faulty(Communicator& inner) : ForwardingCommunicator(inner), inner_(inner) {}

  void arm(Fault fault) override { armed_ = {.fault = fault}; }
  std::unique_ptr<Window> create_window(std::size_t bytes, int num_signals) override {
    return std::make_unique<FaultyWindow>(inner_.create_window(bytes, num_signals), inner_, armed_);
  }

 private:
  Communicator& inner_;
  Armed armed_;
};

}  // namespace

std::optional<Fault> fault_named(std::string_view name) {
  constexpr std::array<std::pair<std::string_view, Fault>, 4> kNames = {{
      {"absent", Fault::kAbsent},
      {"late", Fault::kLate},
      {"throw", Fault::kThrow},
      {"corrupt-count", Fault::kCorruptCount},
  }};
  for (const auto& [spelling, fault] : kNames) {
    if (spelling == name) return fault;
  }
  return std::nullopt;
}

std::unique_ptr<FaultyCommunicator> make_faulty(Communicator& inner) {
  return std::make_unique<Faulty>(inner);
}

}  // namespace switchyard

// Faults at the only place where ranks meet: the puts and signals of one rank's windows.
#include "comm/ranks/faults.hpp"

#include <array>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace switchyard {
namespace {

struct Armed {
  std::optional<Fault> fault;
  std::uint64_t recoveries = 0;  // of the communicator when the rank went silent
  bool silent = false;
};

class FaultyWindow final : public Window {
 public:
  FaultyWindow(std::unique_ptr<Window> inner, Communicator& communicator, Armed& armed)
      : inner_(std::move(inner)), communicator_(communicator), armed_(armed) {}

  std::byte* local() override { return inner_->local(); }
  [[nodiscard]] std::size_t bytes() const override { return inner_->bytes(); }
  [[nodiscard]] int num_signals() const override { return inner_->num_signals(); }
  std::byte* peer(int rank) override { return inner_->peer(rank); }
  std::uint64_t wait(int index, std::uint64_t value, const WaitTarget& target) override {
    return inner_->wait(index, value, target);
  }

  void put(int rank, std::size_t offset, const void* data, std::size_t bytes) override {
    if (armed_.fault == Fault::kCorruptCount && bytes >= 16) {
      armed_.fault.reset();
      std::vector<std::byte> damaged(bytes);
      std::memcpy(damaged.data(), data, bytes);
      damaged[8] ^= std::byte{1};  // the first count, by one: still a possible number
      inner_->put(rank, offset, damaged.data(), bytes);
      return;
    }
    inner_->put(rank, offset, data, bytes);
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
    inner_->signal(rank, index, value);
  }

 private:
  std::unique_ptr<Window> inner_;
  Communicator& communicator_;
  Armed& armed_;
};

class Faulty final : public FaultyCommunicator {
 public:
  explicit Faulty(Communicator& inner) : inner_(inner) {}

  void arm(Fault fault) override { armed_ = {.fault = fault}; }
  [[nodiscard]] int rank() const override { return inner_.rank(); }
  [[nodiscard]] int size() const override { return inner_.size(); }
  [[nodiscard]] const Topology& topology() const override { return inner_.topology(); }
  [[nodiscard]] const char* engine() const override { return inner_.engine(); }
  void set_timeout(std::chrono::milliseconds limit) override { inner_.set_timeout(limit); }
  [[nodiscard]] std::chrono::milliseconds timeout() const override { return inner_.timeout(); }
  std::unique_ptr<Window> create_window(std::size_t bytes, int num_signals) override {
    return std::make_unique<FaultyWindow>(inner_.create_window(bytes, num_signals), inner_, armed_);
  }
  void barrier(const char* phase) override { inner_.barrier(phase); }
  void give_up(const std::string& reason) noexcept override { inner_.give_up(reason); }
  void recover() override { inner_.recover(); }
  [[nodiscard]] std::uint64_t recoveries() const override { return inner_.recoveries(); }

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

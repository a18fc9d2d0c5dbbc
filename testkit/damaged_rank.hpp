#pragma once

// A rank that finds other bytes in its memory than were sent.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "switchyard/comm.hpp"

namespace switchyard {

/// Gets all of a window's memory on this rank.
using Damage = std::function<void(std::byte* memory, std::size_t bytes)>;

/// Passes everything on; when the rows of the last rank have come, `damage` gets the memory before
/// it is read.
class DamagedWindow final : public Window {
 public:
  DamagedWindow(std::unique_ptr<Window> inner, int last_rank, const Damage& damage)
      : inner_(std::move(inner)), last_rank_(last_rank), damage_(damage) {}

  std::byte* local() override { return inner_->local(); }
  [[nodiscard]] std::size_t bytes() const override { return inner_->bytes(); }
  [[nodiscard]] int num_signals() const override { return inner_->num_signals(); }
  void put(int rank, std::size_t offset, const void* data, std::size_t bytes) override {
    inner_->put(rank, offset, data, bytes);
  }
  std::byte* peer(int rank) override { return inner_->peer(rank); }
  void signal(int rank, int index, std::uint64_t value) override {
    inner_->signal(rank, index, value);
  }
  std::uint64_t wait(int index, std::uint64_t value, const WaitTarget& target) override {
    const std::uint64_t seen = inner_->wait(index, value, target);
    const bool all_have_come = std::string(target.phase) == "rows" && target.rank == last_rank_;
    if (all_have_come && damage_) damage_(local(), bytes());
    return seen;
  }

 private:
  std::unique_ptr<Window> inner_;
  int last_rank_;
  const Damage& damage_;
};

class DamagedRank final : public Communicator {
 public:
  explicit DamagedRank(Communicator& inner) : inner_(inner) {}

  Damage damage{};

  [[nodiscard]] int rank() const override { return inner_.rank(); }
  [[nodiscard]] int size() const override { return inner_.size(); }
  [[nodiscard]] const Topology& topology() const override { return inner_.topology(); }
  [[nodiscard]] const char* engine() const override { return inner_.engine(); }
  void set_timeout(std::chrono::milliseconds limit) override { inner_.set_timeout(limit); }
  [[nodiscard]] std::chrono::milliseconds timeout() const override { return inner_.timeout(); }
  std::unique_ptr<Window> create_window(std::size_t bytes, int num_signals) override {
    return std::make_unique<DamagedWindow>(inner_.create_window(bytes, num_signals), size() - 1,
                                           damage);
  }
  void barrier(const char* phase) override { inner_.barrier(phase); }
  void give_up(const std::string& reason) noexcept override { inner_.give_up(reason); }
  void recover() override { inner_.recover(); }
  [[nodiscard]] std::uint64_t recoveries() const override { return inner_.recoveries(); }

 private:
  Communicator& inner_;
};

}  // namespace switchyard

#pragma once

// Bases of what passes a rank's calls on and changes one thing on the way.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "switchyard/comm.hpp"

namespace switchyard {

/// Passes everything on to the window that it owns.
class ForwardingWindow : public Window {
 public:
  explicit ForwardingWindow(std::unique_ptr<Window> inner) : inner_(std::move(inner)) {}

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
    return inner_->wait(index, value, target);
  }

 private:
  std::unique_ptr<Window> inner_;
};

/// Passes everything on to a communicator that outlives it.
/// @tparam Interface  Communicator, or what adds to it.
template <class Interface = Communicator>
class ForwardingCommunicator : public Interface {
 public:
  explicit ForwardingCommunicator(Communicator& inner) : inner_(inner) {}

  [[nodiscard]] int rank() const override { return inner_.rank(); }
  [[nodiscard]] int size() const override { return inner_.size(); }
  [[nodiscard]] const Topology& topology() const override { return inner_.topology(); }
  [[nodiscard]] const char* engine() const override { return inner_.engine(); }
  void set_timeout(std::chrono::milliseconds limit) override { inner_.set_timeout(limit); }
  [[nodiscard]] std::chrono::milliseconds timeout() const override { return inner_.timeout(); }
  std::unique_ptr<Window> create_window(std::size_t bytes, int num_signals) override {
    return inner_.create_window(bytes, num_signals);
  }
  void barrier(const char* phase) override { inner_.barrier(phase); }
  void give_up(const std::string& reason) noexcept override { inner_.give_up(reason); }
  void recover() override { inner_.recover(); }
  [[nodiscard]] std::uint64_t recoveries() const override { return inner_.recoveries(); }

 private:
  Communicator& inner_;
};

}  // namespace switchyard

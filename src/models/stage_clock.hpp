#pragma once

#include <chrono>
#include <string_view>
#include <vector>

#include "switchyard/models/model.hpp"

namespace switchyard::models {

/// Adds up the time of stages by name.
class StageClock {
 public:
  /// Runs `body` as stage `name`, of `flops` useful operations.
  template <class Body>
  void time(std::string_view name, double flops, const Body& body) {
    const auto start = std::chrono::steady_clock::now();
    body();
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    StageTime& stage = find(name);
    stage.seconds += time.count();
    stage.flops += flops;
  }
  [[nodiscard]] std::vector<StageTime> read(bool reset) {
    std::vector<StageTime> now = times_;
    if (reset) times_.clear();
    return now;
  }

 private:
  StageTime& find(std::string_view name) {
    for (StageTime& stage : times_) {
      if (stage.stage == name) return stage;
    }
    times_.push_back({.stage = std::string(name)});
    return times_.back();
  }
  std::vector<StageTime> times_;
};

}  // namespace switchyard::models

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/check.hpp"
#include "core/printable.hpp"
#include "switchyard/models/optimizer.hpp"

namespace switchyard::models {

const char* to_string(Schedule::Kind kind) noexcept {
  switch (kind) {
    case Schedule::Kind::kConstant: return "constant";
    case Schedule::Kind::kCosine: return "cosine";
    case Schedule::Kind::kWsd: return "wsd";
  }
  return "?";
}

Schedule::Kind parse_schedule(std::string_view name) {
  for (const Schedule::Kind kind :
       {Schedule::Kind::kConstant, Schedule::Kind::kCosine, Schedule::Kind::kWsd}) {
    if (name == to_string(kind)) return kind;
  }
  fail(ErrorCode::kInvalidArgument, "schedule '{}' is not one of: constant, cosine, wsd",
       printable(name));
}

void check(const Schedule& schedule) {
  require(std::isfinite(schedule.peak) && schedule.peak >= 0,
          "the learning rate {} is not a number from 0", schedule.peak);
  require(schedule.steps >= 1, "steps={}, want at least 1", schedule.steps);
  require(schedule.warmup >= 0 && schedule.warmup <= schedule.steps,
          "warmup={} is not in 0 to steps={}", schedule.warmup, schedule.steps);
  require(schedule.decay >= 0 && schedule.warmup + schedule.decay <= schedule.steps,
          "warmup={} and decay={} are more than steps={}", schedule.warmup, schedule.decay,
          schedule.steps);
  require(schedule.final_share >= 0 && schedule.final_share <= 1, "final_share={} is not in 0 to 1",
          schedule.final_share);
}

double learning_rate(const Schedule& schedule, std::int64_t step) {
  step = std::clamp<std::int64_t>(step, 0, schedule.steps - 1);
  if (step < schedule.warmup) {
    return schedule.peak * static_cast<double>(step + 1) / static_cast<double>(schedule.warmup);
  }
  const auto share_of = [&](std::int64_t first) {
    const std::int64_t length = schedule.steps - first;
    return length <= 1 ? 1.0 : static_cast<double>(step - first) / static_cast<double>(length - 1);
  };
  const double lost = 1 - schedule.final_share;
  switch (schedule.kind) {
    case Schedule::Kind::kConstant: return schedule.peak;
    case Schedule::Kind::kCosine: {
      const double share = share_of(schedule.warmup);
      return schedule.peak * (1 - lost * (1 - std::cos(std::numbers::pi * share)) / 2);
    }
    case Schedule::Kind::kWsd: {
      const std::int64_t first = schedule.steps - schedule.decay;
      return step < first ? schedule.peak : schedule.peak * (1 - lost * share_of(first));
    }
  }
  return schedule.peak;
}

}  // namespace switchyard::models

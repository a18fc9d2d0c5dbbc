#pragma once

#include <string>
#include <string_view>

#include "switchyard/execution.hpp"

namespace switchyard::test {

/// Which implementation ran the last call that it was given to.
class Chosen final : public StageRecorder {
 public:
  void begin(std::string_view /*stage*/, void* /*stream*/) override {}
  void end(std::string_view /*stage*/, const StageWork& /*work*/, void* /*stream*/) override {}
  void chose(std::string_view /*call*/, std::string_view implementation) override {
    name = implementation;
  }

  std::string name{};
};

}  // namespace switchyard::test

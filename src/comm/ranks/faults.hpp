#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "switchyard/comm.hpp"

namespace switchyard {

/// What can go wrong on one rank, on purpose: for tests and `verify --fault`.
enum class Fault : std::uint8_t {
  kAbsent,        ///< The rank never sends its next signal; it waits as the others do.
  kLate,          ///< It sends it only after the others' deadline has passed.
  kThrow,         ///< It throws instead.
  kCorruptCount,  ///< The first message that it puts next arrives with a changed count.
};

/// "absent", "late", "throw", "corrupt-count".
[[nodiscard]] std::optional<Fault> fault_named(std::string_view name);

/// A communicator that passes everything on to `inner` and fails once each time it is armed.
class FaultyCommunicator : public Communicator {
 public:
  virtual void arm(Fault fault) = 0;
};

/// @param inner  Must outlive the result and its windows.
std::unique_ptr<FaultyCommunicator> make_faulty(Communicator& inner);

}  // namespace switchyard

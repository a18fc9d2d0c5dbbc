#pragma once

#include <exception>
#include <string>

#include "switchyard/comm.hpp"

namespace switchyard {

/// Runs one step that all ranks take together; an error makes all of them leave it.
template <typename Body>
auto collectively(Communicator& communicator, const Body& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    communicator.give_up("rank " + std::to_string(communicator.rank()) +
                         " failed: " + error.what());
    throw;
  }
}

}  // namespace switchyard

#pragma once

#include <functional>
#include <memory>
#include <span>

#include "switchyard/comm.hpp"

namespace switchyard {

/// As run_ranks(), on ranks that are there: they outlive the call, and so does what was made with
/// them. Behind an error they want recover().
void run_on(std::span<const std::unique_ptr<Communicator>> ranks,
            const std::function<void(Communicator&)>& body);

}  // namespace switchyard

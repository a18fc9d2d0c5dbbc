#pragma once

#include "verify/soak.hpp"

namespace switchyard::verify {

/// One rank of the exchanges on GPUs; the calling thread's current device becomes the rank's.
/// Collective. @throws As DeviceExpertParallel.
[[nodiscard]] SoakStory soak_on_device(const VerifyOptions& options, Communicator& communicator);

}  // namespace switchyard::verify

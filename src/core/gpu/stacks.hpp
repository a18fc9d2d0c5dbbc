#pragma once

namespace switchyard {

/// Waits for the device. Memory for stacks only grows, and a launch that needs more waits until no
/// kernel runs: never, where ranks share a device and wait for each other. So it is made before.
void make_room_for_stacks();

}  // namespace switchyard

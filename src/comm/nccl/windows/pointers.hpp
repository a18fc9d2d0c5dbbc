#pragma once

#include "comm/nccl/library.hpp"

namespace switchyard {

/// The address of each rank's part of a window, for the current device, into parts[num_ranks]:
/// asked on the device, as NCCL 2.28 has no other way.
void read_peer_pointers(ncclWindow_t window, int num_ranks, std::byte** parts);

}  // namespace switchyard

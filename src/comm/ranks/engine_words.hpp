#pragma once

namespace switchyard {

// What moves bytes between the ranks themselves, as Communicator::engine() and the tool's --engine
// say it. Between GPUs it is a DeviceEngine, with words of its own.
inline constexpr const char* kThreadsEngine = "threads";
inline constexpr const char* kMpiEngine = "mpi";

}  // namespace switchyard

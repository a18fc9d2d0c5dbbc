#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "switchyard/comm.hpp"

namespace switchyard {

/// What a launcher has told this process by its environment.
struct Launch {
  std::string launcher;  ///< "mpirun", "srun", "torchrun"; "" for none.
  int rank = 0;
  int world = 1;
  int local_rank = 0;       ///< On this host.
  int local_world = 1;      ///< On this host.
  std::string job;          ///< Tells jobs of one user on one host apart.
  std::string master_addr;  ///< Where the ranks may meet; "" if the launcher says nothing.
  int master_port = 0;      ///< 0 if the launcher says nothing.
};

/// Reads the environment; the only place that does, for ranks.
/// @throws Error{kInvalidArgument} that names a variable which is no number or disagrees.
[[nodiscard]] Launch read_launch();

/// An engine by its name in the tool, and why it cannot be used here: "" if it can.
struct EngineInfo {
  std::string name;
  std::string missing;
  std::string detail{};  ///< Which library, and what of it can be used.
};

[[nodiscard]] std::vector<EngineInfo> engines();

/// This process's rank under a launcher, by engine "mpi"; null without a launcher. Collective over
/// all processes that it has started.
/// @param num_ranks  The first so many take part, the others get null; 0: all.
/// @throws Error{kUnsupported} that says which engines are built in.
[[nodiscard]] std::unique_ptr<Communicator> make_launched_rank(int num_ranks = 0);

}  // namespace switchyard

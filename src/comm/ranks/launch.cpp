// The environment of mpirun (OpenMPI), srun (Slurm) and torchrun, and the engines that are built
// in.
#include "comm/ranks/launch.hpp"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <cstring>

#include "comm/ranks/engine_words.hpp"
#include "comm/ranks/process_ranks.hpp"
#include "core/check.hpp"
#if SWITCHYARD_WITH_NCCL
#include "comm/nccl/nccl.hpp"
#endif
#if SWITCHYARD_WITH_MPI
#include "switchyard/mpi.hpp"
#endif

namespace switchyard {
namespace {

std::string text_of(const char* name) {
  const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe)
  return value == nullptr ? "" : value;
}

int number_of(const char* name, int otherwise) {
  const std::string text = text_of(name);
  if (text.empty()) return otherwise;
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  require(error == std::errc() && end == text.data() + text.size() && value >= 0,
          "environment variable {}='{}' is not a whole number", name, text);
  return value;
}

/// The variables of one launcher.
struct Names {
  const char* launcher;
  const char* rank;
  const char* world;
  const char* local_rank;
  const char* local_world;
  const char* job;
  const char* step;  ///< Of the job; null: there is one.
};

// torchrun first: it may itself have been started by srun.
constexpr Names kLaunchers[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID",
     nullptr},
    {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_MCA_ess_base_jobid", nullptr},
    {"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE",
     "SLURM_JOB_ID", "SLURM_STEP_ID"},
};

}  // namespace

Launch read_launch() {
  for (const Names& names : kLaunchers) {
    if (text_of(names.rank).empty() || text_of(names.world).empty()) continue;
    Launch launch{.launcher = names.launcher,
                  .rank = number_of(names.rank, 0),
                  .world = number_of(names.world, 1),
                  .local_rank = number_of(names.local_rank, 0),
                  .job = text_of(names.job),
                  .master_addr = text_of("MASTER_ADDR"),
                  .master_port = number_of("MASTER_PORT", 0)};
    if (names.step != nullptr) launch.job = fmt::format("{}.{}", launch.job, text_of(names.step));
    // Slurm writes "4" or "4(x2),3": the first number is right unless hosts differ.
    launch.local_world = std::atoi(text_of(names.local_world).c_str());
    if (launch.local_world <= 0) launch.local_world = launch.world;
    require(launch.world >= 1 && launch.rank < launch.world,
            "{}={} and {}={} of the environment disagree", names.rank, launch.rank, names.world,
            launch.world);
    return launch;
  }
  return {};
}

std::vector<EngineInfo> engines() {
  std::vector<EngineInfo> list = {{kThreadsEngine, ""},
                                  {kMpiEngine, ""},
                                  {to_string(DeviceEngine::kNccl), ""},
                                  {to_string(DeviceEngine::kNcclPairs), ""}};
#if !SWITCHYARD_WITH_MPI
  list[1].missing = "built without MPI: only the processes of one host, under torchrun or srun";
#endif
#if SWITCHYARD_WITH_NCCL
  list[2].missing = nccl_windows_missing();
  list[3].missing = nccl_missing();
  if (list[2].missing.empty()) list[2].detail = "windows of " + nccl_description();
  if (list[3].missing.empty()) {
    list[3].detail =
        "ncclSend and ncclRecv, padded to the most (may be captured), or with counts read on the "
        "host (may not)";
  }
#else
  list[2].missing = list[3].missing = "built without NCCL";
#endif
  return list;
}

std::unique_ptr<Communicator> make_launched_rank(int num_ranks) {
  const Launch launch = read_launch();
  if (launch.launcher.empty()) return nullptr;
  // On one host srun's processes meet as torchrun's do: they need no MPI that knows Slurm.
  const bool on_one_host = launch.local_world == launch.world;
  if (launch.launcher == "torchrun" || (launch.launcher == "srun" && on_one_host)) {
    if (!on_one_host) {
      fail(ErrorCode::kUnsupported,
           "torchrun has started {} processes, {} of them here: over several hosts engine mpi "
           "needs mpirun or srun",
           launch.world, launch.local_world);
    }
    const int ranks = num_ranks == 0 ? launch.world : num_ranks;
    // All processes come here equally often: no meeting is taken for the one before.
    static std::atomic<int> meetings = 0;
    const int meeting = meetings++;
    if (launch.rank >= ranks) return nullptr;
    std::string key = fmt::format("{}-{}-{}-{}-{}", launch.launcher, launch.job, launch.master_port,
                                  ranks, meeting);
    std::ranges::replace(key, '/', '-');  // it becomes a file's name
    return make_process_rank(launch.rank, ranks, kMpiEngine, tell_by_file(launch.rank, ranks, key));
  }
#if SWITCHYARD_WITH_MPI
  return make_mpi_rank(num_ranks);
#else
  fail(ErrorCode::kUnsupported,
       "{} has started {} processes, but this build has no MPI; built in: threads", launch.launcher,
       launch.world);
#endif
}

}  // namespace switchyard

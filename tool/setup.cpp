// From options to how a layer runs.
#include "tool/setup.hpp"

#include <algorithm>
#include <cstdlib>
#include <thread>
#include <utility>

#include "checkpoint/files/matrix_file.hpp"
#include "comm/ranks/engine_words.hpp"
#include "comm/ranks/gather.hpp"
#include "comm/ranks/launch.hpp"
#include "core/check.hpp"
#include "switchyard/cpu_isa.hpp"
#include "switchyard/device.hpp"
#include "switchyard/error.hpp"
#include "switchyard/routing/router_kinds.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/options/words.hpp"

namespace switchyard::tool {
namespace {

/// Ranks that share a GPU wait for each other's kernels: these must be loaded before, and have a
/// queue each. The driver reads this when it is first called.
void prepare_gpu_ranks() {
  for (const auto& [name, value] : {std::pair{"CUDA_MODULE_LOADING", "EAGER"},
                                    std::pair{"CUDA_DEVICE_MAX_CONNECTIONS", "32"}}) {
    setenv(name, value, 0);  // NOLINT(concurrency-mt-unsafe): before there are threads
  }
}

DeviceEngine device_engine_of(const Options& options) {
  for (const DeviceEngine engine : {DeviceEngine::kNccl, DeviceEngine::kNcclPairs}) {
    if (options.engine == to_string(engine)) return engine;
  }
  return DeviceEngine::kAuto;
}

}  // namespace

Backend choose_backend(const Options& options) {
  if (options.backend != "cuda") return Backend::kCpu;
  const bool lists_ranks = std::any_of(options.ranks_list.begin(), options.ranks_list.end(),
                                       [](std::int64_t ranks) { return ranks > 1; });
  if (options.ranks.value_or(1) > 1 || lists_ranks || !options.verify_case.empty() ||
      options.soak > 0 || !options.fault.empty() || read_launch().world > 1) {
    prepare_gpu_ranks();
  }
  const Gpus gpus = find_gpus();
  if (!gpus.missing.empty()) {
    throw UsageError("--backend: cuda cannot be used: {}; here: cpu", gpus.missing);
  }
  for (const std::string& weights : {options.weights, options.verify_weights}) {
    if (weights.empty() || weights_of(weights) != WeightFormat::kQ8) continue;
    throw UsageError("--weights: {} is for --backend cpu, want weights as they are stored",
                     weights);
  }
  if (!options.isa.empty()) {
    throw UsageError("--isa: '{}' given, but --backend cuda has no choice of it", options.isa);
  }
  return Backend::kCuda;
}

void check_engine(const Options& options, const Launch& launch) {
  if (options.engine.empty()) return;
  std::string usable;
  std::string missing = "is unknown";
  for (const EngineInfo& engine : engines()) {
    if (engine.missing.empty()) usable += (usable.empty() ? "" : ", ") + engine.name;
    if (engine.name == options.engine) missing = engine.missing;
  }
  // Ranks of one host need no MPI under a launcher: the engine itself says if it cannot.
  if (!missing.empty() && !(options.engine == kMpiEngine && launch.world > 1)) {
    throw UsageError("--engine: {} cannot be used: {}; here: {}", options.engine, missing, usable);
  }
  const bool launched = launch.world > 1;
  if (options.engine == kThreadsEngine && launched) {
    throw UsageError("--engine: threads given, but {} has started {} processes, want mpi",
                     launch.launcher, launch.world);
  }
  if (device_engine_of(options) != DeviceEngine::kAuto) {  // of threads or a launcher's processes
    if (options.backend != "cuda") {
      throw UsageError("--engine: {} moves data between GPUs, want --backend cuda for it",
                       options.engine);
    }
    return;
  }
  if (options.engine != kThreadsEngine && !launched) {
    throw UsageError("--engine: {} wants a launcher: mpirun -np R switchyard {} ...",
                     options.engine, to_string(options.command));
  }
}

World choose_world(const Options& options) {
  const Launch launch = read_launch();
  check_engine(options, launch);
  World world;
  world.device_engine = device_engine_of(options);
  const int cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  if (launch.world > 1) {
    if (options.ranks && *options.ranks != launch.world) {
      throw UsageError("--ranks: {} given, but {} has started {}, want that or nothing",
                       *options.ranks, launch.launcher, launch.world);
    }
    world.launched = make_launched_rank();
    world.launched->set_timeout(std::chrono::milliseconds(options.timeout_ms));
    world.num_ranks = launch.world;
    world.num_threads =
        static_cast<int>(options.threads.value_or(std::max(1, cores / launch.local_world)));
    return world;
  }
  world.num_ranks = static_cast<int>(options.ranks.value_or(1));
  world.num_threads = static_cast<int>(options.threads.value_or(std::max(cores, world.num_ranks)));
  return world;
}

bench::Limits limits_of(const World& world, Backend backend) {
  if (!world.launched) return bench::measure_limits(backend, world.num_threads);
  // While the first rank measures, which takes long on a busy machine, the others wait for it.
  const std::chrono::milliseconds timeout = world.launched->timeout();
  world.launched->set_timeout(std::max(timeout, std::chrono::milliseconds(60000)));
  bench::Limits limits;
  if (world.is_first()) {
    limits = bench::measure_limits(backend, world.num_threads * read_launch().local_world);
  }
  for (double* value : {&limits.bandwidth, &limits.read_bandwidth, &limits.flops_f32,
                        &limits.flops_bf16, &limits.flops_f16}) {
    *value = from_first(*world.launched, *value);
  }
  world.launched->set_timeout(timeout);
  return limits;
}

RouterConfig router_of(const std::string& spelling, const RouterConfig& router, bool alone) {
  RouterConfig config;
  try {
    config = parse_router(spelling, router);
  } catch (const Error& error) {
    throw UsageError("--router: {}", message_of(error));
  }
  if (alone && config.gating_residual) {
    throw UsageError(
        "--router: residual=yes adds logits of the layer before, and here is one layer: want "
        "residual=no, or verify, which makes such logits up");
  }
  return config;
}

void choose_isa(const Options& options) {
  if (options.isa.empty()) return;
  std::string usable;
  for (const CpuIsaStatus& status : cpu_isas()) {
    if (status.reason.empty())
      usable += (usable.empty() ? "" : ", ") + std::string(to_string(status.isa));
  }
  const std::optional<CpuIsa> isa = parse_cpu_isa(options.isa);
  if (!isa) throw UsageError("--isa: '{}' is unknown, here are {}", options.isa, usable);
  try {
    force_isa(isa);
  } catch (const Error& error) {
    throw UsageError("--isa: {}; here are {}", message_of(error), usable);
  }
}

LayerOptions layer_options(const Options& options) {
  choose_isa(options);
  LayerOptions out;
  out.backend = choose_backend(options);
  if (!options.compute.empty()) out.compute = enumerator_of<DType>(options.compute);
  out.layout = layout_of(options.layout);
  if (!options.drop_policy.empty() && !options.capacity_factor) {
    throw UsageError("--drop-policy: {} given, but nothing is dropped without --capacity-factor C",
                     options.drop_policy);
  }
  out.capacity_factor = options.capacity_factor;
  if (!options.drop_policy.empty()) {
    out.drop_policy = enumerator_of<DropPolicy>(options.drop_policy);
  }
  if (!options.combine_wire.empty()) {
    out.combine_wire = enumerator_of<DType>(options.combine_wire);
  }
  if (!options.dispatch_wire.empty()) {
    out.dispatch_wire = enumerator_of<DType>(options.dispatch_wire);
  }
  out.batch_invariant = options.batch_invariant;
  out.rank_invariant = options.rank_invariant;
  out.weights = weights_of(options.weights);
  out.device_engine = device_engine_of(options);
  return out;
}

void check_matrix_output(const char* option, const std::string& path, DType dtype) {
  if (path.empty()) return;
  try {
    check_matrix_path(path, dtype);
  } catch (const Error& error) {
    throw UsageError("{}: {}", option, message_of(error));
  }
}

}  // namespace switchyard::tool

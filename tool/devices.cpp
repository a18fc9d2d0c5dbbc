// `switchyard devices`: the machine, and what the CPU kernels use of it.
#include <fmt/core.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "bench/measure/machine.hpp"
#include "comm/ranks/launch.hpp"
#include "switchyard/cpu_isa.hpp"
#include "switchyard/device.hpp"
#include "switchyard/thread_pool.hpp"
#include "tool/commands.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/options/words.hpp"
#include "tool/setup.hpp"

namespace switchyard::tool {
namespace {

using GpuLimits = std::optional<bench::Limits>;

nlohmann::json to_json(const bench::Limits& limits) {
  return {{"bandwidth", limits.bandwidth},
          {"read_bandwidth", limits.read_bandwidth},
          {"flops_f32", limits.flops_f32},
          {"flops_bf16", limits.flops_bf16},
          {"flops_f16", limits.flops_f16}};
}

nlohmann::json to_json(const bench::Machine& machine, const bench::Limits& limits,
                       const GpuLimits& gpu_limits, int threads) {
  nlohmann::json out;
  out["cpu"] = machine.cpu;
  out["cores"] = machine.cores;
  out["memory_bytes"] = machine.memory_bytes;
  for (const bench::Cache& cache : machine.caches) {
    out["caches"].push_back({{"level", cache.level}, {"type", cache.type}, {"bytes", cache.bytes}});
  }
  for (const CpuIsaStatus& status : cpu_isas()) {
    out["isas"].push_back({{"name", to_string(status.isa)},
                           {"usable", status.reason.empty()},
                           {"in_use", to_string(status.isa) == machine.isa},
                           {"reason", status.reason}});
  }
  out["isa_choice"] = isa_choice().why;
  for (const EngineInfo& engine : engines()) {
    out["engines"].push_back({{"name", engine.name},
                              {"usable", engine.missing.empty()},
                              {"reason", engine.missing},
                              {"detail", engine.detail}});
  }
  out["threads"] = threads;
  out["thread_runtime"] = ThreadPool(threads).description();
  out["limits"] = to_json(limits);
  const Gpus gpus = find_gpus();
  out["gpus"] = nlohmann::json::array();
  for (const Gpu& gpu : gpus.list) {
    out["gpus"].push_back(
        {{"name", gpu.name},
         {"compute_capability", fmt::format("{}.{}", gpu.compute_major, gpu.compute_minor)},
         {"multiprocessors", gpu.multiprocessors},
         {"memory_bytes", gpu.memory_bytes},
         {"l2_bytes", gpu.l2_bytes}});
  }
  out["cuda"] = {{"usable", gpus.missing.empty()}, {"reason", gpus.missing}};
  if (gpu_limits) out["gpu_limits"] = to_json(*gpu_limits);
  out["gpu"] = machine.gpu;
  out["driver"] = machine.driver;
  out["versions"] = bench::versions();
  out["commit"] = bench::build_commit();
  return out;
}

void print_peaks(const bench::Limits& limits) {
  fmt::print("peak     f32 {}, bf16 {}, f16 {}\n", human_count(limits.flops_f32, "FLOP/s"),
             human_count(limits.flops_bf16, "FLOP/s"), human_count(limits.flops_f16, "FLOP/s"));
}

void print_gpus(const GpuLimits& limits) {
  const Gpus gpus = find_gpus();
  for (const Gpu& gpu : gpus.list) {
    fmt::print("gpu      {}, compute capability {}.{}, {} multiprocessors, {:.1f} GiB, L2 {} MiB\n",
               gpu.name, gpu.compute_major, gpu.compute_minor, gpu.multiprocessors,
               static_cast<double>(gpu.memory_bytes) / (1 << 30), gpu.l2_bytes >> 20);
  }
  if (!limits) {
    fmt::print("cuda     cannot be used: {}\n", gpus.missing);
    return;
  }
  fmt::print("memory   {} copied, both ways counted, {} read, by the first GPU\n",
             human_count(limits->bandwidth, "B/s"), human_count(limits->read_bandwidth, "B/s"));
  print_peaks(*limits);
}

void print_table(const bench::Machine& machine, const bench::Limits& limits, int threads) {
  fmt::print("cpu      {}, {} cores, {:.1f} GiB\ncaches  ", machine.cpu, machine.cores,
             static_cast<double>(machine.memory_bytes) / (1 << 30));
  for (const bench::Cache& cache : machine.caches) {
    fmt::print(" L{}{} {} KiB", cache.level, cache.type == "Unified" ? "" : cache.type.substr(0, 1),
               cache.bytes >> 10);
  }
  fmt::print("\n");
  const CpuIsaChoice choice = isa_choice();
  for (const CpuIsaStatus& status : cpu_isas()) {
    fmt::print("isa      {:<12} {}\n", to_string(status.isa),
               status.isa == choice.isa ? fmt::format("in use: {}", choice.why)
               : status.reason.empty()  ? "usable"
                                        : status.reason);
  }
  for (const EngineInfo& engine : engines()) {
    fmt::print("engine   {:<12} {}{}{}\n", engine.name,
               engine.missing.empty() ? "usable" : engine.missing,
               engine.detail.empty() ? "" : ": ", engine.detail);
  }
  fmt::print("threads  {}, {}\n", threads, ThreadPool(threads).description());
  fmt::print("memory   {} read by {} threads\n", human_count(limits.bandwidth, "B/s"), threads);
  print_peaks(limits);
}

}  // namespace

int devices_command(const Options& options) {
  choose_isa(options);
  const int threads = choose_world(options).num_threads;
  const bench::Machine machine = bench::this_machine();
  const bench::Limits limits = bench::measure_limits(Backend::kCpu, threads);
  GpuLimits gpu_limits;
  if (!machine.gpu.empty()) gpu_limits = bench::measure_limits(Backend::kCuda, threads);
  if (options.json) {
    fmt::print("{}\n", to_json(machine, limits, gpu_limits, threads).dump(2));
  } else {
    print_table(machine, limits, threads);
    print_gpus(gpu_limits);
  }
  return kFine;
}

}  // namespace switchyard::tool

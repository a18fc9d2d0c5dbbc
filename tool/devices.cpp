// `switchyard devices`: the machine, and what the CPU kernels use of it.
#include <fmt/core.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "bench/machine.hpp"
#include "switchyard/cpu_isa.hpp"
#include "tool/commands.hpp"
#include "tool/setup.hpp"
#include "tool/usage_error.hpp"
#include "tool/words.hpp"

namespace switchyard::tool {
namespace {

nlohmann::json to_json(const bench::Machine& machine, const bench::Limits& limits, int threads) {
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
  out["threads"] = threads;
  out["limits"] = {{"bandwidth", limits.bandwidth},
                   {"flops_f32", limits.flops_f32},
                   {"flops_bf16", limits.flops_bf16},
                   {"flops_f16", limits.flops_f16}};
  out["gpu"] = machine.gpu;
  out["driver"] = machine.driver;
  out["versions"] = bench::versions();
  out["commit"] = bench::build_commit();
  return out;
}

void print_table(const bench::Machine& machine, const bench::Limits& limits, int threads) {
  fmt::print("cpu      {}, {} cores, {:.1f} GiB\ncaches  ", machine.cpu, machine.cores,
             static_cast<double>(machine.memory_bytes) / (1 << 30));
  for (const bench::Cache& cache : machine.caches) {
    fmt::print(" L{}{} {} KiB", cache.level, cache.type == "Unified" ? "" : cache.type.substr(0, 1),
               cache.bytes >> 10);
  }
  fmt::print("\n");
  for (const CpuIsaStatus& status : cpu_isas()) {
    const bool in_use = to_string(status.isa) == machine.isa;
    fmt::print("isa      {:<12} {}\n", to_string(status.isa),
               in_use                  ? "in use"
               : status.reason.empty() ? "usable"
                                       : status.reason);
  }
  fmt::print("memory   {} read by {} threads\n", human_count(limits.bandwidth, "B/s"), threads);
  fmt::print("peak     f32 {}, bf16 {}, f16 {}\n", human_count(limits.flops_f32, "FLOP/s"),
             human_count(limits.flops_bf16, "FLOP/s"), human_count(limits.flops_f16, "FLOP/s"));
  fmt::print("gpu      {}\n", machine.gpu.empty() ? "none in this build" : machine.gpu);
}

}  // namespace

int devices_command(const Options& options) {
  choose_isa(options);
  const int threads = choose_world(options).num_threads;
  const bench::Machine machine = bench::this_machine();
  const bench::Limits limits = bench::measure_limits(threads);
  if (options.json) {
    fmt::print("{}\n", to_json(machine, limits, threads).dump(2));
  } else {
    print_table(machine, limits, threads);
  }
  return kFine;
}

}  // namespace switchyard::tool

#pragma once

// The machine that figures are from: what it is, and how fast it could be.

#include <algorithm>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "bench/measure/stage_times.hpp"
#include "switchyard/routing/metrics.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard::bench {

/// What the memory and the arithmetic can do, measured just before the figures they judge.
struct Limits {
  double bandwidth = 0;       ///< Bytes per second: reading; on a GPU copying, both ways counted.
  double read_bandwidth = 0;  ///< Bytes per second of reading alone: the floor of weights.
  double flops_f32 = 0;       ///< Operations per second.
  double flops_bf16 = 0;
  double flops_f16 = 0;
  bool tensor_router = false;  ///< The router's product, too, runs at the peak of its type.

  [[nodiscard]] double flops(DType dtype) const {
    return dtype == DType::kF32 ? flops_f32 : dtype == DType::kBF16 ? flops_bf16 : flops_f16;
  }
  /// What the products of a model's steps are reckoned by. On a CPU at most twice the rate of f32:
  /// rows of some hundred numbers keep AMX's tiles waiting for passes over memory, and a step of
  /// cpu-10min had 0.03 of their peak (docs/performance.md, M7).
  [[nodiscard]] double flops_of_models(DType dtype, Backend backend) const {
    return backend == Backend::kCpu ? std::min(flops(dtype), 2 * flops_f32) : flops(dtype);
  }
};

struct Cache {
  int level = 0;
  std::string type{};  ///< "Data", "Instruction", "Unified".
  std::int64_t bytes = 0;
};

struct Machine {
  std::string cpu{};
  int cores = 0;
  std::string isa{};  ///< In use.
  std::vector<Cache> caches{};
  std::int64_t memory_bytes = 0;
  std::string gpu{};     ///< The first; empty: none that can be used, or no CUDA in this build.
  std::string driver{};  ///< The CUDA version that it knows.
  std::int64_t gpu_l2_bytes = 0;
  std::int64_t gpu_memory_bytes = 0;

  /// Bytes of the largest cache, and of the memory, of a backend.
  [[nodiscard]] std::int64_t largest_cache(Backend backend) const;
  [[nodiscard]] std::int64_t memory(Backend backend) const {
    return backend == Backend::kCuda ? gpu_memory_bytes : memory_bytes;
  }
};

[[nodiscard]] Machine this_machine();
/// Of the CPU, or of the current GPU, where threads do not matter. Takes about a second.
[[nodiscard]] Limits measure_limits(Backend backend, int num_threads);
/// The commit that was built, and versions of compiler and libraries.
[[nodiscard]] std::string build_commit();
[[nodiscard]] nlohmann::json versions();

/// A stage against the limits.
struct StageFigures {
  std::string stage{};
  Statistics us{};
  std::size_t samples = 0;
  StageWork work{};
  std::string implementation{};  ///< What ran it; "": nothing was chosen.
  double limit_us = 0;
  const char* limit_by = "memory";  ///< Or "compute"; of exchanges on GPUs "wire".
  double share = 0;                 ///< limit / median.
  double share_of_layer = 0;        ///< median / the layer's median; 0: no layer was timed.

  [[nodiscard]] double gbps() const { return us.median > 0 ? work.bytes / us.median * 1e-3 : 0; }
  [[nodiscard]] double gflops() const { return us.median > 0 ? work.flops / us.median * 1e-3 : 0; }
};

/// Every stage; the products of experts by the peak of `compute`, all else by that of f32.
[[nodiscard]] std::vector<StageFigures> judge(const std::vector<StageSamples>& stages,
                                              const Limits& limits, DType compute);

/// How evenly assignments are spread, before capacity; and what of them that has left out.
struct Load : metrics::Load {
  double dropped = 0;  ///< Share of the assignments.
};

[[nodiscard]] Load load_of(const std::vector<std::int64_t>& counts,
                           const std::vector<std::int64_t>& counts_kept);

}  // namespace switchyard::bench

// From samples and limits to figures.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "bench/measure/machine.hpp"

namespace switchyard::bench {
namespace {

bool is_expert_stage(const std::string& stage) {
  return stage.starts_with("gemm") || stage.starts_with("shared") || stage == "experts_backward";
}

bool is_router_product(const std::string& stage) {
  return stage == "router_gemm" || stage == "router_backward";
}

void set_limit(StageFigures& figures, double memory_us, double compute_us) {
  figures.limit_us = std::max(memory_us, compute_us);
  figures.limit_by = memory_us >= compute_us ? "memory" : "compute";
  figures.share = figures.us.median > 0 ? figures.limit_us / figures.us.median : 0;
}

}  // namespace

std::vector<StageFigures> judge(const std::vector<StageSamples>& stages, const Limits& limits,
                                DType compute) {
  std::vector<StageFigures> out;
  double layer_compute_us = 0;
  double layer_us = 0;
  for (const StageSamples& stage : stages) {
    StageFigures figures{.stage = stage.stage,
                         .us = statistics(stage.us),
                         .samples = stage.us.size(),
                         .work = stage.work,
                         .implementation = stage.implementation};
    const bool tensor_cores =
        is_expert_stage(stage.stage) || (is_router_product(stage.stage) && limits.tensor_router);
    const double peak = limits.flops(tensor_cores ? compute : DType::kF32);
    double compute_us = stage.work.flops / peak * 1e6;
    if (stage.stage == "layer") {
      compute_us = layer_compute_us;  // of its stages, each at its own peak
      layer_us = figures.us.median;
    }
    layer_compute_us += compute_us;
    set_limit(figures, stage.work.bytes / limits.bandwidth * 1e6, compute_us);
    out.push_back(std::move(figures));
  }
  for (StageFigures& figures : out) {
    figures.share_of_layer = layer_us > 0 ? figures.us.median / layer_us : 0;
  }
  return out;
}

Load load_of(const std::vector<std::int64_t>& counts,
             const std::vector<std::int64_t>& counts_kept) {
  const double total = static_cast<double>(std::accumulate(counts.begin(), counts.end(), 0LL));
  const double kept =
      static_cast<double>(std::accumulate(counts_kept.begin(), counts_kept.end(), 0LL));
  if (total <= 0) return {};
  const auto experts = static_cast<double>(counts.size());
  const double mean = total / experts;
  Load load{.dropped = (total - kept) / total};
  double variance = 0;
  for (const std::int64_t count : counts) {
    const auto n = static_cast<double>(count);
    variance += (n - mean) * (n - mean) / experts;
    load.max_over_mean = std::max(load.max_over_mean, n / mean);
    if (count > 0) load.kl += n / total * std::log(n / total * experts);
  }
  load.cv = std::sqrt(variance) / mean;
  return load;
}

}  // namespace switchyard::bench

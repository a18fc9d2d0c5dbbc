// From samples and limits to figures.
#include <algorithm>
#include <numeric>

#include "bench/measure/machine.hpp"

namespace switchyard::bench {
namespace {

bool is_expert_stage(const std::string& stage) {
  return stage.starts_with("gemm") || stage.starts_with("shared") || stage == "experts_backward";
}

/// Soft-MoE's too: on a GPU they are the same kernels.
bool is_router_product(const std::string& stage) {
  return stage == "router_gemm" || stage == "router_backward" || stage.starts_with("soft_");
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
  if (counts.empty()) return {};
  const auto sum = [](const std::vector<std::int64_t>& n) {
    return static_cast<double>(std::accumulate(n.begin(), n.end(), std::int64_t{0}));
  };
  const double total = sum(counts);
  return {metrics::load({counts.data(), {std::ssize(counts)}}),
          total > 0 ? (total - sum(counts_kept)) / total : 0};
}

}  // namespace switchyard::bench

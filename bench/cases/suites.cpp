// The named grids. Their lists are those of the routing grid and of the fused-MoE table that the
// project was set up against.
#include "bench/cases/suites.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "bench/cases/cpu_bars.hpp"
#include "bench/cases/load_case.hpp"
#include "bench/cases/paths_case.hpp"
#include "bench/exchange/shapes.hpp"
#include "bench/sweep/capacity_case.hpp"

namespace switchyard::bench {
namespace {

struct Sizes {
  std::int64_t tokens, hidden, inner;
  std::int32_t experts, top_k;
};

LayerCase sized(LayerCase c, const char* name, const Sizes& sizes) {
  c.name = name;
  c.num_tokens = sizes.tokens;
  c.config.router = {.num_experts = sizes.experts, .kind = TopKRouter{.top_k = sizes.top_k}};
  c.config.experts.num_experts = sizes.experts;
  c.config.experts.hidden = sizes.hidden;
  c.config.experts.inner = sizes.inner;
  return c;
}

struct Path {
  const char* layout;
  Layout value;
};
constexpr Path kPaths[] = {{"padded", {.kind = LayoutKind::kPadded}},
                           {"compact", {.kind = LayoutKind::kCompact}},
                           {"aligned:64", {.kind = LayoutKind::kAligned, .alignment = 64}}};

LayerCase on_path(LayerCase c, const Path& path) {
  c.options.layout = path.value;
  c.layout = path.layout;
  return c;
}

std::vector<SuiteCase> topk_suite(const LayerCase& base, double scale) {
  std::vector<SuiteCase> cases;
  for (const std::int32_t experts : {32, 64, 128}) {
    for (const std::int32_t top_k : {1, 2, 4}) {
      const Sizes sizes{scaled_tokens(16384, scale), scaled_size(4096, scale), 32, experts, top_k};
      cases.push_back({CaseKind::kRouter, sized(base, "topk", sizes)});
      cases.back().layer.dtype = DType::kF16;
    }
  }
  return cases;
}

std::vector<SuiteCase> pack_suite(const LayerCase& base, double scale) {
  std::vector<SuiteCase> cases;
  for (const std::int64_t tokens : {8192, 16384, 32768}) {
    for (const std::int64_t hidden : {2048, 4096}) {
      for (const std::int32_t experts : {32, 64, 128}) {
        for (const std::int32_t top_k : {1, 2, 4}) {
          const Sizes sizes{scaled_tokens(tokens, scale), scaled_size(hidden, scale), 32, experts,
                            top_k};
          LayerCase c = sized(base, "pack", sizes);
          c.dtype = DType::kF16;
          if (base.options.backend == Backend::kCpu) {  // slow there: only that of --layout
            cases.push_back({CaseKind::kIdentity, std::move(c)});
            continue;
          }
          for (const Path& path : kPaths) cases.push_back({CaseKind::kIdentity, on_path(c, path)});
        }
      }
    }
  }
  return cases;
}

/// One case a path, or on a GPU one for all, where they take turns: 17 in each of three repeats.
void add_paths(std::vector<SuiteCase>& cases, LayerCase c) {
  if (c.options.backend == Backend::kCpu) {
    for (const Path& path : kPaths) cases.push_back({CaseKind::kLayer, on_path(c, path)});
    return;
  }
  if (c.count.budget.count() > 0) {
    c.count = {.warmup = 5, .iterations = 51, .budget = std::chrono::seconds(6)};
  }
  cases.push_back({CaseKind::kPaths, c});
  for (const Path& path : kPaths) cases.back().paths.push_back(on_path(c, path));
}

std::vector<SuiteCase> layer_suite(const LayerCase& base, double scale) {
  std::vector<SuiteCase> cases;
  for (const std::int64_t tokens : {32 * 128, 64 * 256, 128 * 512}) {
    for (const std::int32_t experts : {4, 8, 16}) {
      for (const std::int64_t hidden : {1024, 2048}) {
        for (const std::int32_t top_k : {1, 2}) {
          for (const double factor : {1.0, 1.25}) {
            for (const DType dtype : {DType::kF16, DType::kBF16}) {
              const std::int64_t size = scaled_size(hidden, scale);
              LayerCase c = sized(base, "layer",
                                  {scaled_tokens(tokens, scale), size, 4 * size, experts, top_k});
              c.config.experts.gated = false;
              c.config.experts.activation = Activation::kGelu;
              c.dtype = dtype;
              c.options.capacity_factor = factor;
              if (scale == 1) c.bar = "G11";
              add_paths(cases, c);
            }
          }
        }
      }
    }
  }
  return cases;
}

/// Whole layers of many tokens, of shapes that others publish figures for. With a pass of training
/// by themselves.
std::vector<SuiteCase> forward_suite(const LayerCase& base, double scale) {
  struct Shape {
    const char* name;
    Sizes sizes;
    bool preset = false;  // a layer of a preset of `train`, for bar B4
  };
  constexpr Shape kShapes[] = {
      {"qwen3-30b", {32768, 2048, 768, 128, 8}},
      {"30b-i256", {32768, 4096, 256, 256, 16}},
      {"30b-i512", {32768, 4096, 512, 128, 8}},
      {"30b-i1024", {32768, 4096, 1024, 64, 4}},
      {"olmoe", {32768, 2048, 1024, 64, 8}},
      {"7b-i256", {24576, 1536, 256, 128, 8}},
      {"qwen3-235b", {16384, 4096, 1536, 128, 8}},
      {"mixtral", {8192, 4096, 14336, 8, 2}},
      {"deepseek-v3-rank", {32768, 7168, 2048, 32, 1}},
      {"preset-s", {32768, 512, 1024, 8, 2}, true},
      {"preset-m", {32768, 768, 768, 32, 4}, true},
  };
  std::vector<SuiteCase> cases;
  for (const Shape& shape : kShapes) {
    for (const std::string_view skew : {"uniform", "zipf:1.0"}) {
      if (shape.preset && (base.pass != Pass::kBoth || skew != "uniform")) continue;
      Sizes sizes = shape.sizes;
      sizes.tokens = scaled_tokens(sizes.tokens, scale);
      sizes.hidden = scaled_size(sizes.hidden, scale);
      sizes.inner = scaled_size(sizes.inner, scale);
      cases.push_back({CaseKind::kLayer, sized(base, shape.name, sizes)});
      LayerCase& c = cases.back().layer;
      c.dtype = DType::kBF16;
      c.skew = skew;
      if (base.options.backend == Backend::kCpu || scale != 1) continue;
      if (c.pass == Pass::kForward) {
        c.bar = "G3";
        c.beside_dense = true;
      }
      if (c.pass == Pass::kForwardTrain) c.bar = "B2";
      if (shape.preset) c.bar = "B4";
      if (c.count.budget.count() > 0) {
        c.count = {.warmup = 5, .iterations = 51, .budget = std::chrono::seconds(6)};
      }
    }
  }
  return cases;
}

/// Forward and back over ranks: 4096 tokens each, as DeepSeek-V3 routes them.
std::vector<SuiteCase> rank_training_suite(const LayerCase& base, double scale) {
  const Sizes sizes{base.num_ranks * scaled_tokens(4096, scale), scaled_size(7168, scale),
                    scaled_size(2048, scale), 256, 8};
  LayerCase c = sized(base, "deepseek-v3", sizes);
  c.dtype = DType::kBF16;
  if (base.options.backend == Backend::kCuda && scale == 1) c.bar = "B7";
  return {{CaseKind::kLayer, c}};
}

std::vector<SuiteCase> fused_moe_suite(const LayerCase& base, double scale) {
  constexpr Sizes kTable[] = {
      {1, 7168, 256, 256, 8},   {2, 7168, 256, 256, 8},  {4, 7168, 256, 256, 8},
      {8, 7168, 256, 256, 8},   {16, 7168, 256, 256, 8}, {32, 7168, 256, 256, 8},
      {32, 8192, 6144, 8, 2},   {128, 8192, 6144, 8, 2}, {32, 8192, 16384, 8, 2},
      {128, 8192, 16384, 8, 2},
  };
  std::vector<SuiteCase> cases;
  for (Sizes sizes : kTable) {  // tokens stay: rows per expert are what the table is about
    sizes.hidden = scaled_size(sizes.hidden, scale);
    sizes.inner = scaled_size(sizes.inner, scale);
    cases.push_back({CaseKind::kFusedMoe, sized(base, "fused-moe", sizes)});
    LayerCase& c = cases.back().layer;
    c.dtype = DType::kF32;
    c.options.compute = DType::kF32;
    if (base.options.backend == Backend::kCpu) continue;
    if (scale == 1) c.bar = "G7";
    // Enough for more than 50 runs of the longest.
    if (c.count.budget.count() > 0) c.count.budget = std::chrono::seconds(6);
  }
  return cases;
}

/// As many slots as tokens, and twice as many: the experts' work of K = 1 and 2.
std::vector<SuiteCase> soft_moe_suite(const LayerCase& base, double scale) {
  struct Mixing {
    const char* name;
    std::int64_t group;
    std::int32_t top_k;
    bool causal;
  };
  constexpr std::int32_t kExperts = 32;
  std::vector<SuiteCase> cases;
  for (const Mixing& mixing : {Mixing{"soft-moe", 4096, 1, false},
                               {"soft-moe", 4096, 2, false},
                               {"soft-moe-groups", 1024, 1, false},
                               {"soft-moe-causal", 1024, 1, true}}) {
    const std::int64_t tokens = scaled_tokens(4096, scale);
    const Sizes sizes{tokens, scaled_size(1024, scale), scaled_size(1024, scale), kExperts,
                      mixing.top_k};
    LayerCase c = sized(base, mixing.name, sizes);
    const std::int64_t group = tokens * mixing.group / 4096;
    c.mixing = {.slots = std::max<std::int64_t>(1, group * mixing.top_k / kExperts),
                .group = group,
                .causal = mixing.causal};
    const bool of_bar = base.options.backend == Backend::kCuda && cases.empty();
    if (of_bar && scale == 1) c.bar = "L3";
    cases.push_back({CaseKind::kSoftMoe, c});
  }
  return cases;
}

/// The sizes of its authors: K = 8 of 64 experts in one pass, or K / C in each of C iterations.
std::vector<SuiteCase> chain_suite(const LayerCase& base, double scale) {
  constexpr std::int32_t kTopK = 8;
  std::vector<SuiteCase> cases;
  std::vector<std::int64_t> sizes_of_calls = {16, 256, 4096};
  // Where arithmetic is the limit, and not the experts' weights, which every iteration reads.
  if (base.options.backend == Backend::kCuda) sizes_of_calls.push_back(32768);
  for (const std::int64_t tokens : sizes_of_calls) {
    for (const std::int32_t iterations : {2, 4}) {
      const Sizes sizes{scaled_tokens(tokens, scale), scaled_size(1024, scale),
                        scaled_size(704, scale), 64, kTopK / iterations};
      LayerCase c = sized(base, iterations == 2 ? "chain-2" : "chain-4", sizes);
      c.config.router.chain.iterations = iterations;
      cases.push_back({CaseKind::kChain, c});
    }
  }
  return cases;
}

}  // namespace

std::vector<SuiteCase> suite_cases(std::string_view suite, const LayerCase& base, double scale) {
  if (suite == "topk") return topk_suite(base, scale);
  if (suite == "pack") return pack_suite(base, scale);
  if (suite == "layer") return layer_suite(base, scale);
  if (suite == "training" && base.num_ranks > 1) return rank_training_suite(base, scale);
  if (suite == "forward" || suite == "training") return forward_suite(base, scale);
  if (suite == "cpu-experts") {
    std::vector<SuiteCase> cases;
    for (const LayerCase& c : cpu_bar_cases(base)) cases.push_back({CaseKind::kCpuBar, c});
    return cases;
  }
  if (suite == "load") {
    std::vector<SuiteCase> cases;
    for (const LayerCase& c : load_cases(base)) cases.push_back({CaseKind::kLoad, c});
    return cases;
  }
  if (suite == "soft-moe") return soft_moe_suite(base, scale);
  if (suite == "chain") return chain_suite(base, scale);
  return fused_moe_suite(base, scale);
}

std::vector<CaseResult> run_suite_case(const SuiteCase& c, const Machine& machine,
                                       const Limits& limits) {
  switch (c.kind) {
    case CaseKind::kLayer: return {run_layer_case(c.layer, machine, limits)};
    case CaseKind::kPaths: return run_paths_case(c.paths, machine, limits);
    case CaseKind::kIdentity: return {run_identity_case(c.layer, machine, limits)};
    case CaseKind::kRouter: return {run_router_case(c.layer, limits)};
    case CaseKind::kCapacity: return {run_capacity_case(c.layer, limits)};
    case CaseKind::kFusedMoe: return {run_fused_moe_case(c.layer, machine, limits)};
    case CaseKind::kCpuBar: return {run_cpu_bar_case(c.layer, limits)};
    case CaseKind::kLoad: return {run_load_case(c.layer, limits)};
    case CaseKind::kChain: return {run_chain_case(c.layer, limits)};
    case CaseKind::kSoftMoe: return {run_soft_moe_case(c.layer, limits)};
  }
  return {};
}

}  // namespace switchyard::bench

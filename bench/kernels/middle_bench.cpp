// Experts of 32 to 8192 tokens on one GPU, the numbers that inference engines batch: what a layer
// takes, the streaming kernels and the grouped GEMM by themselves, beside two limits of the same
// run: the bytes of the experts hit and of the rows at the rate of reading, and the operations at
// the rate of a dense product. Layers with weights of their own, in a graph, so that the L2 is
// cold.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <optional>
#include <regex>

#include "bench/kernels/streaming_check.hpp"
#include "bench/kernels/streaming_layers.hpp"
#include "bench/measure/dense_beside.hpp"
#include "core/check.hpp"
#include "switchyard/error.hpp"
#include "testkit/gpu/device_array.hpp"

namespace switchyard::bench {
namespace {

struct Model {
  const char* name = "";
  std::int32_t num_experts = 0, top_k = 0;
  std::int64_t hidden = 0, inner = 0;
};

// The last: an eighth of DeepSeek-V3's experts, as a rank of eight has them.
constexpr Model kModels[] = {{"qwen3-30b", 128, 8, 2048, 768},
                             {"olmoe", 64, 8, 2048, 1024},
                             {"mixtral", 8, 2, 4096, 14336},
                             {"deepseek-v3/8", 32, 1, 7168, 2048}};

struct MiddleOptions {
  std::string name = ".*";
  std::vector<std::int64_t> num_tokens{32,  64,  96,   128,  192,  256, 384,
                                       512, 768, 1024, 2048, 4096, 8192};
  int repeats = 15;
  std::size_t layers = 6;
  bool check = false;
};

struct Peaks {
  double bytes_per_second = 0;
  double flops_per_second = 0;
};

/// Of one layer's experts and combine: weights of the hits once, rows of x, of the intermediate and
/// of the results written and read once each.
struct LayerLimit {
  double memory_us = 0, compute_us = 0;
  [[nodiscard]] double us() const { return std::max(memory_us, compute_us); }
};

LayerLimit limit_of(const StreamingCase& c, double hit_bytes, const Peaks& limits) {
  const auto rows = static_cast<double>(c.num_tokens * c.top_k);
  const auto tokens = static_cast<double>(c.num_tokens);
  const auto hidden = static_cast<double>(c.hidden), inner = static_cast<double>(c.inner);
  const double row_bytes = 2 * (2 * tokens * hidden + 2 * rows * inner);
  return {(hit_bytes + row_bytes) / limits.bytes_per_second * 1e6,
          6 * rows * hidden * inner / limits.flops_per_second * 1e6};
}

using Launch = std::function<void(const StreamingParams&, cudaStream_t)>;

std::optional<double> time_if_possible(const StreamingLayers& layers, const Launch& launch,
                                       int repeats, cudaStream_t stream) {
  try {
    return time_layers(layers, launch, repeats, stream);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kDevice) throw;
    return std::nullopt;
  }
}

/// One JSON object a case, for results/.
void print_line(const StreamingCase& c, double us, const LayerLimit& limit,
                const std::optional<double>& streaming, const std::optional<double>& grouped) {
  const auto number = [](const std::optional<double>& value) {
    return value ? fmt::format("{:.2f}", *value) : "null";
  };
  fmt::print(
      R"({{"stage": "experts", "case": {{"name": "{}", "E": {}, "K": {}, "H": {}, "I": {}, "T": {}, )"
      R"("dtype": "{}"}}, "median_us": {:.2f}, "limit_us": {:.2f}, "limit_by": "{}", )"
      R"("share": {:.3f}, "streaming_us": {}, "grouped_us": {}}})"
      "\n",
      c.name, c.num_experts, c.top_k, c.hidden, c.inner, c.num_tokens, to_string(c.dtype), us,
      limit.us(), limit.compute_us > limit.memory_us ? "tensor cores" : "memory", limit.us() / us,
      number(streaming), number(grouped));
}

void run_case(const StreamingCase& c, const MiddleOptions& options, Arena arena,
              const Peaks& limits, DenseBeside& dense, cudaStream_t stream) {
  const StreamingLayers layers(c, arena, stream);
  const Launch best = [&](const StreamingParams& params, cudaStream_t s) {
    layers.launch_best(params, s);
  };
  std::string verdict;
  constexpr std::int64_t kMostChecked = 65535;  // rows of a grid
  if (options.check && c.num_tokens * c.top_k <= kMostChecked) {
    verdict = check_streaming(layers.params().back(), best, stream).text;
  }
  const auto timed = [&](const Launch& launch) {
    dense.run();
    return time_if_possible(layers, launch, options.repeats, stream);
  };
  const auto grouped = [&](unsigned parts) {
    return timed([&, parts](const StreamingParams& params, cudaStream_t s) {
      layers.launch_grouped(params, GroupedPath::kBest, parts, s);
    });
  };
  const std::optional<double> streaming =
      timed([](const StreamingParams& params, cudaStream_t s) { launch_streaming(params, s); });
  const std::optional<double> both = grouped(StreamingLayers::kAll);
  const std::optional<double> chosen = timed(best);
  require(chosen.has_value(), "neither kernel can run {} tokens of {}", c.num_tokens, c.name);
  const LayerLimit limit = limit_of(c, layers.hit_bytes(), limits);
  const auto text = [](const std::optional<double>& value) {
    return value ? fmt::format("{:8.1f}", *value) : fmt::format("{:>8}", "-");
  };
  const auto rows = static_cast<double>(c.num_tokens * c.top_k);
  fmt::print("{:<14} {:>5} {:6.1f} {:>5} {:8.1f} {:8.1f} {} {:5.2f} {} {} {} {} {} {:5.0f} {}\n",
             c.name, c.num_tokens, rows / static_cast<double>(c.num_experts), layers.most_rows(),
             limit.memory_us, limit.compute_us, text(chosen), *chosen / limit.us(), text(streaming),
             text(both), text(grouped(StreamingLayers::kUp)), text(grouped(StreamingLayers::kDown)),
             text(grouped(StreamingLayers::kCombine)),
             6 * rows * static_cast<double>(c.hidden * c.inner) / *chosen * 1e-6, verdict);
  print_line(c, *chosen, limit, streaming, both);
  std::fflush(stdout);
}

void run(const MiddleOptions& options) {
  cudaStream_t stream = nullptr;
  SWITCHYARD_CUDA(cudaStreamCreate(&stream));
  const DeviceBytes memory(std::size_t{20} << 30);
  const Arena arena{memory.as<std::byte>(), memory.bytes()};
  const auto dense = make_dense_beside(Backend::kCuda, DType::kBF16);
  for (int i = 0; i < 20; ++i) dense->run();
  const Peaks limits{measure_read(arena, stream), dense->flops()};
  fmt::print("read {:.2f} TB/s, dense {:.0f} TFLOP/s\n", limits.bytes_per_second * 1e-12,
             limits.flops_per_second * 1e-12);
  fmt::print(
      "{:<14} {:>5} {:>6} {:>5} {:>8} {:>8} {:>8} {:>5} {:>8} {:>8} {:>8} {:>8} {:>8} {:>5}\n",
      "us of", "T", "rows", "most", "memory", "tensor", "taken", "x", "stream", "grouped", "up",
      "down", "combine", "TF/s");
  const std::regex wanted(options.name);
  for (const Model& m : kModels) {
    if (!std::regex_match(m.name, wanted)) continue;
    const std::size_t layer_bytes =
        6 * static_cast<std::size_t>(m.num_experts * m.hidden * m.inner);
    const Arena part{arena.data, std::min(arena.bytes, options.layers * layer_bytes)};
    for (const std::int64_t num_tokens : options.num_tokens) {
      run_case({m.name, DType::kBF16, m.num_experts, m.hidden, m.inner, m.top_k, num_tokens},
               options, part, limits, *dense, stream);
    }
  }
  fmt::print("dense {:.0f} TFLOP/s\n", dense->flops() * 1e-12);
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace switchyard::bench

int main(int argc, char** argv) {
  CLI::App app("Experts of middle numbers of tokens on one GPU, against memory and tensor cores");
  switchyard::bench::MiddleOptions options;
  app.add_option("--name", options.name, "only models whose name this expression matches");
  app.add_option("--num-tokens", options.num_tokens, "tokens")->delimiter(',');
  app.add_option("--repeats", options.repeats, "replays of each graph")->check(CLI::Range(1, 1000));
  app.add_option("--layers", options.layers, "layers in a graph, at most")
      ->check(CLI::Range(1, 10));
  app.add_flag("--check", options.check, "compare with the reference in double first");
  CLI11_PARSE(app, argc, argv);
  try {
    switchyard::bench::run(options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "middle_bench: {}\n", error.what());
    return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}

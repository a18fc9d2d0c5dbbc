// Few-token experts against the memory's floor: every case checked in double on the device, then
// timed as a graph over layers with weights of their own, so that the L2 is cold. The floor is the
// bytes of the experts hit over the read rate measured in the same run. Where experts have too many
// rows for the streaming kernels (worth_streaming()) the case is the grouped GEMM and combine; of
// rows of e4m3 their codes are made anew each time. Plans are made before, so that weights come
// while the layer before still runs; streamed codes are timed as in a model too, where each plan is
// new.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <optional>
#include <regex>

#include "bench/kernels/streaming_check.hpp"
#include "bench/kernels/streaming_variants.hpp"
#include "core/gpu/cuda_check.hpp"
#include "switchyard/error.hpp"
#include "testkit/gpu/device_array.hpp"

namespace switchyard::bench {
namespace {

struct BenchOptions {
  std::string name = ".*";
  bool variants = false, grid = false, check_only = false;
  std::size_t arena_gib = 96;
};

constexpr DType kBF = DType::kBF16;
constexpr DType kF = DType::kF32;
constexpr int kMostStreamedRows = 8;  ///< Of an expert: codes of more are not timed streamed.
constexpr StreamingCase kCases[] = {
    {"G4", kBF, 256, 7168, 256, 8, 1, 0, 1.25},
    {"G4", kBF, 256, 7168, 256, 8, 2, 0, 0},
    {"G4", kBF, 256, 7168, 256, 8, 4, 0, 0},
    {"G4", kBF, 256, 7168, 256, 8, 8, 0, 1.12},
    {"G4", kBF, 256, 7168, 256, 8, 16, 0, 0},
    {"G4", kBF, 256, 7168, 256, 8, 32, 0, 1.08},
    {"G4-zipf", kBF, 256, 7168, 256, 8, 32, 1, 0},
    {"G5", kBF, 256, 7168, 2048, 8, 1, 0, 1.10},
    {"G5", kBF, 256, 7168, 2048, 8, 4, 0, 1.10},
    {"G5", kBF, 256, 7168, 2048, 8, 16, 0, 1.10},
    {"G6", kBF, 128, 2048, 768, 8, 1, 0, 0},
    {"G6", kBF, 128, 2048, 768, 8, 4, 0, 0},
    {"G6", kBF, 128, 2048, 768, 8, 8, 0, 0},
    {"G6", kBF, 128, 2048, 768, 8, 16, 0, 0},
    {"G6", kBF, 128, 2048, 768, 8, 32, 0, 0},
    {"G6", kBF, 128, 2048, 768, 8, 64, 0, 0},
    {"f16", DType::kF16, 128, 2048, 768, 8, 8, 0, 0},
    {"G7", kF, 256, 7168, 256, 8, 1, 0, 1.4},
    {"G7", kF, 256, 7168, 256, 8, 2, 0, 1.4},
    {"G7", kF, 256, 7168, 256, 8, 4, 0, 1.25},
    {"G7", kF, 256, 7168, 256, 8, 8, 0, 1.15},
    {"G7", kF, 256, 7168, 256, 8, 16, 0, 1.15},
    {"G7", kF, 256, 7168, 256, 8, 32, 0, 1.15},
    {"G7-6144", kF, 8, 8192, 6144, 2, 32, 0, 1.15},
    {"G7-6144", kF, 8, 8192, 6144, 2, 64, 0, 0},
    {"G7-6144", kF, 8, 8192, 6144, 2, 128, 0, 1.15},
    {"G7-6144", kF, 8, 8192, 6144, 2, 512, 0, 0},
    {"G7-16384", kF, 8, 8192, 16384, 2, 32, 0, 1.15},
    {"G7-16384", kF, 8, 8192, 16384, 2, 128, 0, 1.15},
    {"G7-6144-zipf", kF, 8, 8192, 6144, 2, 128, 1, 0},
    {"Q4", kBF, 32, 7168, 2048, 8, 4, 0, 1.06, WeightFormat::kE4M3},
    {"Q4", kBF, 32, 7168, 2048, 8, 32, 0, 1.06, WeightFormat::kE4M3},
    {"Q4", kBF, 32, 7168, 2048, 8, 128, 0, 0, WeightFormat::kE4M3},
    {"Q4", kBF, 32, 7168, 2048, 8, 256, 0, 0, WeightFormat::kE4M3},
    {"Q4-few", kBF, 32, 7168, 2048, 8, 1, 0, 0, WeightFormat::kE4M3},
    {"Q4-few", kBF, 32, 7168, 2048, 8, 2, 0, 0, WeightFormat::kE4M3},
    {"Q4-small", kBF, 128, 2048, 768, 8, 1, 0, 0, WeightFormat::kE4M3},
    {"Q4-small", kBF, 128, 2048, 768, 8, 4, 0, 0, WeightFormat::kE4M3},
    {"Q4-small", kBF, 128, 2048, 768, 8, 8, 0, 0, WeightFormat::kE4M3},
    {"Q4-fp8", kBF, 32, 7168, 2048, 8, 32, 0, 0, WeightFormat::kE4M3, true},
    {"Q4-fp8", kBF, 32, 7168, 2048, 8, 64, 0, 0, WeightFormat::kE4M3, true},
    {"Q4-fp8", kBF, 32, 7168, 2048, 8, 128, 0, 1.10, WeightFormat::kE4M3, true},
    {"Q4-fp8", kBF, 32, 7168, 2048, 8, 256, 0, 1.10, WeightFormat::kE4M3, true},
    {"Q4-many", kBF, 32, 7168, 2048, 8, 1024, 0, 0, WeightFormat::kE4M3},
    {"Q4-many", kBF, 32, 7168, 2048, 8, 4096, 0, 0, WeightFormat::kE4M3},
    {"Q4-many", kBF, 32, 7168, 2048, 8, 7168, 0, 0, WeightFormat::kE4M3},
    {"Q5-E32", kBF, 32, 2880, 2880, 4, 1, 0, 20 / 12.2, WeightFormat::kMxfp4},
    {"Q5-E32", kBF, 32, 2880, 2880, 4, 8, 0, 1.25, WeightFormat::kMxfp4},
    {"Q5-E32", kBF, 32, 2880, 2880, 4, 64, 0, 1.15, WeightFormat::kMxfp4},
    {"Q5-E32", kBF, 32, 2880, 2880, 4, 512, 0, 0, WeightFormat::kMxfp4},
    {"Q5-E128", kBF, 128, 2880, 2880, 4, 1, 0, 20 / 12.2, WeightFormat::kMxfp4},
    {"Q5-E128", kBF, 128, 2880, 2880, 4, 8, 0, 1.25, WeightFormat::kMxfp4},
    {"Q5-E128", kBF, 128, 2880, 2880, 4, 64, 0, 1.15, WeightFormat::kMxfp4},
    {"Q5-few", kBF, 32, 2880, 2880, 4, 2, 0, 0, WeightFormat::kMxfp4},
    {"Q5-few", kBF, 32, 2880, 2880, 4, 4, 0, 0, WeightFormat::kMxfp4},
    {"Q5-few", kBF, 128, 2880, 2880, 4, 4, 0, 0, WeightFormat::kMxfp4},
    {"Q5-few", kBF, 32, 2880, 2880, 4, 256, 0, 0, WeightFormat::kMxfp4},
    {"Q6-E128", kBF, 128, 2880, 2880, 4, 512, 0, 1.2, WeightFormat::kMxfp4},
    {"Q7-E32", kBF, 32, 2880, 2880, 4, 4096, 0, 0, WeightFormat::kMxfp4},
    {"Q7-E32", kBF, 32, 2880, 2880, 4, 8192, 0, 0, WeightFormat::kMxfp4},
    {"Q7-E32", kBF, 32, 2880, 2880, 4, 14336, 0, 0, WeightFormat::kMxfp4},
    {"Q7-E128", kBF, 128, 2880, 2880, 4, 4096, 0, 0, WeightFormat::kMxfp4},
};

/// The median, or none where the variant cannot run this case; `used`: the shape of the last layer.
std::optional<double> time_variant(const StreamingLayers& layers, const StreamingVariant& variant,
                                   int repeats, cudaStream_t stream, StreamingShape& used) {
  const auto launch = [&](const StreamingParams& params, cudaStream_t s) {
    if (variant.launch) return variant.launch(layers, params, s);
    StreamingParams changed = params;
    used = choose_streaming(changed, streaming_chip());
    if (variant.change) variant.change(changed, used);
    if (!used.fits) fail(ErrorCode::kUnsupported, "the rows do not fit shared memory");
    launch_streaming(changed, used, s);
  };
  try {
    return time_layers(layers, launch, repeats, stream);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kDevice) throw;
    return std::nullopt;
  }
}

/// What times of this shape are held against, of the layer's floor: w13 has two thirds.
double share_of_weights(const StreamingShape& used) {
  if (used.down.num_blocks == 0 && used.up.num_blocks > 0) return 2.0 / 3;
  if (used.up.num_blocks == 0 && used.down.num_blocks > 0) return 1.0 / 3;
  return 1;
}

/// One JSON object a case, for results/. Bars are those of plans made before.
void print_line(const StreamingCase& c, double us, double floor, bool right, bool plan_is_new) {
  const bool small = std::string_view(c.name) == "G6";  // its bar allows 4 us beside the floor
  const double target = plan_is_new ? 0 : small ? 1.25 + 4 / floor : c.target;
  fmt::print(
      R"({{"stage": "streaming", "case": {{"name": "{}", "E": {}, "K": {}, "H": {}, "I": {}, "T": {}, )"
      R"("dtype": "{}", {}{}"weights": "{}", "zipf": {:.1f}}}, "median_us": {:.2f}, "limit_us": {:.2f}, )"
      R"("limit_by": "memory", "share": {:.3f}, "right": {})",
      c.name, c.num_experts, c.top_k, c.hidden, c.inner, c.num_tokens, to_string(c.dtype),
      c.fp8_rows ? "\"rows\": \"e4m3\", " : "", plan_is_new ? "\"plan\": \"new\", " : "",
      to_string(c.format), c.zipf, us, floor, floor / us, right);
  if (target > 0) {
    fmt::print(R"(, "bar": "{:.2}", "value": {:.3f}, "target": {:.3f}, "holds": {})", c.name,
               us / floor, target, right && us / floor <= target);
  }
  fmt::print("}}\n");
}

void print_shape(const StreamingShape& shape) {
  const auto print = [](const char* name, const StreamingKernelShape& k) {
    fmt::print("{} {}t {}x{}/{}", name, k.tiles, k.num_stages, k.stage_bytes, k.piece_bytes);
  };
  print(" [up", shape.up);
  print(", down", shape.down);
  if (shape.whole) fmt::print(", one ring {}x{}", shape.ring.num_stages, shape.ring.stage_bytes);
  fmt::print("]");
}

std::vector<StreamingVariant> variants_of(const BenchOptions& options, const StreamingCase& c,
                                          bool streamed) {
  if (options.variants && c.fp8_rows) return fp8_variants();
  if (options.variants && c.format != WeightFormat::kExact) {
    return coded_variants(c.num_tokens * c.top_k <= kMostStreamedRows * c.num_experts);
  }
  const bool f32 = c.dtype == DType::kF32;
  std::vector<StreamingVariant> variants;
  const auto add = [&](std::vector<StreamingVariant> more) {
    std::ranges::move(more, std::back_inserter(variants));
  };
  if (options.variants && !streamed) variants.push_back({.name = "streaming"});
  if (options.variants) add(streaming_variants());
  if (options.variants && f32) add(grouped_variants());
  if (options.grid) add(streaming_grid());
  return variants;
}

void run_case(const StreamingCase& c, const BenchOptions& options, Arena arena, double read_rate,
              cudaStream_t stream) {
  const StreamingLayers layers(c, arena, stream);
  const auto best = [&](const StreamingParams& params, cudaStream_t s) {
    layers.launch_best(params, s);
  };
  StreamingParams codes = layers.params().back();
  const StreamingVerdict verdict = check_streaming(
      layers.last_as_numbers(stream),
      [&](const StreamingParams& params, cudaStream_t s) {
        codes.plan_is_older = params.plan_is_older;
        best(codes, s);
      },
      stream, c.fp8_rows);
  const double floor = layers.hit_bytes() / read_rate * 1e6;
  fmt::print("{:<22} T{:<4} L{:<2} {:<22} most {:<3} floor {:8.1f} |", c.name, c.num_tokens,
             layers.params().size(), verdict.text, layers.most_rows(), floor);
  if (options.check_only) {
    fmt::print("\n");
    return;
  }
  const double us = time_layers(layers, best, layers.hit_bytes() > 2e9 ? 30 : 51, stream);
  fmt::print(" {:.1f} ({:.3f})", us, us / floor);
  const bool streamed = !c.fp8_rows && worth_streaming(layers.params().front(), streaming_chip()) &&
                        choose_streaming(layers.params().front(), streaming_chip()).fits;
  if (streamed) print_shape(choose_streaming(layers.params().front(), streaming_chip()));
  if (c.target > 0) {
    fmt::print(" bar {:.2f} {}", c.target, us / floor <= c.target ? "met" : "MISSED");
  }
  std::optional<double> behind_its_plan;
  if (streamed && c.format != WeightFormat::kExact) {
    const auto new_plan = [&](StreamingParams params, cudaStream_t s) {
      params.plan_is_older = false;
      layers.launch_best(params, s);
    };
    behind_its_plan = time_layers(layers, new_plan, 51, stream);
    fmt::print(" plan new {:.1f} ({:.3f})", *behind_its_plan, *behind_its_plan / floor);
  }
  for (const StreamingVariant& variant : variants_of(options, c, streamed)) {
    StreamingShape used;
    const auto other = time_variant(layers, variant, options.grid ? 9 : 30, stream, used);
    if (!other) continue;
    fmt::print(" {} {:.1f} ({:.3f})", variant.name, *other,
               *other / (floor * share_of_weights(used)));
  }
  fmt::print("\n");
  print_line(c, us, floor, verdict.right, false);
  if (behind_its_plan) print_line(c, *behind_its_plan, floor, verdict.right, true);
  std::fflush(stdout);
}

void run(const BenchOptions& options) {
  cudaStream_t stream = nullptr;
  SWITCHYARD_CUDA(cudaStreamCreate(&stream));
  std::size_t free_bytes = 0, total = 0;
  SWITCHYARD_CUDA(cudaMemGetInfo(&free_bytes, &total));
  const DeviceBytes memory(std::min(free_bytes - (std::size_t{4} << 30), options.arena_gib << 30));
  const Arena arena{memory.as<std::byte>(), memory.bytes()};
  const double read_rate = measure_read(arena, stream);
  const std::regex wanted(options.name);
  for (const StreamingCase& c : kCases) {
    if (!std::regex_match(fmt::format("{}-T{}", c.name, c.num_tokens), wanted)) continue;
    run_case(c, options, arena, read_rate, stream);
  }
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace switchyard::bench

int main(int argc, char** argv) {
  CLI::App app("Experts of few tokens on one GPU, against the time that their weights need");
  switchyard::bench::BenchOptions options;
  app.add_option("--name", options.name, "only cases whose NAME-Ttokens this expression matches");
  app.add_flag("--check", options.check_only, "only compare with the reference");
  app.add_flag("--variants", options.variants, "beside other rings, paths and the grouped GEMM");
  app.add_flag("--grid", options.grid, "beside each kernel alone over tiles, pieces and rings");
  app.add_option("--arena", options.arena_gib, "GiB of weights at most; the cases need 8 to 15")
      ->check(CLI::Range(8, 1024));
  CLI11_PARSE(app, argc, argv);
  try {
    switchyard::bench::run(options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "streaming_bench: {}\n", error.what());
    return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}

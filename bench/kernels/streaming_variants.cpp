#include "bench/kernels/streaming_variants.hpp"

#include <fmt/core.h>

#include <algorithm>

namespace switchyard::bench {
namespace {

std::function<void(StreamingParams&, StreamingShape&)> with_lead(
    const std::function<int(const StreamingKernelShape&)>& stages) {
  return [stages](StreamingParams&, StreamingShape& shape) {
    shape.up.lead_stages = stages(shape.up);
    shape.down.lead_stages = stages(shape.down);
    shape.ring.lead_stages = stages(shape.ring);
  };
}

/// One kernel by these sizes, the other left out.
struct GridPoint {
  bool up, by_item;
  int tiles, piece, ring_kib;

  void apply(const StreamingParams& p, StreamingShape& shape) const {
    StreamingKernelShape& k = up ? shape.up : shape.down;
    const std::int64_t row_bytes = (up ? p.hidden : p.inner) * size_of(p.dtype);
    const auto most =
        static_cast<int>((p.hidden + shape.down.num_blocks - 1) / shape.down.num_blocks);
    const int split = (most + 16 * tiles - 1) / (16 * tiles);
    const int rows = up ? 16 * tiles : (most + split - 1) / split;
    const double of_an_expert =
        static_cast<double>(p.max_rows) /
        static_cast<double>(std::min<std::int64_t>(p.num_experts, p.max_rows));
    const int tokens = std::min(64, 1 + static_cast<int>(1.3 * of_an_expert));
    const int least = std::max(64, piece / 8);
    k.tiles = tiles;
    k.by_item = by_item;
    k.piece_bytes = piece;
    k.stage_bytes =
        std::max(rows * piece + tokens * (piece | 64), rows * least + 64 * (least | 64));
    k.stage_bytes = (k.stage_bytes + 127) / 128 * 128;
    k.num_stages = std::min(24, ring_kib * 1024 / k.stage_bytes);
    shape.fits = k.num_stages >= 2 && piece <= row_bytes && (tiles <= 2 || ring_kib > 150 || !up) &&
                 !(by_item && tiles == 8) && (up || tiles == 1 || 16 * tiles < 2 * most);
    (up ? shape.down : shape.up).num_blocks = 0;
    shape.whole = false;
  }
  [[nodiscard]] std::string name() const {
    return fmt::format("\n   {} {}t/{}/{}K{}", up ? "up" : "down", tiles, piece, ring_kib,
                       by_item ? " by item" : "");
  }
};

}  // namespace

std::vector<StreamingVariant> streaming_variants() {
  return {
      {"lead3", with_lead([](const StreamingKernelShape&) { return 3; })},
      {"lead2x", with_lead([](const StreamingKernelShape& k) { return 2 * k.num_stages; })},
      {"lead0", with_lead([](const StreamingKernelShape&) { return 1 << 20; })},
      {"plan new",
       [](StreamingParams& params, StreamingShape& shape) {
         params.plan_is_older = false;
         shape = choose_streaming(params, streaming_chip());
       }},
      {"two kernels",
       [](StreamingParams& params, StreamingShape& shape) {
         params.sync = nullptr;
         shape = choose_streaming(params, streaming_chip());
       }},
      {"solo",
       [](StreamingParams& params, StreamingShape& shape) {
         StreamingChip chip = streaming_chip();
         chip.shared_bytes_per_sm = 2 * chip.shared_bytes_per_block + 2048;
         shape = choose_streaming(params, chip);
       }},
      {"portable",
       [](StreamingParams& params, StreamingShape& shape) {
         StreamingChip chip = streaming_chip();
         chip.hopper = false;
         shape = choose_streaming(params, chip);
         params.path = StreamingPath::kPortable;
       }},
      {"1tile",
       [](StreamingParams& params, StreamingShape& shape) {
         params.batch_invariant = true;
         shape = choose_streaming(params, streaming_chip());
       }},
  };
}

std::vector<StreamingVariant> grouped_variants() {
  const auto grouped = [](GroupedPath path, unsigned parts) {
    return
        [path, parts](const StreamingLayers& layers, const StreamingParams& params,
                      cudaStream_t stream) { layers.launch_grouped(params, path, parts, stream); };
  };
  return {{"grouped", {}, grouped(GroupedPath::kBest, StreamingLayers::kAll)},
          {"its up", {}, grouped(GroupedPath::kBest, StreamingLayers::kUp)},
          {"its down", {}, grouped(GroupedPath::kBest, StreamingLayers::kDown)},
          {"its combine", {}, grouped(GroupedPath::kBest, StreamingLayers::kCombine)},
          {"grouped sm80", {}, grouped(GroupedPath::kSm80, StreamingLayers::kAll)}};
}

std::vector<StreamingVariant> coded_variants(bool streams) {
  std::vector<StreamingVariant> variants = {
      {"expanded",
       {},
       [](const StreamingLayers& layers, const StreamingParams& params, cudaStream_t stream) {
         layers.launch_expanded(params, stream);
       }}};
  const auto coded = [&](const char* name, unsigned parts) {
    variants.push_back(
        {name,
         {},
         [parts](const StreamingLayers& layers, const StreamingParams& params,
                 cudaStream_t stream) { layers.launch_coded(params, parts, stream); }});
  };
  coded("grouped", StreamingLayers::kAll);
  coded("its first", StreamingLayers::kUp);
  coded("its second", StreamingLayers::kDown);
  coded("its combine", StreamingLayers::kCombine);
  coded("ordered", StreamingLayers::kAll | StreamingLayers::kOrdered);
  coded("ordered first", StreamingLayers::kUp | StreamingLayers::kOrdered);
  coded("ordered second", StreamingLayers::kDown | StreamingLayers::kOrdered);
  if (!streams) return variants;
  variants.push_back({"streamed", [](StreamingParams& params, StreamingShape& shape) {
                        shape = choose_streaming(params, streaming_chip());
                      }});
  const auto tiles = [&](const char* name, int StreamingProblem::*which, int count) {
    variants.push_back({fmt::format("{} {}t", name, count),
                        [which, count](StreamingParams& params, StreamingShape& shape) {
                          params.*which = count;
                          shape = choose_streaming(params, streaming_chip());
                        }});
  };
  for (const int count : {1, 2, 4, 8}) tiles("up", &StreamingProblem::up_tiles, count);
  for (const int count : {1, 2, 4}) tiles("down", &StreamingProblem::down_tiles, count);
  for (const int count : {2, 4}) {
    variants.push_back({fmt::format("plan new, up {}t", count),
                        [count](StreamingParams& params, StreamingShape& shape) {
                          params.plan_is_older = false;
                          params.up_tiles = count;
                          shape = choose_streaming(params, streaming_chip());
                        }});
  }
  // Each kernel alone.
  const auto alone = [&](const char* name, StreamingKernelShape StreamingShape::*other) {
    variants.push_back({name, [other](StreamingParams&, StreamingShape& shape) {
                          (shape.*other).num_blocks = 0;
                        }});
  };
  alone("its up", &StreamingShape::down);
  alone("its down", &StreamingShape::up);
  return variants;
}

std::vector<StreamingVariant> fp8_variants() {
  const auto only = [](unsigned parts) {
    return [parts](const StreamingLayers& layers, const StreamingParams& params,
                   cudaStream_t stream) { layers.launch_fp8(params, parts, stream); };
  };
  return {{"products", {}, only(StreamingLayers::kUp | StreamingLayers::kDown)},
          {"its first", {}, only(StreamingLayers::kUp)},
          {"its second", {}, only(StreamingLayers::kDown)},
          {"its combine", {}, only(StreamingLayers::kCombine)}};
}

std::vector<StreamingVariant> streaming_grid() {
  std::vector<StreamingVariant> variants;
  for (const bool up : {true, false}) {
    for (const int tiles : {1, 2, 4, 8}) {
      for (const int piece : {256, 512, 1024, 2048}) {
        for (const int ring_kib : {100, 200}) {
          for (const bool by_item : {false, true}) {
            if (by_item && up) continue;
            const GridPoint point{up, by_item, tiles, piece, ring_kib};
            variants.push_back(
                {point.name(), [point](StreamingParams& params, StreamingShape& shape) {
                   point.apply(params, shape);
                 }});
          }
        }
      }
    }
  }
  return variants;
}

}  // namespace switchyard::bench

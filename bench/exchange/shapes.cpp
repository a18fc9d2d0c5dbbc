// What data/all2all.json says, as shapes.
#include "bench/exchange/shapes.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "bench/all2all_json.hpp"

namespace switchyard::bench {
namespace {

using nlohmann::json;

json spec() { return json::parse(kAll2AllJson); }

ExchangeShape shape_of(const json& entry, ExchangeShape::Kind kind, double scale) {
  // Two tokens at least: the published input draws from [1, max_num_tokens).
  const std::int64_t tokens = entry.at("max_num_tokens");
  const std::int64_t hidden = entry.at("hidden_dim");
  return {
      .kind = kind,
      .num_experts = entry.at("num_experts"),
      .top_k = entry.at("experts_per_token"),
      .hidden = scale == 1 ? hidden : scaled_size(hidden, scale),
      .max_tokens = scale == 1 ? tokens : std::max<std::int64_t>(2, scaled_tokens(tokens, scale)),
      .seed = entry.at("seed"),
      .world_size = entry.at("world_size")};
}

}  // namespace

std::int64_t scaled_tokens(std::int64_t tokens, double scale) {
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(static_cast<double>(tokens) / scale));
}

std::int64_t scaled_size(std::int64_t size, double scale) {
  const auto divided = static_cast<std::int64_t>(static_cast<double>(size) / scale);
  return std::max<std::int64_t>(32, divided / 32 * 32);
}

std::vector<ExchangeShape> exchange_shapes(double scale) {
  const json all = spec();
  std::vector<ExchangeShape> shapes;
  for (const json& entry : all.at("tests_small")) {
    shapes.push_back(shape_of(entry, ExchangeShape::Kind::kTest, 1));
  }
  for (const json& entry : all.at("tests")) {
    shapes.push_back(shape_of(entry, ExchangeShape::Kind::kTest, scale));
  }
  for (const json& entry : all.at("benchmarks")) {
    shapes.push_back(shape_of(entry, ExchangeShape::Kind::kBenchmark, scale));
  }
  return shapes;
}

ExchangeShape bar_shape(double scale) {
  return {.kind = ExchangeShape::Kind::kBar,
          .num_experts = 64,
          .top_k = 8,
          .hidden = scaled_size(2048, scale),
          .max_tokens = scaled_tokens(512, scale),
          .seed = 8,
          .world_size = 4,
          .dtype = DType::kBF16};
}

FixedSizeSweeps fixed_size_sweeps(double scale) {
  const json flavour = spec().at("fixed_size_flavour");
  FixedSizeSweeps out{.world_size = flavour.at("pinned").at("world_size"), .points = {}};
  for (const char* name : {"batch", "sequence", "local_experts", "top_k"}) {
    const json& axes = flavour.at("sweeps").at(name);
    for (const std::int64_t value : axes.at(name)) {
      const auto at = [&](const char* axis) -> std::int64_t {
        return std::string_view(axis) == name ? value : axes.at(axis).at(0).get<std::int64_t>();
      };
      out.points.push_back(
          {.sweep = name,
           .value = value,
           .config = {.tokens = scaled_tokens(at("batch") * at("sequence"), scale),
                      .local_experts = static_cast<std::int32_t>(at("local_experts")),
                      .top_k = static_cast<std::int32_t>(at("top_k")),
                      .hidden = scaled_size(at("hidden_dim"), scale)}});
    }
  }
  return out;
}

std::vector<std::string> findings_to_test() {
  return spec().at("fixed_size_flavour").at("pinned").at("findings_to_test");
}

}  // namespace switchyard::bench

#include "tool/report/run_document.hpp"

#include "tool/report/values.hpp"

namespace switchyard::tool {
namespace {

using nlohmann::json;

void copy_member(const json& from, const char* path, json& to, const char* name) {
  if (const json* value = member_of(from, path)) to[name] = *value;
}

}  // namespace

std::vector<json> lines_of_run(const json& document) {
  const json* stages = member_of(document, "stages");
  const json* layer = member_of(document, "layer");
  if (stages == nullptr || !stages->is_array() || stages->empty() || layer == nullptr ||
      !layer->is_object()) {
    return {};
  }
  json common = {{"program", "run"}, {"case", *layer}, {"machine", json::object()}};
  copy_member(document, "layer.family", common["case"], "name");
  copy_member(document, "tokens", common["case"], "T");
  copy_member(document, "ranks", common["case"], "R");
  copy_member(document, "engine", common["case"], "engine");
  copy_member(document, "load", common, "load");
  copy_member(document, "limits.bandwidth", common["machine"], "bandwidth");
  const std::string compute = text_of(*layer, "compute");
  if (!compute.empty()) {
    copy_member(document, "limits.flops_compute", common["machine"], ("flops_" + compute).c_str());
  }
  std::vector<json> lines;
  for (const json& stage : *stages) {
    if (!stage.is_object()) return {};
    json line = common;
    line.update(stage);
    lines.push_back(std::move(line));
  }
  copy_member(document, "routing", lines.back(), "routing");
  return lines;
}

}  // namespace switchyard::tool

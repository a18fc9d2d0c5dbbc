#include "tool/run/weights.hpp"

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "core/check.hpp"

namespace switchyard::tool {
namespace {

/// Values that are read at a time.
constexpr std::int64_t kBlock = 1 << 20;

const char* name_of(ExpertPart part) {
  switch (part) {
    case ExpertPart::kGate: return "gate";
    case ExpertPart::kUp: return "up";
    case ExpertPart::kDown: return "down";
  }
  return "";
}

class WeightsCheck {
 public:
  explicit WeightsCheck(const std::string& where) : where_(where) {}

  /// Rows of `values` [rows, cols], the first of which is number `first_row` of the tensor `name`.
  void rows(const std::string& name, std::span<const float> values, std::int64_t cols,
            std::int64_t first_row = 0) const {
    const auto bad = std::find_if(values.begin(), values.end(),
                                  [](float value) { return !std::isfinite(value); });
    if (bad == values.end()) return;
    const std::int64_t i = bad - values.begin();
    fail(ErrorCode::kBadFile, "{}: {}[{}, {}] is {}, want finite numbers", where_, name,
         first_row + i / cols, i % cols, *bad);
  }

  void vector(const std::string& name, std::span<const float> values) const {
    const auto bad = std::find_if(values.begin(), values.end(),
                                  [](float value) { return !std::isfinite(value); });
    if (bad == values.end()) return;
    fail(ErrorCode::kBadFile, "{}: {}[{}] is {}, want finite numbers", where_, name,
         bad - values.begin(), *bad);
  }

  void source(const std::string& name, const ExpertConfig& config, const ExpertSource& source) {
    for (std::int32_t e = 0; e < config.num_experts; ++e) {
      const std::string expert = config.num_experts == 1 ? name : fmt::format("{} {}", name, e);
      for (const ExpertPart part : {ExpertPart::kGate, ExpertPart::kUp, ExpertPart::kDown}) {
        if (part == ExpertPart::kUp && !config.gated) continue;
        this->part(expert, config, source, e, part);
      }
    }
  }

 private:
  void part(const std::string& expert, const ExpertConfig& config, const ExpertSource& source,
            std::int32_t e, ExpertPart part) {
    const bool down = part == ExpertPart::kDown;
    const std::int64_t num_rows = down ? config.hidden : config.inner;
    const std::int64_t cols = down ? config.inner : config.hidden;
    const std::int64_t step = std::clamp<std::int64_t>(kBlock / cols, 1, num_rows);
    for (std::int64_t first = 0; first < num_rows; first += step) {
      const std::int64_t count = std::min(step, num_rows - first);
      values_.resize(static_cast<std::size_t>(count * cols));
      source.read(e, part, first, count, DType::kF32, values_.data());
      source.done_with(e, part, first, count);
      rows(fmt::format("{}, {} weight", expert, name_of(part)), values_, cols, first);
    }
    if (!config.bias) return;
    values_.resize(static_cast<std::size_t>(num_rows));
    source.read_bias(e, part, values_.data());
    vector(fmt::format("{}, {} bias", expert, name_of(part)), values_);
  }

  const std::string& where_;
  std::vector<float> values_;
};

}  // namespace

void check_weights(const LayerModel& model, const std::string& where) {
  WeightsCheck check(where);
  const LayerConfig& config = model.config;
  check.rows("router weight", model.gate.floats(),
             config.router.network.features(config.experts.hidden));
  check.vector("router network", model.router_network.floats());
  check.vector("constant experts", model.constant_experts.floats());
  check.vector("router bias", model.router_bias.floats());
  check.vector("selection bias", model.selection_bias.floats());
  check.vector("shared expert's gate", model.shared_gate.floats());
  check.source("expert", model.config.experts, *model.experts);
  if (model.shared != nullptr) check.source("shared expert", model.config.shared, *model.shared);
}

}  // namespace switchyard::tool

#pragma once

// Models whose experts differ, and their windows in double.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tests/models/double_model.hpp"
#include "tests/models/small_run.hpp"

namespace switchyard::models {

/// Weights that are larger than at the beginning, so that experts differ and losses too.
inline Model made_model(const ModelConfig& config, std::uint64_t seed = 3) {
  Model model(config, {.num_threads = 2, .seed = seed});
  for (const ParameterTensor& tensor : model.parameters()) {
    if (tensor.group == Group::kNorm) continue;
    for (std::int64_t i = 0; i < tensor.size(); ++i) tensor.value[i] *= 12;
  }
  model.parameters_changed();
  return model;
}

/// A part of a text that the model reads at once, with the byte behind each.
struct DoubleWindow {
  test::Ids tokens, targets;
};
inline std::vector<DoubleWindow> double_windows(const std::string& content, std::size_t length) {
  std::vector<DoubleWindow> windows;
  for (std::size_t i = 0; i + 1 < content.size(); ++i) {
    if (i % length == 0) windows.emplace_back();
    windows.back().tokens.push_back(static_cast<unsigned char>(content[i]));
    windows.back().targets.push_back(static_cast<unsigned char>(content[i + 1]));
  }
  return windows;
}

}  // namespace switchyard::models

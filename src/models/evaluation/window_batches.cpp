#include "models/evaluation/window_batches.hpp"

#include <algorithm>

#include "core/check.hpp"

namespace switchyard::models {

void for_each_batch(const Text& text, std::span<const Window> windows, std::int64_t length,
                    std::int64_t sequences, const std::function<void(double)>& progress,
                    const std::function<void(const WindowBatch&)>& visit) {
  require(sequences >= 1, "{} sequences of a call", sequences);
  const auto most = static_cast<std::size_t>(sequences);
  Batch batch;
  for (std::size_t first = 0; first < windows.size(); first += most) {
    const std::span<const Window> some =
        windows.subspan(first, std::min(most, windows.size() - first));
    fill_batch(text, some, length, batch);
    visit({some, first, batch});
    if (progress) {
      progress(static_cast<double>(first + some.size()) / static_cast<double>(windows.size()));
    }
  }
}

std::vector<float> evaluate_batch(Model& model, const Batch& batch, const RoutingHook& hook) {
  std::vector<float> nll(batch.tokens.size());
  model.evaluate({batch.tokens.data(), {batch.sequences, batch.length}},
                 {batch.targets.data(), {batch.sequences, batch.length}},
                 {nll.data(), {batch.sequences, batch.length}}, hook);
  return nll;
}

}  // namespace switchyard::models

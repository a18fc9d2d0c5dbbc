#pragma once

// Windows of held-out text through a model, batch after batch, with a hook at its routers.

#include <functional>
#include <span>
#include <vector>

#include "switchyard/models/model.hpp"
#include "switchyard/models/text.hpp"

namespace switchyard::models {

struct WindowBatch {
  std::span<const Window> windows;  ///< [B].
  std::size_t first;                ///< Of them, among all.
  const Batch& batch;  ///< [B, S] padded; a token of the text has a target, padding -1.
};

/// @param progress  Share of the windows that are done; may be empty.
/// @throws Error{kInvalidArgument}: sequences < 1.
void for_each_batch(const Text& text, std::span<const Window> windows, std::int64_t length,
                    std::int64_t sequences, const std::function<void(double)>& progress,
                    const std::function<void(const WindowBatch&)>& visit);

/// [B, S] nats of each target, 0 where there is none.
std::vector<float> evaluate_batch(Model& model, const Batch& batch, const RoutingHook& hook);

}  // namespace switchyard::models

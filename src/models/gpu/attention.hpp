#pragma once

#include "models/gpu/stages.hpp"

namespace switchyard::models::gpu {

/// attention() and attention_backward() in bf16,
void attention_bf16(const AttentionArgs& args);
void attention_backward_bf16(const AttentionBackwardArgs& args);

/// and by Hopper's own instructions: heads of 64 or 128 numbers. Of the way back all but delta.
void attention_sm90(const AttentionArgs& args);
void attention_backward_sm90(const AttentionBackwardArgs& args);
/// Whether these take a call, on the current device.
[[nodiscard]] bool takes_sm90(const AttentionArgs& args);

}  // namespace switchyard::models::gpu

#pragma once

#include "models/gpu/stages.hpp"

namespace switchyard::models::gpu {

/// attention() and attention_backward() in bf16.
void attention_bf16(const AttentionArgs& args);
void attention_backward_bf16(const AttentionBackwardArgs& args);

}  // namespace switchyard::models::gpu

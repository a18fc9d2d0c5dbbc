#pragma once

#include <cuda_runtime_api.h>

#include "layer/gpu/call_status.hpp"
#include "switchyard/plan.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

/// out = in, element by element, rounded to nearest even; f32, bf16, f16.
void convert(ConstRawMatrix in, RawMatrix out, cudaStream_t stream);

/// The plan in which every token [T, H] goes to one expert, with weight 1 or sigmoid(token . gate)
/// (`gate` [H] f32, or null).
void plan_one_expert(ConstRawMatrix tokens, const float* gate, const PlanView& plan,
                     cudaStream_t stream);

/// Writes `from` to `to` in pinned memory. By a kernel: copies of several ranks share queues, where
/// one that waits for its rank's exchange would keep another rank's from what the exchange waits
/// for.
void report(const CallStatusOnDevice& from, CallStatus* to, cudaStream_t stream);

}  // namespace switchyard

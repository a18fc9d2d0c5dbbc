#include "models/gpu/step_sums.hpp"

#include <cstddef>

#include "core/gpu/cuda_check.hpp"
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/device_wide.hpp"
#include "layer/gpu/shared_gpu.hpp"

namespace switchyard::models::gpu {
namespace {

constexpr std::uintptr_t kAlign = 256;
constexpr std::int64_t kPadding = kAlign / sizeof(float);

/// An exchange of its own, for its sums: the smallest that moves rows.
ExpertParallelConfig smallest(int num_ranks) {
  return {.num_experts = num_ranks,
          .top_k = 1,
          .hidden = 8,
          .max_tokens = 1,
          .dtype = DType::kF32,
          .dispatch_wire = DType::kF32,
          .combine_wire = DType::kF32};
}

}  // namespace

StepSums::StepSums(Communicator& ranks, std::int64_t size, std::int64_t summed)
    : exchange_(ranks, smallest(ranks.size()),
                {.device = current_device(),
                 .mode = ExchangeMode::kThroughput,
                 .one_place = true,
                 .timeout = ranks.timeout()},
                {.most_summed = kPadding + size}),
      summed_(summed) {
  float* const place = exchange_.place_of_summed().data;
  const std::uintptr_t behind = reinterpret_cast<std::uintptr_t>(place) % kAlign;
  memory_ = place + static_cast<std::ptrdiff_t>((kAlign - behind) % kAlign / sizeof(float));
  SWITCHYARD_CUDA(cudaMemset(place, 0, static_cast<std::size_t>(4 * (kPadding + size))));
  SWITCHYARD_CUDA(wait_for_device());
  ranks.barrier("memory of a step's sums");
}

void StepSums::add_up(cudaStream_t stream) {
  const Execution execution{.backend = Backend::kCuda, .stream = stream};
  const std::int64_t skipped = memory_ - exchange_.place_of_summed().data;
  if (shares_gpu()) SharedGpu::settle(execution);
  exchange_.sum_over_ranks(skipped + summed_, execution);
  if (shares_gpu()) SharedGpu::settle(execution);
}

}  // namespace switchyard::models::gpu

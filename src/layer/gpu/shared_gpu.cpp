// Ranks that share a GPU, for tests: every kernel that waits for another rank leaves room for the
// kernels that the other one must run first.
#include "layer/gpu/shared_gpu.hpp"

#include <algorithm>

#include "comm/device/windows/sharing.hpp"
#include "core/check.hpp"
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/stacks.hpp"

namespace switchyard {
namespace {

/// The exchanges of the other ranks here may hold a multiprocessor a block while this rank's plan,
/// whose blocks wait for each other (at most one for 1024 assignments), has yet to find room.
void require_room(const DeviceExpertParallel& exchange, const LayerConfig& config,
                  const LayerOptions& options, int num_ranks) {
  constexpr std::int64_t kPlanThreads = 1024;
  const std::int64_t top_k = config.router.top_k();
  const std::int64_t of_a_block = std::max<std::int64_t>(1, kPlanThreads / top_k);
  const std::int64_t received = num_ranks * options.max_tokens;
  const std::int64_t plan_blocks = (received + of_a_block - 1) / of_a_block;
  const std::int64_t held = std::int64_t{exchange.ranks_on_device() - 1} * exchange.ctas();
  const std::int64_t room = num_multiprocessors();
  if (held + plan_blocks <= room) return;
  fail(ErrorCode::kUnsupported,
       "{} ranks share a GPU of {} multiprocessors: {} blocks of the others' exchanges and {} of a "
       "plan do not fit together, want fewer than max_tokens={} or a GPU for each rank",
       exchange.ranks_on_device(), room, held, plan_blocks, options.max_tokens);
}

}  // namespace

std::unique_ptr<SharedGpu> SharedGpu::of(const DeviceExpertParallel& exchange,
                                         const LayerConfig& config, const LayerOptions& options,
                                         int num_ranks) {
  if (exchange.ranks_on_device() == 1) return nullptr;
  require_loaded_kernels();
  require_room(exchange, config, options, num_ranks);
  make_room_for_stacks();
  return std::unique_ptr<SharedGpu>(new SharedGpu);
}

void SharedGpu::settle(const Execution& execution) {
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  SWITCHYARD_CUDA(cudaStreamIsCapturing(stream, &capture));
  if (capture == cudaStreamCaptureStatusNone) SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
}

}  // namespace switchyard

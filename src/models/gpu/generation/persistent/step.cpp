#include "models/gpu/generation/persistent/step.hpp"

#include <algorithm>

#include "core/gpu/cuda_device.hpp"
#include "models/gpu/generation/persistent/launch.hpp"

namespace switchyard::models::gpu {

bool persistent_step_fits(const PersistentStepArgs& args) {
  return args.bf16 ? step_fits_bf16(args) : step_fits_f32(args);
}

std::int32_t persistent_splits(std::int64_t rows, std::int32_t heads, std::int32_t kv_heads,
                               std::int64_t capacity) {
  constexpr std::int64_t kFewest = 128;  // positions that are worth a block
  const std::int64_t of_kv = heads / kv_heads;
  const std::int64_t items = rows * kv_heads * ((of_kv + 1) / 2);
  const std::int64_t most = std::min<std::int64_t>(16, (capacity + kFewest - 1) / kFewest);
  return static_cast<std::int32_t>(
      std::clamp<std::int64_t>(num_multiprocessors() / items, 1, most));
}

void persistent_step(const PersistentStepArgs& args) {
  if (args.bf16) {
    launch_step_bf16(args);
  } else {
    launch_step_f32(args);
  }
}

}  // namespace switchyard::models::gpu

#include "models/gpu/generation/persistent/launch.hpp"
#include "models/gpu/generation/persistent/step_kernel.cuh"

namespace switchyard::models::gpu {

bool step_fits_bf16(const PersistentStepArgs& args) { return step_fits<Bf16>(args); }
void launch_step_bf16(const PersistentStepArgs& args) { launch_step<Bf16>(args); }

}  // namespace switchyard::models::gpu

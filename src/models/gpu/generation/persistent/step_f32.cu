#include "models/gpu/generation/persistent/launch.hpp"
#include "models/gpu/generation/persistent/step_kernel.cuh"

namespace switchyard::models::gpu {

bool step_fits_f32(const PersistentStepArgs& args) { return step_fits<float>(args); }
void launch_step_f32(const PersistentStepArgs& args) { launch_step<float>(args); }

}  // namespace switchyard::models::gpu

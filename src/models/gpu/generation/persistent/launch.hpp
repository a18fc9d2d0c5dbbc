#pragma once

// persistent_step() by type: a file each.

#include "models/gpu/generation/persistent/step.hpp"

namespace switchyard::models::gpu {

bool step_fits_bf16(const PersistentStepArgs& args);
bool step_fits_f32(const PersistentStepArgs& args);
void launch_step_bf16(const PersistentStepArgs& args);
void launch_step_f32(const PersistentStepArgs& args);

}  // namespace switchyard::models::gpu

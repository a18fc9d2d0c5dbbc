#include "experts/gpu/backward/sm90/launch.cuh"

namespace switchyard {

template struct HopperBackward<__nv_bfloat16>;

}  // namespace switchyard

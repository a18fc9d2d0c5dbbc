#include "experts/gpu/backward/sm90/launch.cuh"

namespace switchyard {

template struct HopperBackward<__half>;

}  // namespace switchyard

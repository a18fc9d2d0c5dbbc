#include "experts/gpu/backward/portable.cuh"

namespace switchyard {

template struct PortableBackward<__half>;

}  // namespace switchyard

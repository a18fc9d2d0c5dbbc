#include "experts/gpu/backward/portable.cuh"

namespace switchyard {

template struct PortableBackward<__nv_bfloat16>;

}  // namespace switchyard

#include "experts/gpu/backward/portable.cuh"

namespace switchyard {

template struct PortableBackward<float>;

}  // namespace switchyard

#pragma once

#include "core/select.hpp"
#include "switchyard/dispatch.hpp"

namespace switchyard {

extern const Implementation<PackArgs> kPackCpu;
#ifdef SWITCHYARD_WITH_CUDA
extern const Implementation<PackArgs> kPackCuda;
#endif

}  // namespace switchyard

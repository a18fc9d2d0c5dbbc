#pragma once

#include "core/select.hpp"
#include "switchyard/routing/soft_moe.hpp"

namespace switchyard {

extern const Implementation<SoftMoeArgs> kSoftMoeCpu;
extern const Implementation<SoftMoeBackwardArgs> kSoftMoeBackwardCpu;

}  // namespace switchyard

#pragma once

#include "core/select.hpp"
#include "switchyard/route.hpp"

namespace switchyard {

extern const Implementation<RouteArgs> kRouteCpu;
extern const Implementation<RouterGemmArgs> kRouterGemmCpu;

}  // namespace switchyard

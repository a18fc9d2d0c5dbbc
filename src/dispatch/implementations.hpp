#pragma once

#include "core/select.hpp"
#include "switchyard/dispatch.hpp"

namespace switchyard {

extern const Implementation<PackArgs> kPackCpu;

}  // namespace switchyard

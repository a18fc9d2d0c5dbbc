#pragma once

#include "core/reduced_check.hpp"
#include "core/select.hpp"
#include "switchyard/combine.hpp"

namespace switchyard {

extern const Implementation<CombineArgs> kCombineCpu;
extern const Implementation<FinishArgs> kFinishCpu;
#ifdef SWITCHYARD_WITH_CUDA
extern const Implementation<CombineArgs> kCombineCudaBulk;
extern const Implementation<CombineArgs> kCombineCudaBulkMany;
extern const Implementation<CombineArgs> kCombineCudaTree;
extern const Implementation<CombineArgs> kCombineCudaAny;
extern const Implementation<FinishArgs> kFinishCuda;
#endif

}  // namespace switchyard

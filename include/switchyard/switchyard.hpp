#pragma once

/// Everything of the library, in the order in which data flows.

// clang-format off
#include "switchyard/error.hpp"
#include "switchyard/tensor.hpp"
#include "switchyard/weight_format.hpp"
#include "switchyard/execution.hpp"
#include "switchyard/device.hpp"
#include "switchyard/thread_pool.hpp"
#include "switchyard/parameter.hpp"
#include "switchyard/route.hpp"
#include "switchyard/router.hpp"
#include "switchyard/routing/router_kinds.hpp"
#include "switchyard/assignments.hpp"
#include "switchyard/plan.hpp"
#include "switchyard/pack.hpp"
#include "switchyard/experts.hpp"
#include "switchyard/cpu_isa.hpp"
#include "switchyard/combine.hpp"
#include "switchyard/routing/losses.hpp"
#include "switchyard/routing/metrics.hpp"
#include "switchyard/backward.hpp"
#include "switchyard/routing/soft_moe.hpp"
#include "switchyard/comm.hpp"
#include "switchyard/routing/selection_bias.hpp"
#include "switchyard/mpi.hpp"
#include "switchyard/dispatch.hpp"
#include "switchyard/device_dispatch.hpp"
#include "switchyard/names.hpp"
#include "switchyard/layer.hpp"
#include "switchyard/checkpoint.hpp"
// clang-format on

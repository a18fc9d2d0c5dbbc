#pragma once

/// The oracle of the tests: every stage by its definition, in double, with bounds on the error of
/// an fp32 implementation. Shares no code with the stages; of the library it knows only the public
/// types.

#include "reference/backward.hpp"
#include "reference/bounded.hpp"
#include "reference/capacity.hpp"
#include "reference/fixed_order.hpp"
#include "reference/fp8.hpp"
#include "reference/layer.hpp"
#include "reference/network.hpp"
#include "reference/router.hpp"
#include "reference/router_rules.hpp"

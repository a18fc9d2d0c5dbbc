#pragma once

// The old name of switchyard/dispatch.hpp; goes with version 0.3.
#include "switchyard/dispatch.hpp"

#pragma once

// The old name of switchyard/dispatch.hpp; goes with version 0.2.
#include "switchyard/dispatch.hpp"

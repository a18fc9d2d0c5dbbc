#pragma once

// The old name of switchyard/device_dispatch.hpp; goes with version 0.3.
#include "switchyard/device_dispatch.hpp"

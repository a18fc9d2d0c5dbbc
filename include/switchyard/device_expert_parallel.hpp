#pragma once

// The old name of switchyard/device_dispatch.hpp; goes with version 0.2.
#include "switchyard/device_dispatch.hpp"

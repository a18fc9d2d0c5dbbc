#pragma once

#include "bench/measure/machine.hpp"

namespace switchyard::bench {

/// All-to-all push between H200s of one host, 342 GB/s per GPU and direction (measured 2026-11-21
/// with bulk copies and nothing else): the limit of what crosses.
inline constexpr double kPushBytesPerUs = 342e3;

/// Bytes and limit of a stage on GPUs. @param bytes  Of the rank that sends most, to other ranks.
inline void limit_by_wire(StageFigures& figures, double bytes) {
  figures.work.bytes = bytes;
  figures.limit_us = bytes / kPushBytesPerUs;
  figures.limit_by = "wire";
  figures.share = figures.us.median > 0 ? figures.limit_us / figures.us.median : 0;
}

}  // namespace switchyard::bench

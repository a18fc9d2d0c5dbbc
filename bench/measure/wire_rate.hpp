#pragma once

namespace switchyard::bench {

/// All-to-all push between H200s of one host, 342 GB/s per GPU and direction (measured 2026-11-21
/// with bulk copies and nothing else): the limit of what crosses.
inline constexpr double kPushBytesPerUs = 342e3;

}  // namespace switchyard::bench

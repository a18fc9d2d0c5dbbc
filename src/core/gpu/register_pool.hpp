#pragma once

namespace switchyard {

/// Registers that a block of so many threads is launched with where it has an SM to itself: the
/// most that each may have of 65536, in steps of 8. Warpgroups that share them out (setmaxnreg)
/// have no more: one that asks for more waits for ever.
constexpr int launch_registers(int threads) { return 65536 / threads / 8 * 8 * threads; }

}  // namespace switchyard

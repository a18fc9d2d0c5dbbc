#pragma once

// What the choice of an instruction set is made from: the CPU's and the system's answers, and a
// table over them. The answers are values, so that a test can give those of another machine.

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "switchyard/cpu_isa.hpp"

namespace switchyard::cpu {

enum class CpuVendor : std::uint8_t { kOther, kIntel, kAmd };

/// Words of CPUID and XCR0 (the register state that the system saves).
struct CpuFeatures {
  bool is_x86 = false;
  CpuVendor vendor = CpuVendor::kOther;
  unsigned family = 0;
  unsigned model = 0;
  unsigned leaf1_ecx = 0;
  unsigned leaf7_ebx = 0;
  unsigned leaf7_edx = 0;
  unsigned leaf7_1_eax = 0;
  unsigned saved_state = 0;
};

/// Of this machine.
[[nodiscard]] CpuFeatures read_cpu_features();

/// Of this machine too; asked once.
[[nodiscard]] CpuVendor cpu_vendor();

/// Asks the system for AMX tiles: Linux gives them to a process that asks, and to the threads that
/// it starts from then on.
[[nodiscard]] bool ask_for_tiles();

/// Peaks of one thread, in any unit.
struct DotPeaks {
  double fma = 0;   ///< Products of floats, by fused multiply-add.
  double dots = 0;  ///< bf16 dot products.
};
using MeasureDots = std::function<DotPeaks()>;

/// avx512_bf16 or avx512 for a CPU that has both: the one with the larger peak, from the table of
/// CPUs that have been measured, else by `measure`. What is measured has to be clear: the rates are
/// whole multiples of each other, and dot products, which need no widening of the weights, are only
/// left where they are slower by more than sqrt(2). So noise does not change a choice, nor the bits
/// of results, from one process to the next.
[[nodiscard]] CpuIsaChoice choose_dots(const CpuFeatures& cpu, const MeasureDots& measure);

/// Which instruction sets can be used, why not the others, and what is used if one is asked for.
class IsaTable {
 public:
  using Say = std::function<void(const std::string&)>;

  /// `grant_tiles` is called once if all else that amx_bf16 needs is there. If it answers no, a
  /// lower one takes its place; `say` is told so when that happens, once. `measure` is called at
  /// most once, by the first choice without a name on a CPU with bf16 dot products whose speed is
  /// not known.
  IsaTable(const CpuFeatures& features, const std::function<bool()>& grant_tiles, Say say,
           MeasureDots measure);

  /// In ascending order.
  [[nodiscard]] const std::vector<CpuIsaStatus>& statuses() const { return statuses_; }
  /// What runs where `isa` is asked for.
  /// @throws Error{kUnsupported}: it cannot be used, with the reason.
  [[nodiscard]] CpuIsa resolve(CpuIsa isa);
  /// The same for a name, or the one that reaches most if there is no name.
  /// @throws As resolve(); Error{kInvalidArgument}: it is no name.
  [[nodiscard]] CpuIsaChoice choose(const char* name);

 private:
  [[nodiscard]] const CpuIsaChoice& best();
  void tell_of_tiles(CpuIsa instead);

  std::vector<CpuIsaStatus> statuses_;
  bool tiles_refused_ = false;
  Say say_;
  std::atomic_flag said_ = ATOMIC_FLAG_INIT;
  CpuFeatures features_;
  MeasureDots measure_;
  std::mutex mutex_;
  std::optional<CpuIsaChoice> best_;  ///< Once somebody has asked.
};

}  // namespace switchyard::cpu

#pragma once

// What the choice of an instruction set is made from: the CPU's and the system's answers, and a
// table over them. The answers are values, so that a test can give those of another machine.

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "switchyard/cpu_isa.hpp"

namespace switchyard::cpu {

/// Words of CPUID and XCR0 (the register state that the system saves).
struct CpuFeatures {
  bool is_x86 = false;
  unsigned leaf1_ecx = 0;
  unsigned leaf7_ebx = 0;
  unsigned leaf7_edx = 0;
  unsigned leaf7_1_eax = 0;
  unsigned saved_state = 0;
};

/// Of this machine.
[[nodiscard]] CpuFeatures read_cpu_features();

/// Asks the system for AMX tiles: Linux gives them to a process that asks, and to the threads that
/// it starts from then on.
[[nodiscard]] bool ask_for_tiles();

/// Which instruction sets can be used, why not the others, and what is used if one is asked for.
class IsaTable {
 public:
  using Say = std::function<void(const std::string&)>;

  /// `grant_tiles` is called once if all else that amx_bf16 needs is there. If it answers no,
  /// avx512_bf16 takes its place; `say` is told so when that happens, once.
  IsaTable(const CpuFeatures& features, const std::function<bool()>& grant_tiles, Say say);

  /// In ascending order.
  [[nodiscard]] const std::vector<CpuIsaStatus>& statuses() const { return statuses_; }
  /// What runs where `isa` is asked for.
  /// @throws Error{kUnsupported}: it cannot be used, with the reason.
  [[nodiscard]] CpuIsa resolve(CpuIsa isa);
  /// The same for a name, or the best one if there is no name.
  /// @throws As resolve(); Error{kInvalidArgument}: it is no name.
  [[nodiscard]] CpuIsa choose(const char* name);

 private:
  std::vector<CpuIsaStatus> statuses_;
  bool tiles_refused_ = false;
  Say say_;
  std::atomic_flag said_ = ATOMIC_FLAG_INIT;
};

}  // namespace switchyard::cpu

// The instruction set in use: forced by a call or by the environment, else the one that reaches
// most.
#include "switchyard/cpu_isa.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <chrono>

#include "core/cpu/features.hpp"
#include "core/environment.hpp"
#include "core/say.hpp"
#include "experts/cpu/kernels/kernels.hpp"
#include "switchyard/names.hpp"

namespace switchyard {
namespace {

/// The peaks of both kernels' products on this thread: bursts of some 10 us in turns, the fastest
/// of each, since others on the machine can only slow them down.
cpu::DotPeaks measure() {
  using Clock = std::chrono::steady_clock;
  constexpr double kFlops = 1e6;
  constexpr int kTurns = 20;
  cpu::DotPeaks peaks;
  for (int turn = 0; turn < kTurns; ++turn) {
    for (const CpuIsa isa : {CpuIsa::kAvx512, CpuIsa::kAvx512Bf16}) {
      const cpu::Kernels& kernels = cpu::find_kernels(isa, DType::kBF16, WeightFormat::kExact);
      const auto rounds = static_cast<std::int64_t>(kFlops / kernels.spin_flops);
      const auto start = Clock::now();
      kernels.spin(rounds);
      const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
      double& peak = isa == CpuIsa::kAvx512 ? peaks.fma : peaks.dots;
      peak = std::max(peak, kernels.spin_flops * static_cast<double>(rounds) / seconds);
    }
  }
  return peaks;
}

cpu::IsaTable& table() {
  static cpu::IsaTable isas(
      cpu::read_cpu_features(), cpu::ask_for_tiles,
      [](const std::string& notice) { say(fmt::format("switchyard: {}\n", notice)); }, measure);
  return isas;
}

std::atomic<int> forced{-1};

}  // namespace

std::optional<CpuIsa> parse_cpu_isa(std::string_view name) noexcept { return parse<CpuIsa>(name); }

std::vector<CpuIsaStatus> cpu_isas() { return table().statuses(); }

std::vector<CpuIsa> available_isas() {
  std::vector<CpuIsa> list;
  for (const CpuIsaStatus& entry : table().statuses()) {
    if (entry.reason.empty()) list.push_back(entry.isa);
  }
  return list;
}

CpuIsaChoice isa_choice() {
  const int isa = forced.load();
  if (isa >= 0) return {.isa = static_cast<CpuIsa>(isa), .why = "asked for", .forced = true};
  return table().choose(value_of(Variable::kIsa));
}

CpuIsa isa_in_use() { return isa_choice().isa; }

void force_isa(std::optional<CpuIsa> isa) {
  forced.store(isa ? static_cast<int>(table().resolve(*isa)) : -1);
}

}  // namespace switchyard

// The instruction set in use: forced by a call or by the environment, else the best one here.
#include "switchyard/cpu_isa.hpp"

#include <fmt/core.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "core/cpu/features.hpp"

namespace switchyard {
namespace {

cpu::IsaTable& table() {
  static cpu::IsaTable isas(
      cpu::read_cpu_features(), cpu::ask_for_tiles,
      [](const std::string& notice) { fmt::print(stderr, "switchyard: {}\n", notice); });
  return isas;
}

std::atomic<int> forced{-1};

}  // namespace

const char* to_string(CpuIsa isa) noexcept {
  switch (isa) {
    case CpuIsa::kPortable: return "portable";
    case CpuIsa::kAvx2: return "avx2";
    case CpuIsa::kAvx512: return "avx512";
    case CpuIsa::kAvx512Bf16: return "avx512_bf16";
    case CpuIsa::kAmxBf16: return "amx_bf16";
  }
  return "unknown";
}

std::optional<CpuIsa> parse_cpu_isa(std::string_view name) noexcept {
  for (const CpuIsa isa :
       {CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512, CpuIsa::kAvx512Bf16, CpuIsa::kAmxBf16}) {
    if (name == to_string(isa)) return isa;
  }
  return std::nullopt;
}

std::vector<CpuIsaStatus> cpu_isas() { return table().statuses(); }

std::vector<CpuIsa> available_isas() {
  std::vector<CpuIsa> list;
  for (const CpuIsaStatus& entry : table().statuses()) {
    if (entry.reason.empty()) list.push_back(entry.isa);
  }
  return list;
}

CpuIsa isa_in_use() {
  const int isa = forced.load();
  return isa >= 0 ? static_cast<CpuIsa>(isa) : table().choose(std::getenv("SWITCHYARD_ISA"));
}

void force_isa(std::optional<CpuIsa> isa) {
  forced.store(isa ? static_cast<int>(table().resolve(*isa)) : -1);
}

}  // namespace switchyard

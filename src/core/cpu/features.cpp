// Which instruction sets a CPU and a system have. Decided by CPUID and XCR0 bits, never by the
// model's name.
#include "core/cpu/features.hpp"

#include <fmt/core.h>

#include <initializer_list>
#include <optional>
#include <utility>

#include "core/check.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace switchyard::cpu {
namespace {

struct Feature {
  bool present;
  const char* name;
};

std::string missing(std::initializer_list<Feature> features) {
  std::string names;
  for (const Feature& feature : features) {
    if (!feature.present) names += fmt::format("{}{}", names.empty() ? "" : ", ", feature.name);
  }
  return names.empty() ? "" : "the CPU or the system lacks " + names;
}

/// What `isa` needs beyond the instruction sets below it.
std::string find_reason(CpuIsa isa, const CpuFeatures& cpu) {
  constexpr unsigned kYmm = 0x6;
  constexpr unsigned kZmm = 0xe6;
  constexpr unsigned kTiles = 0x60000;
  const auto has = [](unsigned bits, int bit) { return ((bits >> bit) & 1U) != 0; };
  const auto saves = [&](unsigned state) { return (cpu.saved_state & state) == state; };
  if (isa == CpuIsa::kPortable) return "";
  if (!cpu.is_x86) return "it is for x86-64";
  switch (isa) {
    case CpuIsa::kPortable: break;
    case CpuIsa::kAvx2:
      return missing({{has(cpu.leaf7_ebx, 5), "AVX2"},
                      {has(cpu.leaf1_ecx, 12), "FMA"},
                      {has(cpu.leaf1_ecx, 29), "F16C"},
                      {saves(kYmm), "256-bit registers"}});
    case CpuIsa::kAvx512:
      return missing({{has(cpu.leaf7_ebx, 16), "AVX512F"},
                      {has(cpu.leaf7_ebx, 17), "AVX512DQ"},
                      {has(cpu.leaf7_ebx, 30), "AVX512BW"},
                      {has(cpu.leaf7_ebx, 31), "AVX512VL"},
                      {saves(kZmm), "512-bit registers"}});
    case CpuIsa::kAvx512Bf16: return missing({{has(cpu.leaf7_1_eax, 5), "AVX512_BF16"}});
    case CpuIsa::kAmxBf16:
      return missing({{has(cpu.leaf7_edx, 24), "AMX-TILE"},
                      {has(cpu.leaf7_edx, 22), "AMX-BF16"},
                      {saves(kTiles), "tile registers"}});
  }
  return "unknown";
}

constexpr CpuIsa kAllIsas[] = {CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512,
                               CpuIsa::kAvx512Bf16, CpuIsa::kAmxBf16};

}  // namespace

CpuFeatures read_cpu_features() {
  CpuFeatures out;
#if defined(__x86_64__)
  struct Leaf {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  };
  const auto cpuid = [](unsigned leaf, unsigned subleaf) {
    Leaf words;
    if (__get_cpuid_count(leaf, subleaf, &words.eax, &words.ebx, &words.ecx, &words.edx) == 0) {
      return Leaf{};
    }
    return words;
  };
  out.is_x86 = true;
  out.leaf1_ecx = cpuid(1, 0).ecx;
  out.leaf7_ebx = cpuid(7, 0).ebx;
  out.leaf7_edx = cpuid(7, 0).edx;
  out.leaf7_1_eax = cpuid(7, 1).eax;
  if ((out.leaf1_ecx & bit_OSXSAVE) != 0) {
    unsigned high = 0;
    asm volatile("xgetbv" : "=a"(out.saved_state), "=d"(high) : "c"(0));
  }
#endif
  return out;
}

bool ask_for_tiles() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

IsaTable::IsaTable(const CpuFeatures& features, const std::function<bool()>& grant_tiles, Say say)
    : say_(std::move(say)) {
  std::string below;  // each set needs all before it
  for (const CpuIsa isa : kAllIsas) {
    std::string reason = find_reason(isa, features);
    if (reason.empty()) reason = below;
    if (reason.empty() && isa == CpuIsa::kAmxBf16 && !grant_tiles()) {
      tiles_refused_ = true;
      reason = "the system does not grant AMX tiles";
    }
    statuses_.push_back({isa, reason});
    if (below.empty()) below = reason;
  }
}

CpuIsa IsaTable::resolve(CpuIsa isa) {
  const std::string& reason = statuses_[static_cast<std::size_t>(isa)].reason;
  if (reason.empty()) return isa;
  if (isa == CpuIsa::kAmxBf16 && tiles_refused_) {
    if (!said_.test_and_set()) say_(fmt::format("amx_bf16: {}; using avx512_bf16", reason));
    return CpuIsa::kAvx512Bf16;
  }
  fail(ErrorCode::kUnsupported, "instruction set {}: {}", to_string(isa), reason);
}

CpuIsa IsaTable::choose(const char* name) {
  if (name != nullptr && *name != '\0') {
    const std::optional<CpuIsa> isa = parse_cpu_isa(name);
    require(isa.has_value(),
            "SWITCHYARD_ISA={}, want portable, avx2, avx512, avx512_bf16 or amx_bf16", name);
    return resolve(*isa);
  }
  if (tiles_refused_) return resolve(CpuIsa::kAmxBf16);
  CpuIsa best = CpuIsa::kPortable;
  for (const CpuIsaStatus& status : statuses_) {
    if (status.reason.empty()) best = status.isa;
  }
  return best;
}

}  // namespace switchyard::cpu

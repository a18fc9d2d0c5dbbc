// Which instruction sets this CPU and this system have. Decided by CPUID and XCR0 bits, never by
// the model's name.
#include "switchyard/cpu_isa.hpp"

#include <fmt/core.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "core/check.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace switchyard {
namespace {

constexpr std::array kAllIsas = {CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512,
                                 CpuIsa::kAvx512Bf16, CpuIsa::kAmxBf16};
constexpr const char* kNoAmxPermission = "the system does not grant AMX tiles";

#if defined(__x86_64__)
struct Leaf {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Leaf cpuid(unsigned leaf, unsigned subleaf) {
  Leaf out;
  if (__get_cpuid_count(leaf, subleaf, &out.eax, &out.ebx, &out.ecx, &out.edx) == 0) return {};
  return out;
}

/// The register state that the system saves (XCR0).
unsigned saved_state() {
  if ((cpuid(1, 0).ecx & bit_OSXSAVE) == 0) return 0;
  unsigned low = 0;
  unsigned high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

/// Linux gives tiles to a process that asks for them; threads started later inherit them.
bool ask_for_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

struct Feature {
  bool present;
  const char* name;
};

template <std::size_t kCount>
std::string missing(const std::array<Feature, kCount>& features) {
  std::string names;
  for (const Feature& feature : features) {
    if (!feature.present) names += fmt::format("{}{}", names.empty() ? "" : ", ", feature.name);
  }
  return names.empty() ? "" : "the CPU or the system lacks " + names;
}

std::string find_reason(CpuIsa isa) {
  constexpr unsigned kYmm = 0x6;
  constexpr unsigned kZmm = 0xe6;
  constexpr unsigned kTiles = 0x60000;
  const Leaf basic = cpuid(1, 0);
  const Leaf extended = cpuid(7, 0);
  const unsigned state = saved_state();
  const auto has = [](unsigned bits, int bit) { return ((bits >> bit) & 1U) != 0; };
  switch (isa) {
    case CpuIsa::kPortable: return "";
    case CpuIsa::kAvx2:
      return missing(std::array<Feature, 4>{{{has(extended.ebx, 5), "AVX2"},
                                             {has(basic.ecx, 12), "FMA"},
                                             {has(basic.ecx, 29), "F16C"},
                                             {(state & kYmm) == kYmm, "256-bit registers"}}});
    case CpuIsa::kAvx512:
      return missing(std::array<Feature, 5>{{{has(extended.ebx, 16), "AVX512F"},
                                             {has(extended.ebx, 17), "AVX512DQ"},
                                             {has(extended.ebx, 30), "AVX512BW"},
                                             {has(extended.ebx, 31), "AVX512VL"},
                                             {(state & kZmm) == kZmm, "512-bit registers"}}});
    case CpuIsa::kAvx512Bf16:
      return missing(std::array<Feature, 1>{{{has(cpuid(7, 1).eax, 5), "AVX512_BF16"}}});
    case CpuIsa::kAmxBf16: {
      const std::string lacks =
          missing(std::array<Feature, 3>{{{has(extended.edx, 24), "AMX-TILE"},
                                          {has(extended.edx, 22), "AMX-BF16"},
                                          {(state & kTiles) == kTiles, "tile registers"}}});
      if (!lacks.empty()) return lacks;
      return ask_for_tiles() ? "" : kNoAmxPermission;
    }
  }
  return "unknown";
}
#else
std::string find_reason(CpuIsa isa) { return isa == CpuIsa::kPortable ? "" : "it is for x86-64"; }
#endif

const std::vector<CpuIsaStatus>& statuses() {
  static const std::vector<CpuIsaStatus> all = [] {
    std::vector<CpuIsaStatus> list;
    std::string below;  // each set needs all before it
    for (const CpuIsa isa : kAllIsas) {
      const std::string reason = find_reason(isa);
      list.push_back({isa, !reason.empty() ? reason : below});
      if (below.empty() && !reason.empty()) below = reason;
    }
    return list;
  }();
  return all;
}

const CpuIsaStatus& status(CpuIsa isa) { return statuses()[static_cast<std::size_t>(isa)]; }

/// What is used if `isa` is asked for.
CpuIsa resolve(CpuIsa isa) {
  const CpuIsaStatus& wanted = status(isa);
  if (wanted.reason.empty()) return isa;
  if (isa == CpuIsa::kAmxBf16 && wanted.reason == kNoAmxPermission) {
    static std::atomic_flag told = ATOMIC_FLAG_INIT;
    if (!told.test_and_set()) {
      fmt::print(stderr, "switchyard: amx_bf16: {}; using avx512_bf16\n", wanted.reason);
    }
    return CpuIsa::kAvx512Bf16;
  }
  fail(ErrorCode::kUnsupported, "instruction set {}: {}", to_string(isa), wanted.reason);
}

std::atomic<int> forced{-1};

CpuIsa choose() {
  if (const char* name = std::getenv("SWITCHYARD_ISA"); name != nullptr && *name != '\0') {
    const std::optional<CpuIsa> isa = parse_cpu_isa(name);
    require(isa.has_value(),
            "SWITCHYARD_ISA={}, want portable, avx2, avx512, avx512_bf16 or amx_bf16", name);
    return resolve(*isa);
  }
  if (status(CpuIsa::kAmxBf16).reason == kNoAmxPermission) return resolve(CpuIsa::kAmxBf16);
  return available_isas().back();
}

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
  for (const CpuIsa isa : kAllIsas) {
    if (name == to_string(isa)) return isa;
  }
  return std::nullopt;
}

std::vector<CpuIsaStatus> cpu_isas() { return statuses(); }

std::vector<CpuIsa> available_isas() {
  std::vector<CpuIsa> list;
  for (const CpuIsaStatus& entry : statuses()) {
    if (entry.reason.empty()) list.push_back(entry.isa);
  }
  return list;
}

CpuIsa isa_in_use() {
  const int isa = forced.load();
  return isa >= 0 ? static_cast<CpuIsa>(isa) : choose();
}

void force_isa(std::optional<CpuIsa> isa) {
  forced.store(isa ? static_cast<int>(resolve(*isa)) : -1);
}

}  // namespace switchyard

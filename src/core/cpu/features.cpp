// Which instruction sets a CPU and a system have: decided by CPUID and XCR0 bits, never by the
// model's name. Which of them is used: by what it reaches (dots.cpp).
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
  const Leaf name = cpuid(0, 0);
  if (name.ebx == signature_INTEL_ebx && name.ecx == signature_INTEL_ecx) {
    out.vendor = CpuVendor::kIntel;
  } else if (name.ebx == signature_AMD_ebx && name.ecx == signature_AMD_ecx) {
    out.vendor = CpuVendor::kAmd;
  }
  const unsigned version = cpuid(1, 0).eax;
  out.family = (version >> 8) & 0xf;
  out.model = (version >> 4) & 0xf;
  if (out.family == 6 || out.family == 0xf) out.model += (version >> 12) & 0xf0;
  if (out.family == 0xf) out.family += (version >> 20) & 0xff;
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

CpuVendor cpu_vendor() {
  static const CpuVendor vendor = read_cpu_features().vendor;
  return vendor;
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

IsaTable::IsaTable(const CpuFeatures& features, const std::function<bool()>& grant_tiles, Say say,
                   MeasureDots measure)
    : say_(std::move(say)), features_(features), measure_(std::move(measure)) {
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

void IsaTable::tell_of_tiles(CpuIsa instead) {
  if (said_.test_and_set()) return;
  say_(fmt::format("amx_bf16: {}; using {}", statuses_.back().reason, to_string(instead)));
}

CpuIsa IsaTable::resolve(CpuIsa isa) {
  const std::string& reason = statuses_[static_cast<std::size_t>(isa)].reason;
  if (reason.empty()) return isa;
  if (isa == CpuIsa::kAmxBf16 && tiles_refused_) {
    const CpuIsa instead = best().isa;
    tell_of_tiles(instead);
    return instead;
  }
  fail(ErrorCode::kUnsupported, "instruction set {}: {}", to_string(isa), reason);
}

const CpuIsaChoice& IsaTable::best() {
  const std::lock_guard lock(mutex_);
  if (best_) return *best_;
  CpuIsaChoice best{.isa = CpuIsa::kPortable, .why = "the best there is"};
  for (const CpuIsaStatus& status : statuses_) {
    if (status.reason.empty()) best.isa = status.isa;
  }
  if (best.isa == CpuIsa::kAvx512Bf16) best = choose_dots(features_, measure_);
  return best_.emplace(std::move(best));
}

CpuIsaChoice IsaTable::choose(const char* name) {
  if (name != nullptr && *name != '\0') {
    const std::optional<CpuIsa> isa = parse_cpu_isa(name);
    require(isa.has_value(),
            "SWITCHYARD_ISA={}, want portable, avx2, avx512, avx512_bf16 or amx_bf16", name);
    return {.isa = resolve(*isa), .why = fmt::format("SWITCHYARD_ISA={}", name), .forced = true};
  }
  const CpuIsaChoice& chosen = best();
  if (tiles_refused_) tell_of_tiles(chosen.isa);
  return chosen;
}

}  // namespace switchyard::cpu

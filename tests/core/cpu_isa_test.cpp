// The choice of an instruction set, on this machine and on machines that are made up.
#include "switchyard/cpu_isa.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <thread>

#include "core/cpu/features.hpp"
#include "testkit/expect_error.hpp"

namespace switchyard {
namespace {

using test::message_of;

/// A CPU with all of AVX-512, its bf16 products, and AMX; the system saves all registers.
constexpr cpu::CpuFeatures kWithTiles = {
    .is_x86 = true,
    .leaf1_ecx = 1U << 12 | 1U << 27 | 1U << 29,
    .leaf7_ebx = 1U << 5 | 1U << 16 | 1U << 17 | 1U << 30 | 1U << 31,
    .leaf7_edx = 1U << 22 | 1U << 24,
    .leaf7_1_eax = 1U << 5,
    .saved_state = 0x600e6};

/// A table for some CPU, and what it told and asked.
struct Machine {
  std::vector<std::string> told;
  int asked = 0;
  int measured = 0;
  cpu::IsaTable isas;

  Machine(const cpu::CpuFeatures& features, bool grants_tiles,
          cpu::DotPeaks peaks = {.fma = 1, .dots = 2})
      : isas(
            features,
            [this, grants_tiles] {
              ++asked;
              return grants_tiles;
            },
            [this](const std::string& notice) { told.push_back(notice); },
            [this, peaks] {
              ++measured;
              return peaks;
            }) {}
};

/// One with bf16 dot products and without tiles.
cpu::CpuFeatures with_dots(cpu::CpuVendor vendor, unsigned family, unsigned model) {
  cpu::CpuFeatures features = kWithTiles;
  features.leaf7_edx = 0;
  features.vendor = vendor;
  features.family = family;
  features.model = model;
  return features;
}

TEST(CpuIsa, EveryNameIsReadBack) {
  for (const CpuIsaStatus& status : cpu_isas()) {
    EXPECT_EQ(parse_cpu_isa(to_string(status.isa)), status.isa);
  }
  EXPECT_EQ(parse_cpu_isa("sse9"), std::nullopt);
}

TEST(CpuIsa, AnInstructionSetThatTheCpuLacksIsRefusedWithTheReason) {
  for (const CpuIsaStatus& status : cpu_isas()) {
    if (status.reason.empty()) {
      force_isa(status.isa);
      EXPECT_EQ(isa_in_use(), status.isa);
    } else {
      const std::string message = message_of([&] { force_isa(status.isa); });
      EXPECT_EQ(message, "unsupported: instruction set " + std::string(to_string(status.isa)) +
                             ": " + status.reason);
    }
  }
  force_isa(std::nullopt);
}

TEST(CpuIsa, TheEnvironmentForcesAnInstructionSetByNameAndIsRefusedLikeACall) {
  const char* before = std::getenv("SWITCHYARD_ISA");
  const std::string kept = before == nullptr ? "" : before;
  for (const CpuIsaStatus& status : cpu_isas()) {
    ASSERT_EQ(setenv("SWITCHYARD_ISA", to_string(status.isa), 1), 0);
    if (status.reason.empty()) {
      EXPECT_EQ(isa_in_use(), status.isa);
    } else {
      EXPECT_NE(message_of([] { (void)isa_in_use(); }).find(status.reason), std::string::npos);
    }
  }
  ASSERT_EQ(setenv("SWITCHYARD_ISA", "mmx", 1), 0);
  EXPECT_EQ(message_of([] { (void)isa_in_use(); }),
            "invalid argument: SWITCHYARD_ISA=mmx, want portable, avx2, avx512, avx512_bf16 or "
            "amx_bf16");
  ASSERT_EQ(kept.empty() ? unsetenv("SWITCHYARD_ISA") : setenv("SWITCHYARD_ISA", kept.c_str(), 1),
            0);
}

TEST(CpuIsa, ACpuWithTilesThatAreGrantedUsesThemAndSaysNothing) {
  Machine machine(kWithTiles, true);
  EXPECT_EQ(machine.isas.choose(nullptr).isa, CpuIsa::kAmxBf16);
  EXPECT_EQ(machine.isas.choose("avx2").isa, CpuIsa::kAvx2);
  EXPECT_EQ(machine.asked, 1);
  EXPECT_TRUE(machine.told.empty());
}

TEST(CpuIsa, RefusedTilesFallBackToAvx512Bf16AndThatIsSaidOnce) {
  Machine machine(kWithTiles, false);
  EXPECT_TRUE(machine.told.empty()) << "said before anybody chose";
  EXPECT_EQ(machine.isas.choose(nullptr).isa, CpuIsa::kAvx512Bf16);
  EXPECT_EQ(machine.isas.choose("amx_bf16").isa, CpuIsa::kAvx512Bf16);
  EXPECT_EQ(machine.isas.resolve(CpuIsa::kAmxBf16), CpuIsa::kAvx512Bf16);
  std::thread([&] { EXPECT_EQ(machine.isas.choose("").isa, CpuIsa::kAvx512Bf16); }).join();
  EXPECT_EQ(machine.told, (std::vector<std::string>{"amx_bf16: the system does not grant AMX "
                                                    "tiles; using avx512_bf16"}));
  EXPECT_EQ(machine.asked, 1);
  EXPECT_EQ(machine.isas.statuses().back().reason, "the system does not grant AMX tiles");
}

TEST(CpuIsa, ChoosingALowerInstructionSetSaysNothingOfRefusedTiles) {
  Machine machine(kWithTiles, false);
  EXPECT_EQ(machine.isas.choose("avx512").isa, CpuIsa::kAvx512);
  EXPECT_TRUE(machine.told.empty());
}

TEST(CpuIsa, TilesAreNotAskedForWhereAnythingElseIsMissing) {
  cpu::CpuFeatures features = kWithTiles;
  features.leaf7_1_eax = 0;  // no bf16 products
  Machine machine(features, false);
  EXPECT_EQ(machine.asked, 0);
  EXPECT_EQ(machine.isas.choose(nullptr).isa, CpuIsa::kAvx512);
  EXPECT_EQ(message_of([&] { (void)machine.isas.choose("amx_bf16"); }),
            "unsupported: instruction set amx_bf16: the CPU or the system lacks AVX512_BF16");
}

TEST(CpuIsa, RegistersThatTheSystemDoesNotSaveAreAsGoodAsMissing) {
  cpu::CpuFeatures features = kWithTiles;
  features.saved_state = 0x6;  // an old kernel: no 512-bit registers
  Machine machine(features, true);
  EXPECT_EQ(machine.isas.choose(nullptr).isa, CpuIsa::kAvx2);
  EXPECT_EQ(machine.isas.statuses()[2].reason, "the CPU or the system lacks 512-bit registers");
}

TEST(CpuIsa, DotProductsOfAnUnknownCpuAreTakenByTheirMeasuredPeak) {
  struct Case {
    cpu::DotPeaks peaks;
    CpuIsa want;
  };
  // The rates are whole multiples of each other; noise of a third either way changes no choice.
  for (const Case& one : {Case{{.fma = 355, .dots = 174}, CpuIsa::kAvx512},
                          Case{{.fma = 355, .dots = 230}, CpuIsa::kAvx512},
                          Case{{.fma = 270, .dots = 174}, CpuIsa::kAvx512},
                          Case{{.fma = 117, .dots = 117}, CpuIsa::kAvx512Bf16},
                          Case{{.fma = 150, .dots = 117}, CpuIsa::kAvx512Bf16},
                          Case{{.fma = 117, .dots = 235}, CpuIsa::kAvx512Bf16}}) {
    Machine machine(with_dots(cpu::CpuVendor::kOther, 1, 1), false, one.peaks);
    EXPECT_EQ(machine.isas.choose(nullptr).isa, one.want) << one.peaks.fma << one.peaks.dots;
    EXPECT_NE(machine.isas.choose(nullptr).why.find("measured"), std::string::npos);
    EXPECT_FALSE(machine.isas.choose(nullptr).forced);
    EXPECT_EQ(machine.measured, 1) << "once for all choices";
  }
}

TEST(CpuIsa, KnownCpusAreNotMeasured) {
  Machine zen4(with_dots(cpu::CpuVendor::kAmd, 0x19, 0x11), false, {.fma = 2, .dots = 1});
  EXPECT_EQ(zen4.isas.choose(nullptr).isa, CpuIsa::kAvx512Bf16);
  Machine sapphire_rapids(with_dots(cpu::CpuVendor::kIntel, 6, 0x8f), false, {.fma = 1, .dots = 2});
  EXPECT_EQ(sapphire_rapids.isas.choose(nullptr).isa, CpuIsa::kAvx512);
  EXPECT_NE(sapphire_rapids.isas.choose(nullptr).why.find("Sapphire Rapids"), std::string::npos);
  EXPECT_EQ(zen4.measured + sapphire_rapids.measured, 0);
}

TEST(CpuIsa, SlowDotProductsAreStillTakenByName) {
  Machine machine(with_dots(cpu::CpuVendor::kIntel, 6, 0x8f), false);
  const CpuIsaChoice choice = machine.isas.choose("avx512_bf16");
  EXPECT_EQ(choice.isa, CpuIsa::kAvx512Bf16);
  EXPECT_EQ(choice.why, "SWITCHYARD_ISA=avx512_bf16");
  EXPECT_TRUE(choice.forced);
  EXPECT_EQ(machine.isas.resolve(CpuIsa::kAvx512Bf16), CpuIsa::kAvx512Bf16);
}

TEST(CpuIsa, TilesAreTakenWithoutMeasuringAndWhereRefusedWhatReachesMostTakesTheirPlace) {
  Machine granted(kWithTiles, true);
  EXPECT_EQ(granted.isas.choose(nullptr).isa, CpuIsa::kAmxBf16);
  EXPECT_EQ(granted.measured, 0);
  Machine refused(kWithTiles, false, {.fma = 2, .dots = 1});
  EXPECT_EQ(refused.isas.resolve(CpuIsa::kAmxBf16), CpuIsa::kAvx512);
  EXPECT_EQ(refused.isas.choose(nullptr).isa, CpuIsa::kAvx512);
  EXPECT_EQ(refused.told, (std::vector<std::string>{"amx_bf16: the system does not grant AMX "
                                                    "tiles; using avx512"}));
}

TEST(CpuIsa, AnotherArchitectureHasThePortableKernelsOnly) {
  Machine machine({}, true);
  EXPECT_EQ(machine.isas.choose(nullptr).isa, CpuIsa::kPortable);
  EXPECT_EQ(message_of([&] { (void)machine.isas.resolve(CpuIsa::kAvx2); }),
            "unsupported: instruction set avx2: it is for x86-64");
}

}  // namespace
}  // namespace switchyard

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
  cpu::IsaTable isas;

  Machine(const cpu::CpuFeatures& features, bool grants_tiles)
      : isas(
            features,
            [this, grants_tiles] {
              ++asked;
              return grants_tiles;
            },
            [this](const std::string& notice) { told.push_back(notice); }) {}
};

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
  EXPECT_EQ(machine.isas.choose(nullptr), CpuIsa::kAmxBf16);
  EXPECT_EQ(machine.isas.choose("avx2"), CpuIsa::kAvx2);
  EXPECT_EQ(machine.asked, 1);
  EXPECT_TRUE(machine.told.empty());
}

TEST(CpuIsa, RefusedTilesFallBackToAvx512Bf16AndThatIsSaidOnce) {
  Machine machine(kWithTiles, false);
  EXPECT_TRUE(machine.told.empty()) << "said before anybody chose";
  EXPECT_EQ(machine.isas.choose(nullptr), CpuIsa::kAvx512Bf16);
  EXPECT_EQ(machine.isas.choose("amx_bf16"), CpuIsa::kAvx512Bf16);
  EXPECT_EQ(machine.isas.resolve(CpuIsa::kAmxBf16), CpuIsa::kAvx512Bf16);
  std::thread([&] { EXPECT_EQ(machine.isas.choose(""), CpuIsa::kAvx512Bf16); }).join();
  EXPECT_EQ(machine.told, (std::vector<std::string>{"amx_bf16: the system does not grant AMX "
                                                    "tiles; using avx512_bf16"}));
  EXPECT_EQ(machine.asked, 1);
  EXPECT_EQ(machine.isas.statuses().back().reason, "the system does not grant AMX tiles");
}

TEST(CpuIsa, ChoosingALowerInstructionSetSaysNothingOfRefusedTiles) {
  Machine machine(kWithTiles, false);
  EXPECT_EQ(machine.isas.choose("avx512"), CpuIsa::kAvx512);
  EXPECT_TRUE(machine.told.empty());
}

TEST(CpuIsa, TilesAreNotAskedForWhereAnythingElseIsMissing) {
  cpu::CpuFeatures features = kWithTiles;
  features.leaf7_1_eax = 0;  // no bf16 products
  Machine machine(features, false);
  EXPECT_EQ(machine.asked, 0);
  EXPECT_EQ(machine.isas.choose(nullptr), CpuIsa::kAvx512);
  EXPECT_EQ(message_of([&] { (void)machine.isas.choose("amx_bf16"); }),
            "unsupported: instruction set amx_bf16: the CPU or the system lacks AVX512_BF16");
}

TEST(CpuIsa, RegistersThatTheSystemDoesNotSaveAreAsGoodAsMissing) {
  cpu::CpuFeatures features = kWithTiles;
  features.saved_state = 0x6;  // an old kernel: no 512-bit registers
  Machine machine(features, true);
  EXPECT_EQ(machine.isas.choose(nullptr), CpuIsa::kAvx2);
  EXPECT_EQ(machine.isas.statuses()[2].reason, "the CPU or the system lacks 512-bit registers");
}

TEST(CpuIsa, AnotherArchitectureHasThePortableKernelsOnly) {
  Machine machine({}, true);
  EXPECT_EQ(machine.isas.choose(nullptr), CpuIsa::kPortable);
  EXPECT_EQ(message_of([&] { (void)machine.isas.resolve(CpuIsa::kAvx2); }),
            "unsupported: instruction set avx2: it is for x86-64");
}

}  // namespace
}  // namespace switchyard

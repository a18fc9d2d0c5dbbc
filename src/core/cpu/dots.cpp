// Whether bf16 dot products reach more than products of floats: twice as much on one CPU, half on
// another.
#include <fmt/core.h>

#include "core/cpu/features.hpp"

namespace switchyard::cpu {
namespace {

/// What was measured of a range of models. Others are measured where they run.
struct Known {
  CpuVendor vendor;
  unsigned family;
  unsigned first_model, last_model;
  CpuIsa isa;
  const char* why;
};

constexpr Known kKnown[] = {
    {CpuVendor::kAmd, 0x19, 0x00, 0xff, CpuIsa::kAvx512Bf16,
     "the best there is: on Zen 4 bf16 dot products reach twice avx512's peak"},
    {CpuVendor::kIntel, 6, 0x8f, 0x8f, CpuIsa::kAvx512,
     "on Sapphire Rapids the dot products of avx512_bf16 reach half of its peak"},
};

}  // namespace

CpuIsaChoice choose_dots(const CpuFeatures& cpu, const MeasureDots& measure) {
  for (const Known& known : kKnown) {
    if (cpu.vendor == known.vendor && cpu.family == known.family &&
        cpu.model >= known.first_model && cpu.model <= known.last_model) {
      return {.isa = known.isa, .why = known.why};
    }
  }
  constexpr double kClearly = 1.41421356;
  const DotPeaks peaks = measure();
  const bool slow = peaks.fma > kClearly * peaks.dots;
  // No figures: they differ from run to run, and the choice does not.
  return {.isa = slow ? CpuIsa::kAvx512 : CpuIsa::kAvx512Bf16,
          .why = slow ? "as measured here, the dot products of avx512_bf16 reach less than its peak"
                      : "the best there is: measured here, its dot products are not slower"};
}

}  // namespace switchyard::cpu

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace switchyard {

/// The instruction sets that the CPU kernels are written for, each one using all before it.
enum class CpuIsa : std::uint8_t {
  kPortable,    ///< Plain C++.
  kAvx2,        ///< AVX2, FMA, F16C.
  kAvx512,      ///< AVX-512 F, BW, DQ, VL.
  kAvx512Bf16,  ///< And its bf16 dot products.
  kAmxBf16,     ///< And bf16 tiles, once the operating system has granted them.
};

/// "portable", "avx2", "avx512", "avx512_bf16", "amx_bf16".
[[nodiscard]] const char* to_string(CpuIsa isa) noexcept;

/// The instruction set of that name, or nothing.
[[nodiscard]] std::optional<CpuIsa> parse_cpu_isa(std::string_view name) noexcept;

/// Whether one instruction set can be used here, and why not.
struct CpuIsaStatus {
  CpuIsa isa = CpuIsa::kPortable;
  std::string reason{};  ///< Empty: it can; else what the CPU, the system or the build lacks.
};

/// All instruction sets in ascending order.
[[nodiscard]] std::vector<CpuIsaStatus> cpu_isas();

/// Those that can be used here, in ascending order.
[[nodiscard]] std::vector<CpuIsa> available_isas();

/// An instruction set, and why it is the one in use, in a few words.
struct CpuIsaChoice {
  CpuIsa isa = CpuIsa::kPortable;
  std::string why{};
  bool forced = false;  ///< By a call or by the environment, not chosen.
};

/// What weights that are loaded from now on are packed for, and computed with (where a type has no
/// kernels of its own for it, with those of the next lower one): the one that was forced, by
/// force_isa() or by the environment variable SWITCHYARD_ISA; else the last one available, but
/// avx512 where bf16 dot products are slower than the products of floats. That is known of the
/// CPU's model, or measured once in a process's life, in less than a millisecond; numbers of tokens
/// or rows have no part in it.
/// @throws Error{kInvalidArgument}: SWITCHYARD_ISA is not a name. {kUnsupported}: it cannot be used
///         here, with the reason. If only the system's permission for AMX tiles is missing, the
///         next lower one is used and one line on stderr says so, once.
[[nodiscard]] CpuIsaChoice isa_choice();

/// The same without the reason.
[[nodiscard]] CpuIsa isa_in_use();

/// Force an instruction set for the weights loaded from now on; nothing: choose again. Not to be
/// called while another thread loads.
/// @throws Error{kUnsupported} with the reason.
void force_isa(std::optional<CpuIsa> isa);

}  // namespace switchyard

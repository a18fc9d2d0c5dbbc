#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string_view>

#include "switchyard/backward.hpp"
#include "switchyard/checkpoint.hpp"
#include "switchyard/comm.hpp"
#include "switchyard/cpu_isa.hpp"
#include "switchyard/device_dispatch.hpp"
#include "switchyard/execution.hpp"
#include "switchyard/experts.hpp"
#include "switchyard/plan.hpp"
#include "switchyard/route.hpp"
#include "switchyard/tensor.hpp"
#include "switchyard/thread_pool.hpp"
#include "switchyard/weight_format.hpp"

namespace switchyard {

// The words for enumerators, each in one spelling: on the command line, in results and errors, and
// in C and Python. Of DType, Activation, Backend, DeviceEngine, WeightFormat, Recompute,
// BalanceShare, LossScope, PerftKind, CpuIsa and ThreadRuntime to_string() stands beside the type.

[[nodiscard]] const char* to_string(Score score) noexcept;
[[nodiscard]] const char* to_string(GroupScore score) noexcept;
[[nodiscard]] const char* to_string(LayoutKind kind) noexcept;
[[nodiscard]] const char* to_string(DropPolicy policy) noexcept;
[[nodiscard]] const char* to_string(ExchangeMode mode) noexcept;

/// The words of all enumerators of one of the types above; that of value i is the i-th.
template <typename Enum>
[[nodiscard]] std::span<const char* const> names_of() noexcept;

/// The enumerator of that name, or nothing.
template <typename Enum>
[[nodiscard]] std::optional<Enum> parse(std::string_view name) noexcept {
  const std::span<const char* const> names = names_of<Enum>();
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (name == names[i]) return static_cast<Enum>(i);
  }
  return std::nullopt;
}

}  // namespace switchyard

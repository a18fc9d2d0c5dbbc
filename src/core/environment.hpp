#pragma once

// The environment variables that Switchyard reads: one table, and the only way to their values.
// (What launchers tell a process of its rank is src/comm/ranks/launch.cpp's.)

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace switchyard {

enum class Variable : std::uint8_t {
  kIsa,
  kThreadRuntime,
  kRoofs,
  kNcclLibrary,
  kVerbose,
  kLibrary,
  kVariant,
  kCommit
};

struct VariableSpec {
  Variable variable;
  const char* name;
  const char* without;  ///< What happens where it is not set.
  const char* meaning;
};

[[nodiscard]] std::span<const VariableSpec> environment_table();

/// The value; null where it is not set.
[[nodiscard]] const char* value_of(Variable variable);

/// Names of the environment that begin as ours do and are in no table; those of the project's own
/// tests (SWITCHYARD_TEST_...) are known.
[[nodiscard]] std::vector<std::string> unknown_variables();

namespace verbose {
extern std::atomic<bool> on;
}  // namespace verbose

/// Whether every call of a stage says on stderr what runs it: SWITCHYARD_VERBOSE when the program
/// began, or set_verbose().
[[nodiscard]] inline bool is_verbose() { return verbose::on.load(std::memory_order_relaxed); }
inline void set_verbose(bool on) { verbose::on.store(on, std::memory_order_relaxed); }

}  // namespace switchyard

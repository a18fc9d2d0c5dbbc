#pragma once

#include <fmt/core.h>

#include <optional>
#include <span>
#include <string>

#include "core/check.hpp"
#include "core/environment.hpp"
#include "switchyard/execution.hpp"

namespace switchyard {

/// One way to run a stage. `reject` says why it cannot run these arguments, or nothing if it can.
template <typename Args>
struct Implementation {
  const char* name;  ///< "backend.technique", as the tool and the errors print it.
  std::optional<std::string> (*reject)(const Args&);
  void (*run)(const Args&);
  /// Which of its kernels run() takes for these arguments, where sizes decide among several; null:
  /// there is one. Asked only where is_verbose().
  std::string (*variant)(const Args&) = nullptr;
};

/// "name", or "name (variant)".
template <typename Args>
std::string full_name(const Implementation<Args>& implementation, const Args& args) {
  if (implementation.variant == nullptr) return implementation.name;
  return fmt::format("{} ({})", implementation.name, implementation.variant(args));
}

/// In order of preference.
template <typename Args>
using Implementations = std::span<const Implementation<Args>* const>;

/// One line on stderr: "switchyard: <stage> of <sizes>: <chosen>; not <others>".
void print_choice(const char* stage, const std::string& sizes, const char* chosen,
                  const std::string& others);

/// "name: reason" of all but `chosen`; those behind it may have none but their place.
template <typename Args>
std::string reasons_of_others(Implementations<Args> list, const Args& args,
                              const Implementation<Args>* chosen) {
  std::string reasons;
  for (const Implementation<Args>* other : list) {
    if (other == chosen) continue;
    reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", other->name,
                           other->reject(args).value_or("comes later in the order"));
  }
  return reasons;
}

/// The first of `list` that accepts `args`, or null. The recorder of the call is told, and stderr
/// where is_verbose().
/// @param sizes  Returns what the line on stderr says of `args`; asked only then.
template <typename Args>
const Implementation<Args>* find(const char* stage, Implementations<Args> list, const Args& args,
                                 std::string (*sizes)(const Args&)) {
  const Implementation<Args>* chosen = nullptr;
  for (const Implementation<Args>* candidate : list) {
    if (candidate->reject(args)) continue;
    chosen = candidate;
    break;
  }
  if (chosen != nullptr && args.execution.recorder != nullptr) {
    args.execution.recorder->chose(stage, chosen->name);
  }
  if (is_verbose()) {
    const std::string name = chosen == nullptr ? "none" : full_name(*chosen, args);
    print_choice(stage, sizes(args), name.c_str(), reasons_of_others(list, args, chosen));
  }
  return chosen;
}

/// For what was chosen once, when an object was made: tells the recorder of a call, and stderr
/// where is_verbose(), that `implementation` runs it.
template <typename Sizes>
void tell_choice(const Execution& execution, const char* call, const char* implementation,
                 const Sizes& sizes) {
  if (execution.recorder != nullptr) execution.recorder->chose(call, implementation);
  if (is_verbose()) print_choice(call, sizes(), implementation, "");
}

/// As find(), where one must.
/// @throws Error{kUnsupported} with a "name: reason" for each entry if none does.
template <typename Args>
const Implementation<Args>& select(const char* stage, Implementations<Args> list, const Args& args,
                                   std::string (*sizes)(const Args&)) {
  const Implementation<Args>* const chosen = find<Args>(stage, list, args, sizes);
  if (chosen != nullptr) return *chosen;
  fail(ErrorCode::kUnsupported, "no implementation of {} accepts this ({})", stage,
       reasons_of_others<Args>(list, args, nullptr));
}

}  // namespace switchyard

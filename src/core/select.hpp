#pragma once

#include <fmt/core.h>

#include <optional>
#include <span>
#include <string>

#include "core/check.hpp"

namespace switchyard {

/// One way to run a stage. `reject` says why it cannot run these arguments, or nothing if it can.
template <typename Args>
struct Implementation {
  const char* name;  ///< "backend.technique", as the tool and the errors print it.
  std::optional<std::string> (*reject)(const Args&);
  void (*run)(const Args&);
};

/// The first of `list` that accepts `args`: the order of the list is the preference.
/// @throws Error{kUnsupported} with a "name: reason" for each entry if none does.
template <typename Args>
const Implementation<Args>& select(const char* stage,
                                   std::span<const Implementation<Args>* const> list,
                                   const Args& args) {
  std::string reasons;
  for (const Implementation<Args>* candidate : list) {
    const std::optional<std::string> reason = candidate->reject(args);
    if (!reason) return *candidate;
    reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", candidate->name, *reason);
  }
  fail(ErrorCode::kUnsupported, "no implementation of {} accepts this ({})", stage, reasons);
}

}  // namespace switchyard

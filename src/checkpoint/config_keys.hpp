#pragma once

#include <span>
#include <string_view>

namespace switchyard {

/// All names under which released configurations say what `key` says, itself among them; none where
/// it has no other name.
[[nodiscard]] std::span<const std::string_view> spellings_of(std::string_view key);

}  // namespace switchyard

#pragma once

// The words of the command line and what they mean in the library's types.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/layer.hpp"

namespace switchyard::tool {

/// The parts between separators; one empty part for an empty text.
[[nodiscard]] std::vector<std::string_view> split(std::string_view text, char separator);

/// A finite decimal number, the whole word.
[[nodiscard]] std::optional<double> parse_real(std::string_view word);

/// Whether `word` is one of `words` = "a|b:N|c:S|d:F|N": N stands for a whole number from 1 to
/// 2^20, S for a finite number >= 0, F for one in [0, 1].
[[nodiscard]] bool matches_words(std::string_view word, std::string_view words);

// Of words that the table has accepted.
[[nodiscard]] DType dtype_of(std::string_view word);
[[nodiscard]] Layout layout_of(std::string_view word);
[[nodiscard]] DropPolicy drop_policy_of(std::string_view word);
[[nodiscard]] Activation activation_of(std::string_view word);

/// "1.25 ms", "3.1 GB/s", "42 kB": three digits and a unit.
[[nodiscard]] std::string human_time(double microseconds);
[[nodiscard]] std::string human_count(double value, std::string_view unit);

}  // namespace switchyard::tool

#pragma once

// The words of the command line and what they mean in the library's types.

#include <fmt/ranges.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/human.hpp"
#include "switchyard/names.hpp"
#include "switchyard/plan.hpp"
#include "switchyard/weight_format.hpp"

namespace switchyard::tool {

/// The parts between separators; one empty part for an empty text.
[[nodiscard]] std::vector<std::string_view> split(std::string_view text, char separator);

/// A finite decimal number, the whole word.
[[nodiscard]] std::optional<double> parse_real(std::string_view word);

/// The end of an error about a misspelt word: "; did you mean olmoe?", the nearest of `known` by
/// letters put in, left out and changed: about a third of the word's letters at most, never more
/// than three. Nothing where none is so near.
[[nodiscard]] std::string suggestion(std::string_view word,
                                     const std::vector<std::string_view>& known);

/// Whether `word` is one of `words` = "a|b:N|c:S|d:F|N": N stands for a whole number from 1 to
/// 2^20, S for a finite number >= 0, F for one in [0, 1].
[[nodiscard]] bool matches_words(std::string_view word, std::string_view words);

/// "a|b|c": the words of an enumeration as the table takes them.
template <typename Enum>
[[nodiscard]] std::string words_of() {
  return fmt::format("{}", fmt::join(names_of<Enum>(), "|"));
}

/// Of some enumerators, in their order.
template <typename Enum>
[[nodiscard]] std::string words_of(std::initializer_list<Enum> enumerators) {
  std::string words;
  for (const Enum enumerator : enumerators) {
    words.append(words.empty() ? "" : "|").append(to_string(enumerator));
  }
  return words;
}

/// Of the layouts: "aligned" has a number of rows.
[[nodiscard]] std::string layout_words();

// Of words that the table has accepted.
template <typename Enum>
[[nodiscard]] Enum enumerator_of(std::string_view word) {
  return parse<Enum>(word).value();
}
[[nodiscard]] Layout layout_of(std::string_view word);
/// "fp8" is kE4M3, "dequantised" what kExact makes of quantised weights.
[[nodiscard]] WeightFormat weights_of(std::string_view word);

}  // namespace switchyard::tool

// The words of the command line.
#include "tool/options/words.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cmath>

namespace switchyard::tool {
namespace {

std::optional<std::int32_t> small_count(std::string_view word) {
  std::int32_t value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc() || end != word.data() + word.size()) return std::nullopt;
  if (value < 1 || value > (1 << 20)) return std::nullopt;
  return value;
}

bool matches_number(std::string_view word, std::string_view kind) {
  if (kind == "N") return small_count(word).has_value();
  const std::optional<double> value = parse_real(word);
  return value && *value >= 0 && (kind == "S" || (kind == "F" && *value <= 1));
}

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0]++;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t changed = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({changed, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (;;) {
    const std::size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

std::optional<double> parse_real(std::string_view word) {
  double value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc() || end != word.data() + word.size() || !std::isfinite(value)) {
    return std::nullopt;
  }
  return value;
}

std::string suggestion(std::string_view word, const std::vector<std::string_view>& known) {
  std::string_view nearest;
  std::size_t best = std::clamp<std::size_t>((word.size() + 1) / 3, 1, 3) + 1;
  for (const std::string_view candidate : known) {
    const std::size_t distance = edit_distance(word, candidate);
    if (distance >= best) continue;
    best = distance;
    nearest = candidate;
  }
  return nearest.empty() ? "" : fmt::format("; did you mean {}?", nearest);
}

bool matches_words(std::string_view word, std::string_view words) {
  for (const std::string_view form : split(words, '|')) {
    if (form == "N") {
      if (matches_number(word, form)) return true;
      continue;
    }
    const std::size_t colon = form.find(':');
    if (colon == std::string_view::npos) {
      if (word == form) return true;
    } else if (word.substr(0, colon + 1) == form.substr(0, colon + 1) &&
               matches_number(word.substr(colon + 1), form.substr(colon + 1))) {
      return true;
    }
  }
  return false;
}

std::string layout_words() {
  std::string words = words_of<LayoutKind>();
  const std::string aligned = to_string(LayoutKind::kAligned);
  return words.insert(words.find(aligned) + aligned.size(), ":N");
}

WeightFormat weights_of(std::string_view word) {
  if (word == "fp8") return WeightFormat::kE4M3;
  if (word == "dequantised") return WeightFormat::kExact;
  return enumerator_of<WeightFormat>(word);
}

Layout layout_of(std::string_view word) {
  const std::size_t colon = word.find(':');
  Layout layout{.kind = enumerator_of<LayoutKind>(word.substr(0, colon))};
  if (colon != std::string_view::npos) {
    layout.alignment = small_count(word.substr(colon + 1)).value();
  }
  return layout;
}

}  // namespace switchyard::tool

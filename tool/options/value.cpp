// One word of the command line to one field of Options, and back.
#include <fmt/core.h>
#include <fmt/ranges.h>

#include <charconv>
#include <cmath>

#include "tool/options/options.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/options/words.hpp"

namespace switchyard::tool {
namespace {

std::string range_of(const OptionSpec& spec) {
  if (spec.max > 1e15) return fmt::format("at least {:.10g}", spec.min);
  return fmt::format("{:.10g} to {:.10g}", spec.min, spec.max);
}

std::int64_t whole_number(const OptionSpec& spec, std::string_view word) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  const bool whole = error == std::errc() && end == word.data() + word.size();
  if (!whole || static_cast<double>(value) < spec.min || static_cast<double>(value) > spec.max) {
    throw UsageError("{}: '{}' is not a whole number in range, want {}", spec.name, word,
                     range_of(spec));
  }
  return value;
}

double real_number(const OptionSpec& spec, std::string_view word) {
  const std::optional<double> value = parse_real(word);
  if (!value || !(*value >= spec.min && *value <= spec.max)) {
    throw UsageError("{}: '{}' is not a number in range, want {}", spec.name, word, range_of(spec));
  }
  return *value;
}

std::string text(const OptionSpec& spec, std::string_view word) {
  if (word.empty()) throw UsageError("{}: is empty, want {}", spec.name, spec.value);
  if (!spec.words.empty() && !matches_words(word, spec.words)) {
    std::vector<std::string_view> known;
    for (const std::string_view form : split(spec.words, '|')) {
      if (form != "N") known.push_back(form.substr(0, form.find(':')));
    }
    throw UsageError("{}: '{}' is unknown, want {}{}", spec.name, word, spec.words,
                     suggestion(word.substr(0, word.find(':')), known));
  }
  return std::string(word);
}

struct Setter {
  Options& options;
  const OptionSpec& spec;
  std::string_view word;

  void operator()(bool Options::*field) const { options.*field = true; }
  void operator()(std::int64_t Options::*field) const { options.*field = whole_number(spec, word); }
  void operator()(double Options::*field) const { options.*field = real_number(spec, word); }
  void operator()(std::string Options::*field) const { options.*field = text(spec, word); }
  void operator()(std::optional<std::int64_t> Options::*field) const {
    options.*field = whole_number(spec, word);
  }
  void operator()(std::optional<double> Options::*field) const {
    options.*field = real_number(spec, word);
  }
  void operator()(std::vector<std::string> Options::*field) const {
    if (takes_many_words(spec)) {  // names of files, which may have commas
      (options.*field).push_back(text(spec, word));
      return;
    }
    for (const std::string_view item : split(word, ',')) {
      (options.*field).push_back(text(spec, item));
    }
  }
  void operator()(std::vector<std::int64_t> Options::*field) const {
    for (const std::string_view item : split(word, ',')) {
      (options.*field).push_back(whole_number(spec, item));
    }
  }
};

struct Printer {
  const Options& options;

  std::string operator()(bool Options::*field) const { return options.*field ? "true" : ""; }
  std::string operator()(std::int64_t Options::*field) const {
    return std::to_string(options.*field);
  }
  std::string operator()(double Options::*field) const {
    return fmt::format("{:g}", options.*field);
  }
  std::string operator()(std::string Options::*field) const { return options.*field; }
  std::string operator()(std::optional<std::int64_t> Options::*field) const {
    return options.*field ? std::to_string(*(options.*field)) : "";
  }
  std::string operator()(std::optional<double> Options::*field) const {
    return options.*field ? fmt::format("{:g}", *(options.*field)) : "";
  }
  std::string operator()(std::vector<std::string> Options::*field) const {
    return fmt::format("{}", fmt::join(options.*field, ","));
  }
  std::string operator()(std::vector<std::int64_t> Options::*field) const {
    return fmt::format("{}", fmt::join(options.*field, ","));
  }
};

}  // namespace

void set_option(Options& options, const OptionSpec& spec, std::string_view word) {
  std::visit(Setter{options, spec, word}, spec.field);
}

std::string value_text(const Options& options, const OptionSpec& spec) {
  return std::visit(Printer{options}, spec.field);
}

}  // namespace switchyard::tool

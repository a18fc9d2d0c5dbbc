// The command line read by CLI11; the only file that includes it.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>

#include "tool/options/options.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/options/words.hpp"

namespace switchyard::tool {
namespace {

struct HelpWanted {};

bool is_positional(const OptionSpec& spec) { return spec.name[0] != '-'; }

bool is_list(const OptionSpec& spec) {
  return std::holds_alternative<std::vector<std::string> Options::*>(spec.field) ||
         std::holds_alternative<std::vector<std::int64_t> Options::*>(spec.field);
}

std::string names_of(const OptionSpec& spec) {
  const std::string name = spec.name;
  return *spec.old_name == '\0' ? name : name + "," + spec.old_name;
}

void add_option(CLI::App& app, const OptionSpec& spec, Options& options) {
  if (std::holds_alternative<bool Options::*>(spec.field)) {
    app.add_flag_callback(
        spec.name, [&] { set_option(options, spec, ""); }, spec.help);
    return;
  }
  CLI::Option* option = app.add_option_function<std::vector<std::string>>(
      names_of(spec),
      [&](const std::vector<std::string>& words) {
        const bool takes_many = is_list(spec) && (!is_positional(spec) || takes_many_words(spec));
        if (words.size() > 1 && !takes_many) {
          throw UsageError("{}: given {} times, the last is '{}', want once", spec.name,
                           words.size(), words.back());
        }
        for (const std::string& word : words) set_option(options, spec, word);
      },
      spec.help);
  option->type_name(spec.value)->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  if (is_positional(spec)) {
    option->expected(0, 1 << 16);
  } else if (takes_many_words(spec)) {
    option->expected(1, 1 << 16);
  } else {
    option->expected(1)->allow_extra_args(false);
  }
}

[[noreturn]] void fail_on_unknown(Command command, std::string_view word) {
  std::vector<std::string_view> names;
  for (const OptionSpec& spec : option_table()) {
    if ((spec.commands & command) != 0 && !is_positional(spec)) names.emplace_back(spec.name);
  }
  const char* name = to_string(command);
  const std::string meant = suggestion(word.substr(0, word.find('=')), names);
  if (!meant.empty()) throw UsageError("{} is no option of {}{}", word, name, meant);
  throw UsageError("{} is no option of {}; see switchyard {} --help", word, name, name);
}

[[noreturn]] void fail_on_command(std::string_view word) {
  std::vector<std::string_view> names;
  for (const CommandSpec& spec : command_table()) names.emplace_back(spec.name);
  if (word.empty()) throw UsageError("no command given, want one of {}", fmt::join(names, ", "));
  throw UsageError("'{}' is no command, want one of {}{}", word, fmt::join(names, ", "),
                   suggestion(word, names));
}

void check_required(const Options& options) {
  for (const OptionSpec& spec : option_table()) {
    if ((spec.required & options.command) != 0 && value_text(options, spec).empty()) {
      const std::string value = is_positional(spec) ? "" : std::string(spec.value) + ", ";
      throw UsageError("{} is missing: {}{}", spec.name, value, spec.help);
    }
  }
}

}  // namespace

std::optional<Options> parse_command_line(int argc, const char* const* argv) {
  Options options;
  CLI::App app;
  app.set_help_flag();
  app.allow_extras();
  app.require_subcommand(0, 1);
  bool version = false;
  app.add_flag("--version", version);
  bool help = false;
  app.add_flag("-h,--help", help);
  for (const CommandSpec& command : command_table()) {
    CLI::App* sub = app.add_subcommand(command.name);
    sub->set_help_flag();
    sub->allow_extras();
    sub->add_flag_callback("-h,--help", [] { throw HelpWanted(); });
    for (const OptionSpec& spec : option_table()) {
      if ((spec.commands & command.command) != 0) add_option(*sub, spec, options);
    }
    sub->preparse_callback(
        [&options, &command](std::size_t) { options.command = command.command; });
  }
  try {
    app.parse(argc, argv);
  } catch (const HelpWanted&) {
    print_help(std::cout, options.command);
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    std::string words = error.what();
    std::replace(words.begin(), words.end(), '\n', ' ');
    throw UsageError("{}; see switchyard {} --help", words, to_string(options.command));
  }
  if (help || version) {
    if (version) std::cout << "switchyard " SWITCHYARD_VERSION "\n";
    if (help) print_help(std::cout, std::nullopt);
    return std::nullopt;
  }
  const auto chosen = app.get_subcommands();
  if (chosen.empty()) {
    const auto words = app.remaining();
    fail_on_command(words.empty() ? "" : words.front());
  }
  const auto words = chosen.front()->remaining();
  if (!words.empty()) fail_on_unknown(options.command, words.front());
  check_required(options);
  return options;
}

}  // namespace switchyard::tool

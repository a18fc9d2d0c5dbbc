// What the table says to people: --help, docs/cli.md, bash completion; and to programs: the echo.
#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <ostream>

#include "checkpoint/models.hpp"
#include "core/environment.hpp"
#include "core/printable.hpp"
#include "switchyard/cpu_isa.hpp"
#include "tool/options/options.hpp"
#include "tool/options/words.hpp"

namespace switchyard::tool {
namespace {

bool is_positional(const OptionSpec& spec) { return spec.name[0] != '-'; }

/// "--drop-policy P".
std::string usage_of(const OptionSpec& spec) {
  if (is_positional(spec) || *spec.value == '\0') return spec.name;
  return fmt::format("{} {}", spec.name, spec.value);
}

/// "which assignments go [token|choice|probs|bpr] (default token)".
std::string help_of(const OptionSpec& spec) {
  std::string text = spec.help;
  if (!spec.words.empty()) text += fmt::format(" [{}]", spec.words);
  const std::string value = value_text(Options(), spec);
  if (!value.empty()) text += fmt::format(" (default {})", value);
  return text;
}

struct Echo {
  const Options& options;

  nlohmann::json operator()(bool Options::*field) const { return options.*field; }
  nlohmann::json operator()(std::int64_t Options::*field) const { return options.*field; }
  nlohmann::json operator()(double Options::*field) const { return options.*field; }
  nlohmann::json operator()(std::string Options::*field) const {
    return (options.*field).empty() ? nlohmann::json() : nlohmann::json(echo_of(options.*field));
  }
  template <typename T>
  nlohmann::json operator()(std::optional<T> Options::*field) const {
    return options.*field ? nlohmann::json(*(options.*field)) : nlohmann::json();
  }
  nlohmann::json operator()(std::vector<std::string> Options::*field) const {
    auto texts = nlohmann::json::array();
    for (const std::string& text : options.*field) texts.push_back(echo_of(text));
    return texts;
  }
  template <typename T>
  nlohmann::json operator()(std::vector<T> Options::*field) const {
    return options.*field;
  }

  /// JSON takes UTF-8 alone, and a command line may have any bytes.
  static std::string echo_of(const std::string& text) {
    return printable(text, std::max(text.size(), kPrintableBytes));
  }
};

std::string escape_markdown(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '|') out += '\\';
    out += c;
  }
  return out;
}

/// The words that may follow an option, for the completion: of one with a number what stands before
/// the number.
std::string completions_of(const OptionSpec& spec) {
  const std::string_view name = spec.name;
  std::vector<std::string> words;
  if (name == "--model" && std::string_view(spec.value) == "NAME") {
    for (const NamedModel& model : named_models()) words.push_back(model.name);
  } else if (name == "--isa") {
    for (const CpuIsaStatus& isa : cpu_isas()) words.emplace_back(to_string(isa.isa));
  } else if (!spec.words.empty()) {
    for (const std::string_view word : split(spec.words, '|')) {
      if (word == "N") continue;
      const std::size_t colon = word.find(':');
      words.emplace_back(colon == std::string_view::npos ? word : word.substr(0, colon + 1));
    }
  }
  return fmt::format("{}", fmt::join(words, " "));
}

}  // namespace

nlohmann::json echo(const Options& options) {
  nlohmann::json out;
  out["command"] = to_string(options.command);
  for (const OptionSpec& spec : option_table()) {
    if ((spec.commands & options.command) == 0) continue;
    std::string key = is_positional(spec) ? "arguments" : spec.name + 2;
    std::replace(key.begin(), key.end(), '-', '_');
    out[key] = std::visit(Echo{options}, spec.field);
  }
  return out;
}

void print_help(std::ostream& out, std::optional<Command> command) {
  if (!command || *command == kHelp) {
    out << "switchyard: the Mixture-of-Experts layer of a transformer, run, checked and "
           "measured\n\n"
           "usage: switchyard COMMAND [OPTIONS]\n\n";
    for (const CommandSpec& spec : command_table()) {
      out << fmt::format("  {:<16} {}\n", spec.name, spec.help);
    }
    out << "\nswitchyard COMMAND --help explains the options of a command.\n"
           "Exit codes: 0 fine, 1 a check failed, 2 wrong use or bad input, 3 failure at run "
           "time,\n"
           "130 interrupted.\n\nEnvironment variables:\n";
    for (const VariableSpec& spec : environment_table()) {
      out << fmt::format("  {:<24} {} (without it: {})\n", spec.name, spec.meaning, spec.without);
    }
    return;
  }
  for (const CommandSpec& spec : command_table()) {
    if (spec.command != *command) continue;
    out << fmt::format("switchyard {}: {}\n\nexample: {}\n\n", spec.name, spec.help, spec.example);
  }
  for (const OptionSpec& spec : option_table()) {
    if ((spec.commands & *command) == 0) continue;
    out << fmt::format("  {:<26} {}{}\n", usage_of(spec), help_of(spec),
                       (spec.required & *command) != 0 ? "; required" : "");
  }
}

void print_markdown(std::ostream& out) {
  out << "# The command line\n\n"
         "Written by `switchyard help --markdown` from the table that is also the parser.\n\n"
         "Exit codes: 0 fine; 1 a check failed; 2 wrong use or bad input; 3 failure at run time "
         "(timeout, memory, disk); 130 interrupted. None leaves a half-written file.\n";
  for (const CommandSpec& command : command_table()) {
    out << fmt::format("\n## switchyard {}\n\n{}.\n\n    {}\n", command.name, command.help,
                       command.example);
    bool first = true;
    for (const OptionSpec& spec : option_table()) {
      if ((spec.commands & command.command) == 0) continue;
      if (first) out << "\n| option | what it does |\n|---|---|\n";
      first = false;
      out << fmt::format("| `{}` | {}{} |\n", escape_markdown(usage_of(spec)),
                         escape_markdown(help_of(spec)),
                         (spec.required & command.command) != 0 ? "; required" : "");
    }
  }
  out << "\n## Environment variables\n\n"
         "Another name that begins with SWITCHYARD_ gets one line of warning.\n\n"
         "| variable | without it | what it does |\n|---|---|---|\n";
  for (const VariableSpec& spec : environment_table()) {
    out << fmt::format("| `{}` | {} | {} |\n", spec.name, escape_markdown(spec.without),
                       escape_markdown(spec.meaning));
  }
}

void print_bash_completion(std::ostream& out) {
  std::string commands;
  for (const CommandSpec& spec : command_table()) commands += fmt::format("{} ", spec.name);
  out << "# bash completion of switchyard, written by `switchyard completion bash`\n"
         "_switchyard() {\n"
         "  local word=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}\n"
         "  COMPREPLY=()\n"
         "  if [ \"$word\" = : ] || [ \"$previous\" = : ]; then  # bash makes a word of it\n"
         "    compopt +o default\n"
         "    return\n"
         "  fi\n"
         "  if [ \"$COMP_CWORD\" -eq 1 ]; then\n"
      << fmt::format("    COMPREPLY=($(compgen -W \"{}--help --version\" -- \"$word\"))\n",
                     commands)
      << "    return\n"
         "  fi\n"
         "  case \"${COMP_WORDS[1]} $previous\" in\n";
  for (const CommandSpec& command : command_table()) {
    for (const OptionSpec& spec : option_table()) {
      if ((spec.commands & command.command) == 0 || is_positional(spec)) continue;
      const std::string words = completions_of(spec);
      if (words.empty()) continue;
      out << fmt::format("    \"{} {}\") COMPREPLY=($(compgen -W \"{}\" -- \"$word\"));;\n",
                         command.name, spec.name, words);
    }
  }
  out << "  esac\n"
         "  case \"${#COMPREPLY[@]} ${COMPREPLY[0]}\" in \"1 \"*:) compopt -o nospace;; esac\n"
         "  if [ \"${#COMPREPLY[@]}\" -gt 0 ]; then return; fi\n"
         "  case \"$word\" in -*) ;; *) return;; esac\n"
         "  case \"${COMP_WORDS[1]}\" in\n";
  for (const CommandSpec& command : command_table()) {
    std::string names;
    for (const OptionSpec& spec : option_table()) {
      if ((spec.commands & command.command) != 0 && !is_positional(spec)) {
        names += fmt::format("{} ", spec.name);
      }
    }
    out << fmt::format("    {}) COMPREPLY=($(compgen -W \"{}--help\" -- \"$word\"));;\n",
                       command.name, names);
  }
  out << "  esac\n"
         "}\n"
         "complete -o default -F _switchyard switchyard\n";
}

}  // namespace switchyard::tool

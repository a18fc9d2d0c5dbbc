// The tool `switchyard`: reads the command line, runs the command, turns errors into exit codes.
#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <iostream>
#include <new>
#include <string>

#include "core/environment.hpp"
#include "core/printable.hpp"
#include "core/say.hpp"
#include "switchyard/error.hpp"
#include "tool/commands.hpp"
#include "tool/interrupt.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/report_error.hpp"

namespace switchyard::tool {
namespace {

int help_command(const Options& options) {
  if (options.markdown) {
    print_markdown(std::cout);
    return kFine;
  }
  if (options.positional.empty()) {
    print_help(std::cout, std::nullopt);
    return kFine;
  }
  for (const CommandSpec& spec : command_table()) {
    if (options.positional.front() == spec.name) {
      print_help(std::cout, spec.command);
      return kFine;
    }
  }
  throw UsageError("COMMAND: '{}' is no command; see switchyard help", options.positional.front());
}

int run(const Options& options) {
  switch (options.command) {
    case kRun: return run_command(options);
    case kVerify: return verify_command(options);
    case kBench: return bench_command(options);
    case kSweep: return sweep_command(options);
    case kTrain: return train_command(options);
    case kTokenizer: return tokenizer_command(options);
    case kEvaluate: return evaluate_command(options);
    case kGenerate: return generate_command(options);
    case kStudy: return study_command(options);
    case kDevices: return devices_command(options);
    case kRouters: return routers_command(options);
    case kMakeCheckpoint: return make_checkpoint_command(options);
    case kReport: return report_command(options);
    case kCompletion: print_bash_completion(std::cout); return kFine;
    case kHelp: return help_command(options);
  }
  return kFailure;
}

void warn_of_unknown_variables() {
  for (const std::string& name : unknown_variables()) {
    say(fmt::format(
        "switchyard{}: {} is set, but no variable of Switchyard's; see switchyard help\n",
        rank_words(), printable(name)));
  }
}

/// What is printed would else get into the first file that is opened, under the number of a
/// standard stream that the caller has closed. It stays unusable: to write to stdout is then an
/// error.
void occupy_closed_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(stream, F_GETFD) < 0) {
      // The lowest number that is free, so this one.
      static_cast<void>(open("/dev/null", stream == STDIN_FILENO ? O_WRONLY : O_RDONLY));
    }
  }
}

}  // namespace
}  // namespace switchyard::tool

int main(int argc, char** argv) {
  using namespace switchyard::tool;  // NOLINT
  occupy_closed_streams();
  install_interrupt_handler();
  try {
    warn_of_unknown_variables();
    const std::optional<Options> options = parse_command_line(argc, argv);
    if (options && options->verbose) switchyard::set_verbose(true);
    const int exit_code = options ? run(*options) : kFine;
    const bool written = std::cout.flush() && std::ferror(stdout) == 0;
    if (!written) return report_error("stdout: cannot write", kFailure);
    return exit_code;
  } catch (const UsageError& error) {
    return report_error(error.what(), kWrongUse);
  } catch (const switchyard::Error& error) {
    return report_error(error.what(), exit_code_of(error.code()));
  } catch (const std::bad_alloc&) {
    return report_error("out of memory", kFailure);
  } catch (const std::exception& error) {
    return report_error(error.what(), kFailure);
  }
}

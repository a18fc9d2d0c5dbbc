// The table of environment variables.
#include "core/environment.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string_view>

extern char** environ;  // NOLINT(readability-redundant-declaration)

namespace switchyard {
namespace {

constexpr VariableSpec kVariables[] = {
    {Variable::kIsa, "SWITCHYARD_ISA", "the one that reaches most",
     "instruction set of the CPU kernels, as --isa; a name that is none, or not here, is an error"},
    {Variable::kThreadRuntime, "SWITCHYARD_THREAD_RUNTIME", "auto",
     "whose threads compute on a CPU: openmp, those of the OpenMP runtime that the process has, "
     "torch's for one; own; auto: openmp where one is loaded"},
    {Variable::kRoofs, "SWITCHYARD_ROOFS", "measured",
     "the roofs that times are shares of: measured, in about a second and four times the last "
     "cache; "
     "rough: at once, for runs whose shares nobody reads"},
    {Variable::kVerbose, "SWITCHYARD_VERBOSE", "0",
     "1: every call of a stage says on stderr what runs it, for which sizes, and why nothing "
     "before "
     "it in the order of preference does; as --verbose, in Python and C too"},
    {Variable::kNcclLibrary, "SWITCHYARD_NCCL_LIBRARY", "looked for",
     "file of NCCL's library, for --engine nccl and nccl-pairs"},
    {Variable::kLibrary, "SWITCHYARD_LIBRARY", "the package's own",
     "file of libswitchyard.so that the Python package loads"},
    {Variable::kVariant, "SWITCHYARD_VARIANT", "native",
     "variant of the exchange that examples/python/all2all_submission.py takes"},
    {Variable::kCommit, "SWITCHYARD_COMMIT", "git is asked",
     "commit that result lines name where the sources are no clone of git"},
};

constexpr std::string_view kOurs = "SWITCHYARD_";
constexpr std::string_view kOfTests = "SWITCHYARD_TEST_";

bool is_known(std::string_view name) {
  return name.starts_with(kOfTests) ||
         std::any_of(std::begin(kVariables), std::end(kVariables),
                     [&](const VariableSpec& spec) { return name == spec.name; });
}

bool asked_to_be_verbose() {
  const char* const value = value_of(Variable::kVerbose);
  return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
}

}  // namespace

namespace verbose {
std::atomic<bool> on{asked_to_be_verbose()};
}  // namespace verbose

std::span<const VariableSpec> environment_table() { return kVariables; }

const char* value_of(Variable variable) {
  for (const VariableSpec& spec : kVariables) {
    if (spec.variable == variable) return std::getenv(spec.name);  // NOLINT(concurrency-mt-unsafe)
  }
  return nullptr;
}

std::vector<std::string> unknown_variables() {
  std::vector<std::string> names;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const std::string_view name = text.substr(0, text.find('='));
    if (name.starts_with(kOurs) && !is_known(name)) names.emplace_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace switchyard

// Any text is either refused, or a study whose arms and seeds can be counted; any study.json is
// either refused by `report`, or becomes a page.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string_view>

#include "fuzz/scratch_folder.hpp"
#include "switchyard/error.hpp"
#include "tool/commands.hpp"
#include "tool/options/usage_error.hpp"
#include "tool/study/config.hpp"
#include "tool/study/study_files.hpp"

using switchyard::Error;
using switchyard::ErrorCode;
using namespace switchyard::tool;

extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
  return std::freopen("/dev/null", "w", stdout) == nullptr ? 1 : 0;
}

namespace {

void read_as_configuration(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const StudyConfig study = parse_study(text, "study.json");
    if (study.arms.empty() || study.seeds.empty() || study.reference >= study.arms.size()) {
      std::abort();
    }
    for (const StudyArm& arm : study.arms) (void)study.find(arm.name);
  } catch (const UsageError&) {
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kBadFile && error.code() != ErrorCode::kInvalidArgument) {
      std::abort();
    }
  }
}

void read_as_results(const std::uint8_t* data, std::size_t size) {
  using switchyard::fuzz::scratch_folder;
  (void)switchyard::fuzz::write_scratch(kStudyFile, data, size);
  Options options;
  options.positional = {scratch_folder().string()};
  options.output = scratch_folder() / "page.html";
  try {
    if (report_command(options) != kFine) std::abort();
  } catch (const UsageError&) {
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kBadFile) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  read_as_configuration(data, size);
  read_as_results(data, size);
  return 0;
}

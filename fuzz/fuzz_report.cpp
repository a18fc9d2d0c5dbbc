// Any file is either refused by `report`, or becomes a page of a size that follows from its own.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "fuzz/scratch_folder.hpp"
#include "switchyard/error.hpp"
#include "tool/commands.hpp"
#include "tool/options/usage_error.hpp"

using switchyard::Error;
using switchyard::ErrorCode;

namespace {
constexpr std::size_t kEmptyPage = 200'000;  // style, script and what draws the plots
}

extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
  return std::freopen("/dev/null", "w", stdout) == nullptr ? 1 : 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using switchyard::fuzz::scratch_folder;
  switchyard::tool::Options options;
  options.positional = {switchyard::fuzz::write_scratch("lines.jsonl", data, size)};
  options.output = scratch_folder() / "page.html";
  try {
    if (report_command(options) != switchyard::tool::kFine) std::abort();
    if (std::filesystem::file_size(options.output) > kEmptyPage + 4000 * size) std::abort();
  } catch (const switchyard::tool::UsageError&) {
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kBadFile) std::abort();
  }
  return 0;
}

// Any text is either refused, or the configuration of a model that is written and read back as it
// is. Memory is not asked for: counts of its parameters may be of any size.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "switchyard/error.hpp"
#include "switchyard/models/config.hpp"

using switchyard::Error;
using switchyard::ErrorCode;
using switchyard::models::ModelConfig;
using switchyard::models::parse_model_config;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  ModelConfig config;
  try {
    config = parse_model_config(text, "fuzz");
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kBadFile && error.code() != ErrorCode::kInvalidArgument) {
      std::abort();
    }
    return 0;
  }
  const std::string written = to_json(config);
  if (to_json(parse_model_config(written, "written")) != written) std::abort();
  (void)count(config);
  return 0;
}

// Whatever stands behind `verify --case` is refused by name, or is a case that says itself again.
#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>

#include "switchyard/error.hpp"
#include "verify/case.hpp"

using switchyard::Error;
using switchyard::ErrorCode;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using switchyard::verify::Case;
  try {
    const Case test =
        switchyard::verify::parse_case(std::string(reinterpret_cast<const char*>(data), size));
    const std::string text = to_json(test).dump();
    if (to_json(switchyard::verify::parse_case(text)).dump() != text) std::abort();
    // Its tokens are divided among its ranks.
    const auto begin = rank_begin(test);
    if (begin.size() != static_cast<std::size_t>(test.ranks) + 1 || begin.front() != 0) {
      std::abort();
    }
    if (begin.back() != test.num_tokens) std::abort();
    for (std::size_t rank = 0; rank + 1 < begin.size(); ++rank) {
      if (begin[rank] > begin[rank + 1]) std::abort();
    }
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalidArgument) std::abort();
  }
  return 0;
}

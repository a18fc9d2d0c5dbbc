// `switchyard verify`: random layers against the reference.
#include "verify/verify.hpp"

#include <algorithm>
#include <cstdlib>
#include <iostream>

#include "tool/commands.hpp"
#include "tool/progress.hpp"
#include "tool/setup.hpp"

namespace switchyard::tool {

int verify_command(const Options& options) {
  const LayerOptions layer = layer_options(options);
  verify::VerifyOptions out;
  out.cases = options.cases;
  out.seed = static_cast<std::uint64_t>(options.seed);
  if (!options.ranks_list.empty()) {
    out.ranks.assign(options.ranks_list.begin(), options.ranks_list.end());
  }
  if (!options.threads_list.empty()) {
    out.threads.assign(options.threads_list.begin(), options.threads_list.end());
  }
  out.backend = layer.backend;
  // Without being told, all instruction sets take turns.
  const char* forced = std::getenv("SWITCHYARD_ISA");  // NOLINT(concurrency-mt-unsafe)
  if (!options.isa.empty() || forced != nullptr) out.isas.assign(1, isa_in_use());
  out.case_json = options.verify_case;
  out.fault = options.fault;
  out.timeout = std::chrono::milliseconds(options.timeout_ms);
  out.json = options.json;
  ProgressBar bar(static_cast<int>(std::min<std::int64_t>(options.cases, 1 << 30)));
  out.progress = [&bar](std::int64_t done, std::int64_t) {
    if (done % 16 == 0) bar.show(static_cast<int>(done), "cases");
  };
  return verify::run_verify(out, std::cout);
}

}  // namespace switchyard::tool

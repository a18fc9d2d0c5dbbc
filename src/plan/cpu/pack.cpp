// Pack on a CPU: row r of the layout is row_token[r] of x, padding is 0. Bound by memory; rows are
// split over the threads.
#include <algorithm>
#include <cstring>

#include "core/check.hpp"
#include "plan/implementations.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {
namespace {

constexpr std::int64_t kRowsPerTask = 32;

std::optional<std::string> reject(const PackArgs& args) {
  if (args.execution.backend != Backend::kCpu) return "needs the backend cpu";
  return std::nullopt;
}

void run(const PackArgs& args) {
  const PlanView& plan = args.plan;
  const std::int64_t num_rows = plan.expert_begin[plan.num_experts];
  require(num_rows <= args.rows.rows, "the layout has {} rows, the output {}", num_rows,
          args.rows.rows);
  const auto bytes = static_cast<std::size_t>(args.x.row_bytes());
  const std::int64_t tasks = (num_rows + kRowsPerTask - 1) / kRowsPerTask;
  parallel_for(args.execution.pool, tasks, [&](std::int64_t task, int) {
    const std::int64_t end = std::min(num_rows, (task + 1) * kRowsPerTask);
    for (std::int64_t row = task * kRowsPerTask; row < end; ++row) {
      const std::int64_t token = plan.row_token[row];
      require(token < args.x.rows, "row {} comes from token {}, but x has {} rows", row, token,
              args.x.rows);
      if (token < 0) {
        std::memset(args.rows.row(row), 0, bytes);
      } else {
        std::memcpy(args.rows.row(row), args.x.row(token), bytes);
      }
    }
  });
}

}  // namespace

const Implementation<PackArgs> kPackCpu{"cpu.copy", reject, run};

}  // namespace switchyard

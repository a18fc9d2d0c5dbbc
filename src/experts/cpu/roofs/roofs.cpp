// What the memory and the arithmetic of this machine give: the roofs that figures are shares of.
#include "experts/cpu/roofs/roofs.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string_view>

#include "core/check.hpp"
#include "core/cpu/memory.hpp"
#include "core/environment.hpp"

namespace switchyard {
namespace {

using Clock = std::chrono::steady_clock;

/// Whether SWITCHYARD_ROOFS asks for figures at once instead of those that hold.
bool only_rough() {
  const char* const value = value_of(Variable::kRoofs);
  if (value == nullptr || *value == '\0') return false;
  const std::string_view wanted(value);
  require(wanted == "measured" || wanted == "rough", "SWITCHYARD_ROOFS={}, want measured or rough",
          wanted);
  return wanted == "rough";
}

/// Seconds of the fastest of at most `runs` runs of a loop over the threads. No further run begins
/// after `enough` seconds: threads and clocks have woken by then, and slow builds (sanitizers) do
/// not pay for a precision that they lack.
template <class Body>
double best_seconds(ThreadPool* pool, int runs, std::int64_t count, const Body& body) {
  const double enough = only_rough() ? 0.001 : 0.1;
  double best = 1e30;
  double spent = 0;
  for (int run = 0; run < runs && spent < enough; ++run) {
    const auto start = Clock::now();
    parallel_for(pool, count, [&](std::int64_t part, int) { body(part); });
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    best = std::min(best, seconds);
    spent += seconds;
  }
  return best;
}

double peak(const cpu::Kernels& kernels, ThreadPool* pool) {
  // Pieces well under a millisecond, so that a thread that lost its core does not hold up the rest.
  const double piece_flops = only_rough() ? 2e5 : 2e7;
  constexpr std::int64_t kPieces = 4;  // per thread
  constexpr int kRuns = 1000;
  const auto rounds = static_cast<std::int64_t>(piece_flops / kernels.spin_flops);
  const std::int64_t pieces = kPieces * num_threads(pool);
  const double seconds =
      best_seconds(pool, kRuns, pieces, [&](std::int64_t) { kernels.spin(rounds); });
  return kernels.spin_flops * static_cast<double>(rounds * pieces) / seconds;
}

struct Peak {
  const cpu::Kernels* kernels;
  double flops;
};

Peak largest_peak(CpuIsa isa, DType dtype, ThreadPool* pool) {
  const cpu::Kernels& own = cpu::find_kernels(isa, dtype, WeightFormat::kExact);
  const Peak first{&own, peak(own, pool)};
  if (own.isa == CpuIsa::kPortable) return first;
  const auto below = static_cast<CpuIsa>(static_cast<int>(own.isa) - 1);
  const cpu::Kernels& lower = cpu::find_kernels(below, dtype, WeightFormat::kExact);
  const Peak second{&lower, peak(lower, pool)};
  return second.flops > first.flops ? second : first;
}

std::int64_t last_cache_bytes() {
#if defined(_SC_LEVEL3_CACHE_SIZE)
  return std::max<std::int64_t>(sysconf(_SC_LEVEL3_CACHE_SIZE), 0);
#else
  return 0;
#endif
}

}  // namespace

const cpu::Kernels& peak_kernels(CpuIsa isa, DType dtype, ThreadPool* pool) {
  return *largest_peak(isa, dtype, pool).kernels;
}

CpuRoofs measure_cpu_roofs(CpuIsa isa, ThreadPool* pool) {
  const cpu::Kernels& reader = cpu::find_kernels(isa, DType::kF32, WeightFormat::kExact);
  CpuRoofs roofs{.flops_f32 = largest_peak(isa, DType::kF32, pool).flops,
                 .flops_bf16 = largest_peak(isa, DType::kBF16, pool).flops,
                 .flops_f16 = largest_peak(isa, DType::kF16, pool).flops};
  constexpr std::int64_t kPart = 1 << 20;
  const std::int64_t enough =
      std::max<std::int64_t>(4 * last_cache_bytes(), std::int64_t{256} << 20);
  const std::int64_t parts = only_rough() ? std::int64_t{8} * num_threads(pool) : enough / kPart;
  const cpu::HugeBuffer memory(static_cast<std::size_t>(parts * kPart));
  parallel_for(pool, parts,
               [&](std::int64_t i, int) { std::memset(memory.data() + i * kPart, 0, kPart); });
  constexpr int kRuns = 5;
  for (const int streams : {1, 2, 4, 8}) {
    const double seconds = best_seconds(pool, kRuns, parts, [&](std::int64_t i) {
      reader.read(memory.data() + i * kPart, kPart, streams);
    });
    const double rate = static_cast<double>(parts * kPart) / seconds;
    if (rate > roofs.read_bytes_per_s) {
      roofs.read_bytes_per_s = rate;
      roofs.streams = streams;
    }
  }
  return roofs;
}

}  // namespace switchyard

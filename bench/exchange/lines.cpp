// What device_exchange_bench prints of a point.
#include "bench/exchange/lines.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <string>

#include "bench/exchange/device_chain.hpp"
#include "bench/measure/wire_rate.hpp"
#include "switchyard/names.hpp"

namespace switchyard {
namespace {

using bench::kPushBytesPerUs;

/// What R7 allows under skew: so much more than the bound of the most loaded rank, for each of the
/// two ways.
constexpr double kSkewRatio = 1.15;
constexpr double kSkewUs = 20;

struct Line {
  std::string_view stage;
  std::string_view home;  ///< How sums come home; empty: they do not.
  double us = 0;
  double bytes = 0;    ///< Sent to others, by the rank that sends most.
  double loaded = 0;   ///< Bytes over the wire of the rank that receives most, or sends most home.
  double nccl_us = 0;  ///< 0: none.
  int ways = 1;
  double row_bytes = 0;     ///< Of a row, all ways together.
  double p50 = 0, p99 = 0;  ///< 0: not measured.
};

/// Rates by the two conventions, and the bytes of a pair of ranks beside the formula.
std::string counted(const Line& line, const ExchangePoint& point, const ExchangeRouting& routing) {
  const double own_too = static_cast<double>(routing.most_with_own()) * line.row_bytes;
  const double choices = static_cast<double>(point.tokens * kBenchTopK) * line.row_bytes;
  std::string text = fmt::format(R"("gbps_n1":{:.1f},"gbps_n2":{:.1f},)", own_too / line.us / 1e3,
                                 choices / line.us / 1e3);
  if (line.p99 > 0) {
    text += fmt::format(R"("one_by_one":{{"p50_us":{:.2f},"p99_us":{:.2f}}},)", line.p50, line.p99);
  }
  if (point.skew != kUniformSkew || routing.num_ranks == 1) return text;
  double least = 0, most = 0;
  for (int pair = 0; pair < routing.num_ranks * routing.num_ranks; ++pair) {
    if (pair % (routing.num_ranks + 1) == 0) continue;  // a rank's own rows
    const double bytes =
        static_cast<double>(routing.rows[static_cast<std::size_t>(pair)]) * line.row_bytes;
    least = least == 0 ? bytes : std::min(least, bytes);
    most = std::max(most, bytes);
  }
  const double expected =
      expected_rows_of_pair(point.tokens, kBenchExperts, kBenchTopK, routing.num_ranks);
  return text + fmt::format(R"("pair_bytes":{{"least":{:.0f},"most":{:.0f},"formula":{:.0f}}},)",
                            least, most, expected * line.row_bytes);
}

/// Time over the bound of the most loaded rank; and whether R7 holds, where it is asked.
std::string bound_of(const Line& line, const ExchangePoint& point) {
  const double bound = line.loaded / kPushBytesPerUs;
  std::string text =
      fmt::format(R"("bound_us":{:.2f},"ratio":{:.3f},)", bound, bound > 0 ? line.us / bound : 0);
  if (point.skew == kUniformSkew) return text;
  const double target = kSkewRatio * bound + line.ways * kSkewUs;
  return text + fmt::format(R"("bar":"R7","value":{:.2f},"target":{:.2f},"holds":{},)", line.us,
                            target, line.us <= target);
}

void print_line(const Line& line, const ExchangeRouting& routing, const ExchangePoint& point,
                DeviceEngine engine) {
  const int ranks = routing.num_ranks;
  const double limit = line.bytes / kPushBytesPerUs;
  const std::string peers =
      line.nccl_us > 0 ? fmt::format(R"("peers":{{"nccl":{:.2f}}},)", line.nccl_us) : "";
  const std::string home = line.home.empty() ? "" : fmt::format(R"(,"home":"{}")", line.home);
  fmt::print(
      R"({{"stage":"{}","backend":"cuda","case":{{"E":{},"K":{},"H":{},"T":{},"R":{},)"
      R"("engine":"{}","mode":"{}","dispatch_wire":"{}","combine_wire":"bf16","ctas":{},)"
      R"("skew":"{}"{}}},"samples":{},"median_us":{:.2f},{}{}{}"bytes":{:.0f},"gbps":{:.1f},)"
      R"("limit_us":{:.2f},"limit_by":"wire","share":{:.3f}}})"
      "\n",
      line.stage, kBenchExperts, kBenchTopK, kBenchHidden, point.tokens, ranks, to_string(engine),
      to_string(point.mode), to_string(point.wire), point.ctas, point.skew, home, kChainRepeats,
      line.us, peers, bound_of(line, point), counted(line, point, routing), line.bytes,
      line.bytes / line.us / 1e3, limit, limit / line.us);
}

/// The table's.
void print_row(const ExchangePoint& point, int ranks, const ExchangeTimes& times, double there,
               double back) {
  const bool low_latency = point.mode == ExchangeMode::kLowLatency;
  fmt::print("R{} T{:5} {:8} {:11} wire {:4} ctas {:3}  pair {:8.1f} us ({:5.1f} GB/s)", ranks,
             point.tokens, point.skew, to_string(point.mode), to_string(point.wire), point.ctas,
             times.pair, (there + back) / times.pair / 1e3);
  if (!low_latency) {
    const double rest = times.pair - times.dispatch;
    fmt::print("  dispatch {:8.1f} us ({:5.1f} GB/s)  rest {:8.1f} us ({:5.1f} GB/s)",
               times.dispatch, there / times.dispatch / 1e3, rest, back / rest / 1e3);
    if (times.pair_by_push > 0) {
      fmt::print("  by push {:8.1f} us", times.pair_by_push - times.dispatch);
    }
  }
  if (times.pair_p99 > 0) {
    fmt::print("  one by one p50 {:8.1f} us, p99 {:8.1f} us", times.pair_p50, times.pair_p99);
  }
  if (times.nccl_pair > 0) {
    fmt::print("  NCCL all-to-all: pair {:8.1f} us, dispatch {:8.1f} us", times.nccl_pair,
               times.nccl_dispatch);
  }
  fmt::print("\n");
}

}  // namespace

std::int64_t bench_row_bytes(DType wire) {
  return kBenchHidden * size_of(wire) + (wire == DType::kF8E4M3 ? kBenchHidden / 128 * 4 : 0);
}

void print_exchange(const ExchangePoint& point, DeviceEngine engine, const ExchangeRouting& routing,
                    const ExchangeTimes& times) {
  const int ranks = routing.num_ranks;
  const auto sent = static_cast<double>(routing.most_sent());
  const auto loaded = static_cast<double>(routing.most_received());
  const auto there = static_cast<double>(bench_row_bytes(point.wire));
  const auto back = static_cast<double>(bench_row_bytes(DType::kBF16));
  print_row(point, ranks, times, sent * there, sent * back);
  Line pair{.stage = "dispatch+combine",
            .home = times.pulls ? "pull" : "push",
            .us = times.pair,
            .bytes = sent * (there + back),
            .loaded = loaded * (there + back),
            .nccl_us = times.nccl_pair,
            .ways = 2,
            .row_bytes = there + back,
            .p50 = times.pair_p50,
            .p99 = times.pair_p99};
  print_line(pair, routing, point, engine);
  if (point.mode == ExchangeMode::kThroughput) {
    print_line({.stage = "dispatch",
                .home = "",
                .us = times.dispatch,
                .bytes = sent * there,
                .loaded = loaded * there,
                .nccl_us = times.nccl_dispatch,
                .row_bytes = there},
               routing, point, engine);
    print_line({.stage = "combine",
                .home = pair.home,
                .us = times.pair - times.dispatch,
                .bytes = sent * back,
                .loaded = loaded * back,
                .nccl_us = times.nccl_pair - times.nccl_dispatch,
                .row_bytes = back},
               routing, point, engine);
  }
  if (times.pair_by_push > 0) {
    pair.home = "push";
    pair.us = times.pair_by_push;
    pair.p99 = 0;
    print_line(pair, routing, point, engine);
  }
  std::fflush(stdout);
}

}  // namespace switchyard

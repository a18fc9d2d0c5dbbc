#pragma once

#include <cstdint>
#include <string_view>

#include "bench/exchange/routing.hpp"
#include "switchyard/device_dispatch.hpp"

namespace switchyard {

// The layer whose exchange device_exchange_bench measures.
inline constexpr std::int64_t kBenchHidden = 7168;
inline constexpr std::int32_t kBenchTopK = 8;
inline constexpr std::int32_t kBenchExperts = 256;
inline constexpr std::string_view kUniformSkew = "uniform";

struct ExchangePoint {
  std::int64_t tokens = 0;
  ExchangeMode mode = ExchangeMode::kThroughput;
  DType wire = DType::kBF16;  ///< Of dispatch; that of combine is bf16.
  int ctas = 0;
  std::string_view skew = kUniformSkew;
  bool for_bar = false;  ///< Of R7, or beside it: not by push where sums can be pulled.
};

/// Medians of a point, us; 0: not measured.
struct ExchangeTimes {
  double dispatch = 0;
  double pair = 0;  ///< By pull, where there is one; else by push.
  bool pulls = false;
  double pair_by_push = 0;  ///< Where `pulls`.
  double pair_p50 = 0;      ///< Of pairs timed one by one; the next too.
  double pair_p99 = 0;
  double nccl_dispatch = 0;
  double nccl_pair = 0;
};

/// Bytes of a row's values, and of their scales.
[[nodiscard]] std::int64_t bench_row_bytes(DType wire);

/// A line of a table, then the result lines, with the wire's limit, and with the bound of the most
/// loaded rank; R7 is judged where the routing is skewed. Rates are what leaves a GPU (`gbps`), and
/// by the two conventions in use, which count more and must not be mixed: `gbps_n1` tokens that a
/// rank receives, each once, its own too; `gbps_n2` every choice of an expert, T * K.
void print_exchange(const ExchangePoint& point, DeviceEngine engine, const ExchangeRouting& routing,
                    const ExchangeTimes& times);

}  // namespace switchyard

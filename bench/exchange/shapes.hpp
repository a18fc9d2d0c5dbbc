#pragma once

// The shapes of the published all-to-all benchmark and of the fixed-size sweeps, from
// data/all2all.json.

#include <string>
#include <vector>

#include "bench/variants/fixed_size.hpp"

namespace switchyard::bench {

/// A test or a benchmark as it was published.
struct ExchangeShape {
  enum class Kind { kTest, kBenchmark, kBar };
  Kind kind = Kind::kTest;
  std::int32_t num_experts = 0, top_k = 0;
  std::int64_t hidden = 0;
  std::int64_t max_tokens = 0;  ///< Of a rank.
  std::uint64_t seed = 0;       ///< Rank r draws from seed + r.
  int world_size = 1;
  DType dtype = DType::kF16;
};

/// The small tests, the tests, the benchmarks. Tokens and hidden size are divided by `scale`, but
/// for the small tests.
[[nodiscard]] std::vector<ExchangeShape> exchange_shapes(double scale);

/// What bar R8 is about: 4 processes.
[[nodiscard]] ExchangeShape bar_shape(double scale);

/// One point of one sweep.
struct SweepPoint {
  std::string sweep{};  ///< "batch", "sequence", "local_experts", "top_k".
  std::int64_t value = 0;
  FixedSizeConfig config{};
};

struct FixedSizeSweeps {
  int world_size = 1;
  std::vector<SweepPoint> points{};
};

/// Points of a sweep stand together, ascending. Tokens and hidden size are divided by `scale`.
[[nodiscard]] FixedSizeSweeps fixed_size_sweeps(double scale);

/// What was published about the sweeps.
[[nodiscard]] std::vector<std::string> findings_to_test();

/// At least one.
[[nodiscard]] std::int64_t scaled_tokens(std::int64_t tokens, double scale);
/// A multiple of 32, at least 32.
[[nodiscard]] std::int64_t scaled_size(std::int64_t size, double scale);

}  // namespace switchyard::bench

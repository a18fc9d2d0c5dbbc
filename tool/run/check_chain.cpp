// --check of a chain: each iteration by itself, on what the one before has made.
#include <fmt/core.h>

#include <algorithm>
#include <bit>

#include "core/half.hpp"
#include "core/row_ops.hpp"
#include "tool/run/check.hpp"

namespace switchyard::tool {
namespace {

std::vector<float> widened(ConstRawMatrix matrix) {
  std::vector<float> values(static_cast<std::size_t>(matrix.rows * matrix.cols));
  row_ops::widen(matrix.dtype, matrix.data, values.data(), std::ssize(values));
  return values;
}

template <typename T>
bool is_part(const std::vector<T>& whole, const std::vector<T>& part, std::int32_t number) {
  const std::ptrdiff_t begin = number * std::ssize(part);
  return begin + std::ssize(part) <= std::ssize(whole) &&
         std::equal(part.begin(), part.end(), whole.begin() + begin);
}

void take(Verdict& whole, const Verdict& part, std::int32_t iteration) {
  whole.tokens_routed = part.tokens_routed;
  whole.tokens_computed = part.tokens_computed;
  whole.largest_error = std::max(whole.largest_error, part.largest_error);
  whole.largest_bound = std::max(whole.largest_bound, part.largest_bound);
  if (part.holds || !whole.holds) return;
  whole.holds = false;
  whole.miss = fmt::format("iteration {}: {}", iteration, part.miss);
}

void miss(Verdict& verdict, std::string what) {
  if (!verdict.holds) return;
  verdict.holds = false;
  verdict.miss = std::move(what);
}

}  // namespace

Verdict check_chain(const bench::LayerRunArgs& args, const bench::LayerRunResult& result) {
  const RouterConfig& router = args.model->config.router;
  Verdict verdict;
  const std::vector<float> tokens = widened(args.tokens);
  std::vector<float> x = tokens;
  for (std::int32_t c = 0; c < router.chain.iterations && verdict.holds; ++c) {
    const LayerModel model = iteration_of(*args.model, c);
    bench::LayerRunArgs one = args;
    one.model = &model;
    one.world = nullptr;  // ranks of other processes are threads here: the same bits
    one.tokens = {reinterpret_cast<const std::byte*>(x.data()), DType::kF32, args.tokens.rows,
                  args.tokens.cols};
    one.request.layer = args.request.layer * router.chain.iterations + c;
    one.out = DType::kF32;
    one.copies = 1;
    one.count = {.warmup = 0, .iterations = 1, .budget = {}};
    one.options.progress = {};
    const bench::LayerRunResult alone = bench::run_layer(one);
    take(verdict, check_run(one, alone), c);
    if (!is_part(result.record.expert, alone.record.expert, c) ||
        !is_part(result.record.weight, alone.record.weight, c) ||
        !is_part(result.record.kept, alone.record.kept, c)) {
      miss(verdict, fmt::format("iteration {}: the chain routes otherwise than a layer does", c));
    }
    for (std::size_t i = 0; i < x.size(); ++i) {
      const float y = load_float(alone.out.data(), DType::kF32, static_cast<std::int64_t>(i));
      x[i] = router.chain.inner_residual ? x[i] + y : y;
    }
  }
  for (std::size_t i = 0; i < x.size() && verdict.holds; ++i) {
    const float sum = router.chain.outer_residual ? x[i] + tokens[i] : x[i];
    const float want = round_to(args.out, sum);
    const float have = load_float(result.out.data(), args.out, static_cast<std::int64_t>(i));
    if (std::bit_cast<std::uint32_t>(want) == std::bit_cast<std::uint32_t>(have)) continue;
    miss(verdict, fmt::format("output: value {} of the chain is {:.9g}, its iterations add up to "
                              "{:.9g}",
                              i, have, want));
  }
  return verdict;
}

}  // namespace switchyard::tool

// A problem through the layer, on one rank or several.
#include "verify/run_layer.hpp"

#include <algorithm>

#include "switchyard/comm.hpp"

namespace switchyard::verify {
namespace {

LayerOptions options_of(const Case& test, const RunArgs& args) {
  LayerOptions options;
  options.backend = args.backend;
  options.compute = test.compute;
  options.quantize_q8 = test.quantize_q8;
  options.layout = test.layout;
  if (test.capacity_factor > 0) options.capacity_factor = test.capacity_factor;
  options.drop_policy = test.drop_policy;
  options.wire = test.wire;
  options.batch_invariant = test.batch_invariant;
  options.rank_invariant = test.rank_invariant;
  options.num_threads = args.threads;
  options.max_tokens = 1;
  for (std::size_t r = 1; r < args.rank_begin.size(); ++r) {
    options.max_tokens = std::max(options.max_tokens, args.rank_begin[r] - args.rank_begin[r - 1]);
  }
  return options;
}

RankResult run_rank(const Problem& problem, const RunArgs& args, Communicator* communicator) {
  const Case& test = problem.test;
  const auto rank = static_cast<std::size_t>(communicator == nullptr ? 0 : communicator->rank());
  const std::int64_t begin = args.rank_begin[rank];
  const std::int64_t num_tokens = args.rank_begin[rank + 1] - begin;
  const std::int64_t hidden = test.layer.experts.hidden;
  const std::int64_t top_k = test.layer.router.top_k;
  const auto x = encode(test.tokens, std::span(problem.tokens)
                                         .subspan(static_cast<std::size_t>(begin * hidden),
                                                  static_cast<std::size_t>(num_tokens * hidden)));
  RankResult result;
  // All ones: NaN in every type, so that an element that is not written shows.
  result.out.assign(static_cast<std::size_t>(num_tokens * hidden * size_of(test.output)),
                    std::byte{0xff});
  ForwardArgs forward{.tokens = {x.data(), test.tokens, num_tokens, hidden},
                      .out = {result.out.data(), test.output, num_tokens, hidden},
                      .record = &result.record};
  if (test.given != Given::kNothing) {
    forward.expert = {problem.given_expert.data() + begin * top_k, {num_tokens, top_k}};
    forward.weight = {problem.given_weight.data() + begin * top_k, {num_tokens, top_k}};
  }
  MoeLayer layer(problem.model, options_of(test, args), communicator);
  for (int call = 0; call < args.calls; ++call) layer.forward(forward);
  result.traffic = layer.traffic();
  result.rows_used = layer.rows_used();
  result.rows_executed = layer.rows_executed();
  return result;
}

}  // namespace

RunResult run_layer(const Problem& problem, const RunArgs& args) {
  RunResult result;
  const auto num_ranks = static_cast<int>(args.rank_begin.size()) - 1;
  result.ranks.resize(static_cast<std::size_t>(num_ranks));
  try {
    if (num_ranks > 1) {
      run_ranks(
          num_ranks,
          [&](Communicator& communicator) {
            result.ranks[static_cast<std::size_t>(communicator.rank())] =
                run_rank(problem, args, &communicator);
          },
          args.timeout);
    } else if (problem.test.seed % 2 == 0) {
      const auto alone = make_single_rank();
      result.ranks[0] = run_rank(problem, args, alone.get());
    } else {
      result.ranks[0] = run_rank(problem, args, nullptr);
    }
  } catch (const Error& error) {
    result.error = error;
  }
  return result;
}

}  // namespace switchyard::verify

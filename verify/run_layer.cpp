// A problem through the layer, on one rank or several.
#include "verify/run_layer.hpp"

#include <algorithm>

#include "comm/ranks/gather.hpp"
#include "layer/packed_result.hpp"
#include "switchyard/comm.hpp"
#include "switchyard/device.hpp"

namespace switchyard::verify {
namespace {

using nlohmann::json;

RankResult run_rank(const Problem& problem, const RunArgs& args, Communicator* communicator) {
  const Case& test = problem.test;
  const auto rank = static_cast<std::size_t>(communicator == nullptr ? 0 : communicator->rank());
  if (args.backend == Backend::kCuda) use_gpu_of_rank(static_cast<int>(rank));
  const std::int64_t begin = args.rank_begin[rank];
  const std::int64_t num_tokens = args.rank_begin[rank + 1] - begin;
  const std::int64_t hidden = test.layer.experts.hidden;
  const std::int64_t top_k = test.layer.router.top_k();
  const auto x = encode(test.tokens, std::span(problem.tokens)
                                         .subspan(static_cast<std::size_t>(begin * hidden),
                                                  static_cast<std::size_t>(num_tokens * hidden)));
  RankResult result;
  // All ones: NaN in every type, so that an element that is not written shows.
  result.out.assign(static_cast<std::size_t>(num_tokens * hidden * size_of(test.output)),
                    std::byte{0xff});
  ForwardArgs forward{.tokens = {x.data(), test.tokens, num_tokens, hidden},
                      .out = {result.out.data(), test.output, num_tokens, hidden},
                      .request = request_of(problem, begin, begin + num_tokens)};
  forward.request.record = &result.record;
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

json to_json(const RankResult& r) {
  return {{"out", pack_array(r.out)},
          {"record", pack_record(r.record)},
          {"traffic", pack_traffic(r.traffic)},
          {"used", r.rows_used},
          {"executed", r.rows_executed}};
}

RankResult rank_result_of(const json& packed) {
  RankResult r;
  r.out = array_of<std::byte>(packed.at("out"));
  r.record = record_of(packed.at("record"));
  r.traffic = traffic_of(packed.at("traffic"));
  r.rows_used = packed.at("used");
  r.rows_executed = packed.at("executed");
  return r;
}

json to_json(const Error& error) {
  const std::string opening = std::string(switchyard::to_string(error.code())) + ": ";
  std::string text = error.what();
  if (text.starts_with(opening)) text.erase(0, opening.size());
  return {{"code", static_cast<int>(error.code())}, {"text", text}};
}

/// One of the ranks is this process. Either all ranks fail or none: behind a failure the barrier
/// cannot be passed.
RunResult run_process(const Problem& problem, const RunArgs& args) {
  Communicator& group = *args.group;
  group.set_timeout(args.timeout);
  RunResult result;
  json said;
  try {
    said = to_json(run_rank(problem, args, &group));
    group.barrier("end of a case");
  } catch (const Error& error) {
    result.error = error;
    said = {{"error", to_json(error)}};
    group.give_up(error.what());
    group.recover();
  }
  const auto parts = gather(group, pack_message(said));
  for (const auto& part : parts) {
    const json message = unpack_message(part);
    if (!message.contains("error")) {
      result.ranks.push_back(rank_result_of(message));
      continue;
    }
    // A timeout is mostly what another rank's error made of this one.
    const json& text = message.at("error");
    const Error error(static_cast<ErrorCode>(text.at("code").get<int>()), text.at("text"));
    const bool first = &part == parts.data();
    if (first || result.error->code() == ErrorCode::kTimeout) result.error = error;
  }
  return result;
}

}  // namespace

LayerOptions options_of(const Case& test, const RunArgs& args) {
  LayerOptions options;
  options.backend = args.backend;
  options.device_engine = args.device_engine;
  options.compute = test.fp8_rows ? DType::kF8E4M3 : test.compute;
  options.weights = test.weights;
  options.layout = test.layout;
  if (test.capacity_factor > 0) options.capacity_factor = test.capacity_factor;
  options.drop_policy = test.drop_policy;
  options.combine_wire = test.wire;
  options.dispatch_wire = dispatch_wire_of(test);
  options.batch_invariant = test.batch_invariant;
  options.rank_invariant = test.rank_invariant;
  options.num_threads = args.threads;
  options.max_tokens = 1;
  for (std::size_t r = 1; r < args.rank_begin.size(); ++r) {
    options.max_tokens = std::max(options.max_tokens, args.rank_begin[r] - args.rank_begin[r - 1]);
  }
  return options;
}

RunResult run_layer(const Problem& problem, const RunArgs& args) {
  if (args.group != nullptr && args.rank_begin.size() > 2) return run_process(problem, args);
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

// A layer on its ranks, run after run. Each rank is one thread here, or one process of a launcher;
// what it has done is put together at the end.
#include "bench/layer/layer_run.hpp"

#include <algorithm>

#include "bench/layer/router_alone.hpp"
#include "bench/measure/rank_result.hpp"
#include "bench/measure/run_clock.hpp"
#include "bench/measure/stage_memory.hpp"
#include "comm/ranks/gather.hpp"
#include "switchyard/device.hpp"

namespace switchyard::bench {
namespace {

template <typename T>
Matrix<const T> rows_of(Matrix<const T> matrix, std::int64_t begin, std::int64_t end) {
  if (matrix.data == nullptr) return {};
  return {matrix.row(begin), {end - begin, matrix.shape[1]}};
}

/// Of one rank's tokens.
RouteRequest request_of(RouteRequest request, std::int64_t begin, std::int64_t end) {
  request.first_token = begin;
  if (request.token_ids.data != nullptr) {
    request.token_ids = {request.token_ids.data + begin, {end - begin}};
  }
  return request;
}

/// The time of rank 0.
std::chrono::duration<double> agreed(Communicator* communicator,
                                     std::chrono::duration<double> time) {
  if (communicator == nullptr) return time;
  return std::chrono::duration<double>(from_first(*communicator, time.count()));
}

RankResult run_rank(const LayerRunArgs& args, Communicator* communicator, int threads) {
  const int rank = communicator == nullptr ? 0 : communicator->rank();
  if (communicator != nullptr && args.options.backend == Backend::kCuda) use_gpu_of_rank(rank);
  const std::int64_t num_tokens = args.tokens.rows;
  const std::int64_t begin = first_token(num_tokens, rank, args.num_ranks);
  const std::int64_t end = first_token(num_tokens, rank + 1, args.num_ranks);
  LayerOptions options = args.options;
  options.num_threads = threads;
  options.max_tokens =
      std::max<std::int64_t>(1, (num_tokens + args.num_ranks - 1) / args.num_ranks);
  RankResult result;
  const auto clock = make_run_clock(options.backend, result.times, [communicator] {
    if (communicator != nullptr) communicator->barrier("graphs");
  });
  const std::int64_t held_before = device_bytes();
  std::vector<MoeLayer> layers;
  int copies = args.copies;
  if (communicator != nullptr) copies = static_cast<int>(from_first(*communicator, copies));
  for (int copy = 0; copy < copies; ++copy) {
    layers.emplace_back(*args.model, options, communicator);
  }
  const Backend backend = options.backend;
  StageMemory memory(backend);
  const ConstRawMatrix tokens =
      memory.place({args.tokens.row(begin), args.tokens.dtype, end - begin, args.tokens.cols});
  result.compute = layers.front().compute_dtype();
  const std::int64_t out_bytes = tokens.rows * tokens.cols * size_of(args.out);
  const RawMatrix out{memory.make(out_bytes), args.out, tokens.rows, tokens.cols};
  ForwardArgs forward{
      .tokens = tokens,
      .out = out,
      .expert = memory.place(rows_of(args.expert, begin, end)),
      .weight = memory.place(rows_of(args.weight, begin, end)),
      .request = request_of(args.request, begin, end),
  };
  forward.request.token_ids = memory.place(forward.request.token_ids);
  std::unique_ptr<RouterAlone> router;
  if (args.route_too) router = std::make_unique<RouterAlone>(*args.model, tokens, backend, threads);
  std::unique_ptr<TrainingPass> training;
  if (args.pass != Pass::kForward) {
    training = std::make_unique<TrainingPass>(
        args.model->config, layers.front().weights().num_local(), result.compute, args.recompute,
        forward.expert.data == nullptr, backend);
    forward.saved = &training->saved();
    forward.tokens_stay = true;  // as autograd has them anyway
  }
  std::vector<char> inference(static_cast<std::size_t>(copies));  // a key of each layer's graph
  MoeLayer* measured = nullptr;
  bool first = true;
  const auto go_there = [&](StageRecorder* recorder, void* stream, bool records) {
    forward.recorder = recorder;
    forward.stream = stream;
    forward.request.record = first && records ? &result.record : nullptr;
    measured->forward(forward);
  };
  if (args.pass == Pass::kBackward) {  // which uses up what a forward has saved
    clock->prepare_by([&] {
      go_there(nullptr, nullptr, true);
      measured->check();
    });
  }
  RunCounter counter(args.count);
  for (int run = 0; run < counter.total(); ++run) {
    if (rank == 0 && args.between) args.between();
    if (communicator != nullptr) communicator->barrier("start of a run");
    if (run == counter.warmup()) result.times.forget();
    result.times.start_run();
    MoeLayer& layer = layers[static_cast<std::size_t>(run % copies)];
    measured = &layer;
    first = run == 0;
    if (args.beside_inference) {
      ForwardArgs plain = forward;
      plain.saved = nullptr;
      plain.recorder = nullptr;
      plain.request.training = false;
      plain.request.record = nullptr;
      const auto call = [&](StageRecorder*, void* stream) {
        plain.stream = stream;
        layer.forward(plain);
      };
      const void* const key = &inference[static_cast<std::size_t>(run % copies)];
      result.times.add(kInferenceStage, {}, clock->run_whole(key, call));
      layer.check();
    }
    const double us = clock->run(&layer, [&](StageRecorder* recorder, void* stream) {
      if (router) router->run(recorder, stream);
      if (args.pass != Pass::kBackward) go_there(recorder, stream, recorder != nullptr);
      // Any numbers will do for the gradient of the output: the tokens are such.
      if (args.pass == Pass::kBackward || args.pass == Pass::kBoth) {
        training->backward(layer, tokens, recorder, stream);
      }
    });
    layer.check();
    result.times.add("layer", {}, us);
    const std::chrono::duration<double, std::micro> time(us);
    if (run == 0 && counter.wants_time()) counter.set_time(agreed(communicator, time));
    result.traffic = layer.traffic();
    result.rows_used = layer.rows_used();
    result.rows_executed = layer.rows_executed();
  }
  result.times.count_rows(result.rows_used, result.rows_executed);
  if (training) {
    result.saved_bytes = training->saved().bytes();
    result.gradient_bytes = training->gradient_bytes();
    if (communicator == nullptr && backend == Backend::kCuda) {
      result.device_bytes = device_bytes() - held_before - memory.bytes();
    }
  }
  result.out.resize(static_cast<std::size_t>(out_bytes));
  memory.fetch(result.out.data(), out.data, out_bytes);
  if (args.chained > 0 && communicator == nullptr) {
    constexpr int kRepeats = 31;
    const auto chained = [&](int i, void* stream) {
      const auto at = static_cast<std::size_t>(i % copies);
      layers[at].forward({.tokens = tokens, .out = out, .stream = stream});
    };
    result.chain = clock->run_chain(args.chained, kRepeats, chained);
    for (MoeLayer& layer : layers) layer.check();
  }
  return result;
}

template <typename T>
void append(std::vector<T>& to, const std::vector<T>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

void add_counts(std::vector<std::int64_t>& sum, const std::vector<std::int64_t>& counts) {
  sum.resize(std::max(sum.size(), counts.size()));
  for (std::size_t e = 0; e < counts.size(); ++e) sum[e] += counts[e];
}

/// What the ranks have of each iteration of a chain follows that of the one before.
template <typename T>
void in_turns(std::vector<T>& to, const std::vector<RankResult>& ranks, std::int64_t gates,
              std::vector<T> RoutingRecord::*part) {
  for (std::int64_t c = 0; c < gates; ++c) {
    for (const RankResult& rank : ranks) {
      const std::vector<T>& from = rank.record.*part;
      const std::int64_t size = std::ssize(from) / gates;
      to.insert(to.end(), from.begin() + c * size, from.begin() + (c + 1) * size);
    }
  }
}

LayerRunResult put_together(const LayerRunArgs& args, std::vector<RankResult> ranks) {
  LayerRunResult whole;
  std::vector<StageTimes> times;
  for (int rank = 0; rank <= args.num_ranks; ++rank) {
    whole.rank_begin.push_back(first_token(args.tokens.rows, rank, args.num_ranks));
  }
  const std::int64_t gates = args.model->config.router.num_gates();
  in_turns(whole.record.expert, ranks, gates, &RoutingRecord::expert);
  in_turns(whole.record.weight, ranks, gates, &RoutingRecord::weight);
  in_turns(whole.record.kept, ranks, gates, &RoutingRecord::kept);
  for (RankResult& part : ranks) {
    append(whole.out, part.out);
    add_counts(whole.record.counts, part.record.counts);
    add_counts(whole.record.counts_kept, part.record.counts_kept);
    whole.rows_used += part.rows_used;
    whole.rows_executed += part.rows_executed;
    times.push_back(std::move(part.times));
  }
  whole.traffic = ranks.front().traffic;
  whole.compute = ranks.front().compute;
  whole.saved_bytes = ranks.front().saved_bytes;
  whole.chain = ranks.front().chain;
  if (ranks.size() == 1) {
    whole.gradient_bytes = ranks.front().gradient_bytes;
    whole.device_bytes = ranks.front().device_bytes;
  }
  whole.stages = merge_ranks(times);
  layer_last(whole.stages);
  return whole;
}

}  // namespace

std::int64_t first_token(std::int64_t num_tokens, int rank, int num_ranks) {
  return rank * num_tokens / num_ranks;
}

LayerRunResult run_layer(const LayerRunArgs& args) {
  if (args.world != nullptr) {
    args.world->set_timeout(args.timeout);
    RankResult own = run_rank(args, args.world, args.num_threads);
    std::vector<RankResult> all;
    for (const auto& part : gather(*args.world, to_bytes(own))) {
      all.push_back(rank_result_from(part));
    }
    if (all.empty()) all.push_back(std::move(own));
    return put_together(args, std::move(all));
  }
  std::vector<RankResult> ranks(static_cast<std::size_t>(args.num_ranks));
  const auto threads_of = [&](int rank) {  // at least one each
    const auto share = [&](int r) { return r * args.num_threads / args.num_ranks; };
    return std::max(1, share(rank + 1) - share(rank));
  };
  if (args.num_ranks == 1) {
    ranks[0] = run_rank(args, nullptr, args.num_threads);
  } else {
    run_ranks(
        args.num_ranks,
        [&](Communicator& communicator) {
          ranks[static_cast<std::size_t>(communicator.rank())] =
              run_rank(args, &communicator, threads_of(communicator.rank()));
        },
        args.timeout);
  }
  return put_together(args, std::move(ranks));
}

}  // namespace switchyard::bench

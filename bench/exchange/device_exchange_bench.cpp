// Dispatch and combine between the GPUs of one host, one rank a GPU, ranks as threads: medians of
// the slowest rank, by mode, tokens, wire and number of blocks. Random distinct experts, uniform or
// skewed, every rank with all its tokens; rows that are already sums are fetched home (pull), or
// sent (push). 16 exchanges chained in a graph, where they can be captured.
#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "bench/exchange/device_chain.hpp"
#include "bench/exchange/lines.hpp"
#include "bench/exchange/routing.hpp"
#include "bench/peers/nccl_all_to_all.hpp"
#include "comm/device/device_exchange.hpp"
#include "comm/device/limits.hpp"
#include "core/gpu/device_buffer.hpp"
#include "switchyard/names.hpp"

namespace switchyard {
namespace {

struct Result {
  SlowestTimes dispatch;
  SlowestTimes pair;  ///< By pull, where there is one; else by push.
  SlowestTimes pair_by_push;
  SlowestTimes each_pair;
  bool pulls = false;
};

/// What the command line says.
struct BenchOptions {
  DeviceEngine engine = DeviceEngine::kPeer;
  bool peer_nccl = false;
  bool few = false;
  bool many = false;
  bool skew = false;
};

/// The rows between ranks that the kernels have counted are those of the routing.
void check_rows(const DeviceExpertParallel& exchange, const DeviceReceived& received,
                const ExchangeRouting& routing, cudaStream_t stream) {
  std::vector<std::int64_t> counts(routing.rows.size());
  SWITCHYARD_CUDA(cudaMemcpyAsync(counts.data(), received.counts, counts.size() * 8,
                                  cudaMemcpyDeviceToHost, stream));
  SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
  exchange.check();
  const Traffic traffic = exchange.traffic(counts.data());
  for (std::size_t pair = 0; pair < counts.size(); ++pair) {
    if (traffic.rows[pair] == routing.rows[pair]) continue;
    fail(ErrorCode::kCommunication, "pair {} of ranks has moved {} rows, the routing has {}", pair,
         traffic.rows[pair], routing.rows[pair]);
  }
}

void measure(Communicator& comm, const ExchangePoint& point, DeviceEngine engine,
             const ExchangeRouting& routing, Result& result) {
  const auto& expert = routing.expert[static_cast<std::size_t>(comm.rank())];
  SWITCHYARD_CUDA(cudaSetDevice(comm.rank()));
  cudaStream_t stream = nullptr;
  SWITCHYARD_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const std::int64_t tokens = point.tokens;
  DeviceBuffer of_x, of_out, of_partials, of_ids, of_weight;
  const RawMatrix x = of_x.matrix(DType::kBF16, tokens, kBenchHidden);
  const RawMatrix out = of_out.matrix(DType::kBF16, tokens, kBenchHidden);
  std::byte* const partials = of_partials.reserve(comm.size() * tokens * kBenchHidden * 2);
  const auto ids = of_ids.matrix<std::int32_t>(tokens, kBenchTopK);
  const auto weight = of_weight.matrix<float>(tokens, kBenchTopK);
  SWITCHYARD_CUDA(cudaMemcpy(ids.data, expert.data(), expert.size() * 4, cudaMemcpyHostToDevice));
  {
    DeviceExchange exchange(
        comm,
        {.num_experts = kBenchExperts,
         .top_k = kBenchTopK,
         .hidden = kBenchHidden,
         .max_tokens = tokens,
         .dtype = DType::kBF16,
         .dispatch_wire = point.wire,
         .combine_wire = DType::kBF16},
        {.device = comm.rank(), .mode = point.mode, .engine = engine, .ctas = point.ctas});
    const Execution execution{.backend = Backend::kCuda, .stream = stream};
    const auto dispatch = [&] {
      return exchange.dispatch({.x = x, .expert = ids, .weight = weight, .execution = execution});
    };
    const auto combine = [&](const DeviceReceived& received, void* sums) {
      exchange.combine(
          {.partials = {static_cast<std::byte*>(sums), DType::kBF16, received.x.rows, kBenchHidden},
           .out = out,
           .execution = execution});
    };
    const bool many = point.mode == ExchangeMode::kThroughput;
    const ChainArgs chain{.stream = stream,
                          .in_graph = !many || exchange.engine() != DeviceEngine::kNcclPairs,
                          .check = [&] { exchange.check(); }};
    const DeviceReceived first = dispatch();
    check_rows(exchange, first, routing, stream);
    combine(first, partials);
    // Few tokens owe their combine.
    if (many)
      time_chain(
          comm, chain, [&] { dispatch(); }, result.dispatch);
    void* const window = exchange.place_of_partials().data;
    const bool pulls = window != nullptr;
    if (pulls) {
      if (comm.rank() == 0) result.pulls = true;
      time_chain(
          comm, chain, [&] { combine(dispatch(), window); }, result.pair);
    }
    if (!pulls || !point.for_bar) {
      time_chain(
          comm, chain, [&] { combine(dispatch(), partials); },
          pulls ? result.pair_by_push : result.pair);
    }
    if (!point.for_bar) {
      time_each(
          comm, chain, [&] { combine(dispatch(), pulls ? window : partials); }, result.each_pair);
    }
    comm.barrier("done");
  }
  cudaStreamDestroy(stream);
}

/// Who goes where, and NCCL's times by tokens, skew and wire: they do not depend on the rest.
class Inputs {
 public:
  Inputs(int ranks, bool peer_nccl) : ranks_(ranks), wanted_(peer_nccl) {}
  const ExchangeRouting& routing(const ExchangePoint& point) {
    const auto [at, made] = routing_.try_emplace({point.tokens, std::string(point.skew)});
    if (made) {
      at->second = make_exchange_routing({.num_tokens = point.tokens,
                                          .num_experts = kBenchExperts,
                                          .top_k = kBenchTopK,
                                          .num_ranks = ranks_,
                                          .skew = std::string(point.skew)});
    }
    return at->second;
  }
  /// Null: not wanted.
  NcclAllToAllTimes* nccl(const ExchangePoint& point) {
    if (!wanted_) return nullptr;
    const auto key =
        std::tuple(point.tokens, std::string(point.skew), static_cast<int>(point.wire));
    if (!times_.contains(key)) {
      const NcclAllToAllArgs args{.rows = routing(point).rows,
                                  .dispatch_row_bytes = bench_row_bytes(point.wire),
                                  .combine_row_bytes = bench_row_bytes(DType::kBF16)};
      NcclAllToAllTimes& times = times_[key];
      run_ranks(
          ranks_, [&](Communicator& comm) { measure_nccl_all_to_all(comm, args, times); },
          std::chrono::seconds(30));
    }
    return &times_[key];
  }

 private:
  int ranks_;
  bool wanted_;
  std::map<std::pair<std::int64_t, std::string>, ExchangeRouting> routing_;
  std::map<std::tuple<std::int64_t, std::string, int>, NcclAllToAllTimes> times_;
};

void report(int ranks, const ExchangePoint& point, const BenchOptions& options, Inputs& inputs) {
  const ExchangeRouting& routing = inputs.routing(point);
  Result result;
  run_ranks(
      ranks, [&](Communicator& comm) { measure(comm, point, options.engine, routing, result); },
      std::chrono::seconds(30));
  NcclAllToAllTimes* const nccl = inputs.nccl(point);
  const auto median = [](SlowestTimes& times) { return times.empty() ? 0 : times.median(); };
  print_exchange(point, options.engine, routing,
                 {.dispatch = median(result.dispatch),
                  .pair = median(result.pair),
                  .pulls = result.pulls,
                  .pair_by_push = median(result.pair_by_push),
                  .pair_p50 = median(result.each_pair),
                  .pair_p99 = result.each_pair.empty() ? 0 : result.each_pair.quantile(0.99),
                  .nccl_dispatch = nccl == nullptr ? 0 : nccl->dispatch.median(),
                  .nccl_pair = nccl == nullptr ? 0 : nccl->pair.median()});
}

/// R7: skewed routing, and uniform beside it where no other point is.
void add_skewed(const BenchOptions& options, std::vector<ExchangePoint>& points) {
  const bool low_latency_too = !options.many;
  for (const DType wire : {DType::kBF16, DType::kF8E4M3}) {
    for (const std::string_view skew :
         {kUniformSkew, std::string_view("zipf:1.0"), std::string_view("hot:0.3")}) {
      if (skew == kUniformSkew && !options.skew) continue;
      for (const int ctas : options.few ? std::vector{24} : std::vector{24, 64}) {
        points.push_back({4096, ExchangeMode::kThroughput, wire, ctas, skew, true});
      }
      if (low_latency_too) {
        points.push_back({128, ExchangeMode::kLowLatency, wire, 64, skew, true});
      }
    }
  }
}

/// Few: what the bars name. Many: only the mode for many tokens. By NCCL's sends the number of
/// blocks counts for little.
std::vector<ExchangePoint> points_of(const BenchOptions& options) {
  std::vector<ExchangePoint> points;
  if (options.skew) {
    add_skewed(options, points);
    return points;
  }
  const bool by_pairs = options.engine == DeviceEngine::kNcclPairs;
  const std::vector<int> ctas_of_many = by_pairs      ? std::vector{64}
                                        : options.few ? std::vector{16, 24}
                                                      : std::vector{4, 8, 16, 24, 32, 64};
  for (const DType wire : {DType::kBF16, DType::kF8E4M3}) {
    for (const int ctas : ctas_of_many) {
      points.push_back({4096, ExchangeMode::kThroughput, wire, ctas});
    }
  }
  const bool few = options.few || by_pairs;
  for (const std::int64_t tokens :
       few ? std::vector<std::int64_t>{8, 128} : std::vector<std::int64_t>{8, 128, 512}) {
    if (options.many) continue;
    for (const int ctas : few ? std::vector{64} : std::vector{4, 8, 16, 32, 64, 128}) {
      points.push_back({tokens, ExchangeMode::kLowLatency, DType::kF8E4M3, ctas});
    }
    points.push_back({tokens, ExchangeMode::kLowLatency, DType::kBF16, 64});
    if (!few) points.push_back({tokens, ExchangeMode::kThroughput, DType::kF8E4M3, 64});
  }
  if (!by_pairs) add_skewed(options, points);
  return points;
}

int run(const BenchOptions& options) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    fmt::print(stderr, "no GPU\n");
    return EXIT_FAILURE;
  }
  const int ranks = std::min(devices, kMaxDeviceRanks);
  try {
    Inputs inputs(ranks, options.peer_nccl);
    for (const ExchangePoint& point : points_of(options)) report(ranks, point, options, inputs);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}

}  // namespace
}  // namespace switchyard

int main(int argc, char** argv) {
  CLI::App app("Dispatch and combine between the GPUs of one host");
  switchyard::BenchOptions options;
  using switchyard::DeviceEngine;
  std::vector<std::string> engines;
  for (const DeviceEngine one :
       {DeviceEngine::kPeer, DeviceEngine::kNccl, DeviceEngine::kNcclPairs}) {
    engines.emplace_back(to_string(one));
  }
  std::string engine = to_string(options.engine);
  std::string peer;
  app.add_option("--engine", engine, "how GPUs reach each other's memory")
      ->check(CLI::IsMember(engines));
  app.add_option("--peer", peer, "nccl: its all-to-all with the same bytes, in the same run")
      ->check(CLI::IsMember({"nccl"}));
  auto* const few = app.add_flag("--few", options.few, "only what the bars name");
  app.add_flag("--many", options.many, "only 4096 tokens a rank")->excludes(few);
  app.add_flag("--skew", options.skew,
               "only what R7 asks of skewed routing, and uniform beside it");
  CLI11_PARSE(app, argc, argv);
  options.engine = switchyard::parse<DeviceEngine>(engine).value_or(options.engine);
  options.peer_nccl = peer == "nccl";
  return switchyard::run(options);
}

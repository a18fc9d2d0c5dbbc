// Dispatch and combine between the GPUs of one host, one rank a GPU, ranks as threads: medians of
// the slowest rank, by mode, tokens, wire and number of blocks. Random distinct experts, every rank
// with all its tokens; rows that are already sums are fetched home (pull), or sent (push). 16
// exchanges chained in a graph.
#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "bench/device_chain.hpp"
#include "bench/nccl_all_to_all.hpp"
#include "core/cuda_check.hpp"
#include "switchyard/device_expert_parallel.hpp"

namespace switchyard {
namespace {

constexpr std::int64_t kHidden = 7168;
constexpr std::int32_t kTopK = 8;
constexpr std::int32_t kExperts = 256;
/// All-to-all push between H200s of one host, 342 GB/s per GPU (measured 2026-11-21 with bulk
/// copies and nothing else): the limit of these figures.
constexpr double kPushBytesPerUs = 342e3;

struct Point {
  std::int64_t tokens;
  ExchangeMode mode;
  DType wire;
  int ctas;
};

void* device_memory(std::int64_t bytes) {
  void* memory = nullptr;
  SWITCHYARD_CUDA(cudaMalloc(&memory, static_cast<std::size_t>(bytes)));
  SWITCHYARD_CUDA(cudaMemset(memory, 0, static_cast<std::size_t>(bytes)));
  return memory;
}

/// Rows to each rank, one a token.
std::vector<std::int64_t> rows_to_ranks(const std::vector<std::int32_t>& expert, int ranks) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(ranks), 0);
  for (std::size_t t = 0; t < expert.size(); t += kTopK) {
    std::uint64_t to = 0;
    for (std::size_t k = 0; k < kTopK; ++k) {
      to |= std::uint64_t{1} << (expert[t + k] * ranks / kExperts);
    }
    for (int rank = 0; rank < ranks; ++rank) {
      rows[static_cast<std::size_t>(rank)] += static_cast<std::int64_t>(to >> rank & 1U);
    }
  }
  return rows;
}

std::vector<std::int32_t> random_experts(std::int64_t tokens, int rank) {
  std::mt19937 random(static_cast<unsigned>(rank) + 1);
  std::vector<std::int32_t> ids(kExperts);
  std::iota(ids.begin(), ids.end(), 0);
  std::vector<std::int32_t> expert;
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::shuffle(ids.begin(), ids.end(), random);
    expert.insert(expert.end(), ids.begin(), ids.begin() + kTopK);
  }
  return expert;
}

/// [R*R] rows from s to d.
std::vector<std::int64_t> all_rows(std::int64_t tokens, int ranks) {
  std::vector<std::int64_t> rows;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto of_rank = rows_to_ranks(random_experts(tokens, rank), ranks);
    rows.insert(rows.end(), of_rank.begin(), of_rank.end());
  }
  return rows;
}

/// Of the rank that sends most to others.
std::int64_t most_remote_rows(const std::vector<std::int64_t>& rows, int ranks) {
  std::int64_t most = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto* of_rank = rows.data() + std::ptrdiff_t{rank} * ranks;
    most =
        std::max(most, std::accumulate(of_rank, of_rank + ranks, std::int64_t{0}) - of_rank[rank]);
  }
  return most;
}

/// Bytes of a row's values, and of their scales.
std::int64_t row_bytes(DType wire) {
  return kHidden * size_of(wire) + (wire == DType::kF8E4M3 ? kHidden / 128 * 4 : 0);
}

struct Result {
  SlowestTimes dispatch;
  SlowestTimes pair;  ///< By pull, where there is one; else by push.
  SlowestTimes pair_by_push;
  bool pulls = false;
};

/// What the command line says.
struct BenchOptions {
  DeviceEngine engine = DeviceEngine::kPeer;
  bool peer_nccl = false;
  bool few = false;
  bool many = false;
};

void measure(Communicator& comm, const Point& point, DeviceEngine engine, Result& result) {
  SWITCHYARD_CUDA(cudaSetDevice(comm.rank()));
  cudaStream_t stream = nullptr;
  SWITCHYARD_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const std::int64_t tokens = point.tokens;
  const std::vector<std::int32_t> expert = random_experts(tokens, comm.rank());
  void* x = device_memory(tokens * kHidden * 2);
  void* out = device_memory(tokens * kHidden * 2);
  void* partials = device_memory(comm.size() * tokens * kHidden * 2);
  void* ids = device_memory(tokens * kTopK * 4);
  void* weight = device_memory(tokens * kTopK * 4);
  SWITCHYARD_CUDA(cudaMemcpy(ids, expert.data(), expert.size() * 4, cudaMemcpyHostToDevice));
  {
    DeviceExpertParallel exchange(
        comm,
        {.num_experts = kExperts,
         .top_k = kTopK,
         .hidden = kHidden,
         .max_tokens = tokens,
         .dtype = DType::kBF16,
         .dispatch_wire = point.wire,
         .combine_wire = DType::kBF16},
        {.device = comm.rank(), .mode = point.mode, .engine = engine, .ctas = point.ctas});
    const Execution execution{.backend = Backend::kCuda, .stream = stream};
    const auto dispatch = [&] {
      return exchange.dispatch({.x = {static_cast<std::byte*>(x), DType::kBF16, tokens, kHidden},
                                .expert = {static_cast<std::int32_t*>(ids), {tokens, kTopK}},
                                .weight = {static_cast<float*>(weight), {tokens, kTopK}},
                                .execution = execution});
    };
    const auto combine = [&](const DeviceReceived& received, void* sums) {
      exchange.combine(
          {.partials = {static_cast<std::byte*>(sums), DType::kBF16, received.x.rows, kHidden},
           .out = {static_cast<std::byte*>(out), DType::kBF16, tokens, kHidden},
           .execution = execution});
    };
    const auto check = [&] { exchange.check(); };
    if (point.mode == ExchangeMode::kThroughput) {  // the other mode owes its combine
      time_chain(
          comm, stream, [&] { dispatch(); }, check, result.dispatch);
    }
    void* const window = exchange.place_of_partials().data;
    if (window != nullptr) {
      if (comm.rank() == 0) result.pulls = true;
      time_chain(
          comm, stream, [&] { combine(dispatch(), window); }, check, result.pair);
    }
    time_chain(
        comm, stream, [&] { combine(dispatch(), partials); }, check,
        window != nullptr ? result.pair_by_push : result.pair);
    comm.barrier("done");
  }
  for (void* memory : {x, out, partials, ids, weight}) cudaFree(memory);
  cudaStreamDestroy(stream);
}

/// NCCL's times by tokens and wire: they do not depend on the rest.
class NcclPeer {
 public:
  NcclPeer(int ranks, bool wanted) : ranks_(ranks), wanted_(wanted) {}
  /// Null: not wanted.
  NcclAllToAllTimes* times(const Point& point) {
    if (!wanted_) return nullptr;
    const auto key = std::pair(point.tokens, static_cast<int>(point.wire));
    if (!times_.contains(key)) {
      const NcclAllToAllArgs args{.rows = all_rows(point.tokens, ranks_),
                                  .dispatch_row_bytes = row_bytes(point.wire),
                                  .combine_row_bytes = row_bytes(DType::kBF16)};
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
  std::map<std::pair<std::int64_t, int>, NcclAllToAllTimes> times_;
};

struct Line {
  const char* stage;
  const char* home;  ///< How sums come home; null: they do not.
  double us;
  double bytes;
  double peer_us;  ///< 0: none.
};

void print_line(const Line& line, int ranks, const Point& point, DeviceEngine engine) {
  const double limit = line.bytes / kPushBytesPerUs;
  const std::string peers =
      line.peer_us > 0 ? fmt::format("\"peers\":{{\"nccl\":{:.2f}}},", line.peer_us) : "";
  const std::string home = line.home != nullptr ? fmt::format(",\"home\":\"{}\"", line.home) : "";
  fmt::print(
      "{{\"stage\":\"{}\",\"backend\":\"cuda\",\"case\":{{\"E\":{},\"K\":{},\"H\":{},\"T\":{},"
      "\"R\":{},\"engine\":\"{}\",\"mode\":\"{}\",\"dispatch_wire\":\"{}\",\"combine_wire\":"
      "\"bf16\","
      "\"ctas\":{}{}}},\"samples\":{},\"median_us\":{:.2f},{}\"bytes\":{:.0f},\"gbps\":{:.1f},"
      "\"limit_us\":{:.2f},\"limit_by\":\"wire\",\"share\":{:.3f}}}\n",
      line.stage, kExperts, kTopK, kHidden, point.tokens, ranks,
      engine == DeviceEngine::kNccl ? "nccl" : "peer",
      point.mode == ExchangeMode::kLowLatency ? "low-latency" : "throughput", to_string(point.wire),
      point.ctas, home, kChainRepeats, line.us, peers, line.bytes, line.bytes / line.us / 1e3,
      limit, limit / line.us);
}

void report(int ranks, const Point& point, const BenchOptions& options, NcclPeer& nccl) {
  Result result;
  run_ranks(
      ranks, [&](Communicator& comm) { measure(comm, point, options.engine, result); },
      std::chrono::seconds(30));
  NcclAllToAllTimes* const peer = nccl.times(point);
  const std::int64_t rows = most_remote_rows(all_rows(point.tokens, ranks), ranks);
  const bool low_latency = point.mode == ExchangeMode::kLowLatency;
  const auto dispatch_bytes = static_cast<double>(rows * row_bytes(point.wire));
  const auto combine_bytes = static_cast<double>(rows * row_bytes(DType::kBF16));
  const double pair = result.pair.median();
  const double push = result.pulls ? result.pair_by_push.median() : pair;
  fmt::print("R{} T{:5} {:11} wire {:4} ctas {:3}  pair {:8.1f} us ({:5.1f} GB/s)", ranks,
             point.tokens, low_latency ? "low-latency" : "throughput", to_string(point.wire),
             point.ctas, pair, (dispatch_bytes + combine_bytes) / pair / 1e3);
  if (!low_latency) {
    const double dispatch = result.dispatch.median();
    fmt::print("  dispatch {:8.1f} us ({:5.1f} GB/s)  rest {:8.1f} us ({:5.1f} GB/s)", dispatch,
               dispatch_bytes / dispatch / 1e3, pair - dispatch,
               combine_bytes / (pair - dispatch) / 1e3);
    if (result.pulls) fmt::print("  by push {:8.1f} us", push - dispatch);
  }
  if (peer != nullptr) {
    fmt::print("  NCCL all-to-all: pair {:8.1f} us, dispatch {:8.1f} us", peer->pair.median(),
               peer->dispatch.median());
  }
  fmt::print("\n");
  const double peer_pair = peer == nullptr ? 0 : peer->pair.median();
  if (result.pulls) {
    print_line({"dispatch+combine", "pull", pair, dispatch_bytes + combine_bytes, peer_pair}, ranks,
               point, options.engine);
  }
  print_line({"dispatch+combine", "push", push, dispatch_bytes + combine_bytes, peer_pair}, ranks,
             point, options.engine);
  if (!low_latency) {
    print_line({"dispatch", nullptr, result.dispatch.median(), dispatch_bytes,
                peer == nullptr ? 0 : peer->dispatch.median()},
               ranks, point, options.engine);
  }
  std::fflush(stdout);
}

/// Few: what the bars name. Many: only the mode for many tokens.
std::vector<Point> points_of(const BenchOptions& options) {
  std::vector<Point> points;
  for (const DType wire : {DType::kBF16, DType::kF8E4M3}) {
    for (const int ctas : options.few ? std::vector{16, 24} : std::vector{8, 16, 24, 32, 64}) {
      points.push_back({4096, ExchangeMode::kThroughput, wire, ctas});
    }
  }
  if (options.many) return points;
  for (const std::int64_t tokens :
       options.few ? std::vector<std::int64_t>{8, 128} : std::vector<std::int64_t>{8, 128, 512}) {
    for (const int ctas : options.few ? std::vector{64} : std::vector{16, 32, 64, 128}) {
      points.push_back({tokens, ExchangeMode::kLowLatency, DType::kF8E4M3, ctas});
    }
    points.push_back({tokens, ExchangeMode::kLowLatency, DType::kBF16, 64});
    if (!options.few) points.push_back({tokens, ExchangeMode::kThroughput, DType::kF8E4M3, 64});
  }
  return points;
}

int run(const BenchOptions& options) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    fmt::print(stderr, "no GPU\n");
    return EXIT_FAILURE;
  }
  const int ranks = std::min(devices, 8);
  try {
    NcclPeer nccl(ranks, options.peer_nccl);
    for (const Point& point : points_of(options)) report(ranks, point, options, nccl);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}

}  // namespace
}  // namespace switchyard

int main(int argc, char** argv) {
  using switchyard::DeviceEngine;
  CLI::App app("Dispatch and combine between the GPUs of one host");
  switchyard::BenchOptions options;
  std::string engine = "peer";
  std::string peer;
  app.add_option("--engine", engine, "how GPUs reach each other's memory")
      ->check(CLI::IsMember({"peer", "nccl"}));
  app.add_option("--peer", peer, "nccl: its all-to-all with the same bytes, in the same run")
      ->check(CLI::IsMember({"nccl"}));
  auto* const few = app.add_flag("--few", options.few, "only what the bars name");
  app.add_flag("--many", options.many, "only 4096 tokens a rank")->excludes(few);
  CLI11_PARSE(app, argc, argv);
  options.engine = engine == "nccl" ? DeviceEngine::kNccl : DeviceEngine::kPeer;
  options.peer_nccl = peer == "nccl";
  return switchyard::run(options);
}

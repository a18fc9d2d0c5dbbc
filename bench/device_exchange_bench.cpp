// Dispatch and combine between the GPUs of one host, one rank a GPU, ranks as threads: medians of
// the slowest rank, by mode, tokens, wire and number of blocks. Random distinct experts, every rank
// with all its tokens; combine sends rows that are already sums. 16 exchanges chained in a graph.
#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <random>
#include <vector>

#include "core/cuda_check.hpp"
#include "switchyard/device_expert_parallel.hpp"

namespace switchyard {
namespace {

constexpr std::int64_t kHidden = 7168;
constexpr std::int32_t kTopK = 8;
constexpr std::int32_t kExperts = 256;
constexpr int kChain = 16;
constexpr int kRepeats = 7;
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

/// Median over the repeats of the slowest rank's time for one exchange, us; the same on all ranks.
class Times {
 public:
  void add(int repeat, double us) {
    const std::lock_guard lock(mutex_);
    slowest_.resize(std::max(slowest_.size(), static_cast<std::size_t>(repeat) + 1), 0.0);
    double& slowest = slowest_[static_cast<std::size_t>(repeat)];
    slowest = std::max(slowest, us);
  }
  [[nodiscard]] double median() {
    std::ranges::sort(slowest_);
    return slowest_[slowest_.size() / 2];
  }

 private:
  std::mutex mutex_;
  std::vector<double> slowest_;
};

/// Tokens of a rank's routing that go to another rank, once per rank.
std::int64_t remote_rows(const std::vector<std::int32_t>& expert, int rank, int ranks) {
  std::int64_t rows = 0;
  for (std::size_t t = 0; t < expert.size(); t += kTopK) {
    std::uint64_t to = 0;
    for (std::size_t k = 0; k < kTopK; ++k) {
      to |= std::uint64_t{1} << (expert[t + k] * ranks / kExperts);
    }
    rows += std::popcount(to & ~(std::uint64_t{1} << rank));
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

struct Result {
  Times dispatch;
  Times pair;
  std::int64_t most_rows = 0;
};

void measure(Communicator& comm, const Point& point, Result& result) {
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
    DeviceExpertParallel exchange(comm,
                                  {.num_experts = kExperts,
                                   .top_k = kTopK,
                                   .hidden = kHidden,
                                   .max_tokens = tokens,
                                   .dtype = DType::kBF16,
                                   .dispatch_wire = point.wire,
                                   .combine_wire = DType::kBF16},
                                  {.device = comm.rank(), .mode = point.mode, .ctas = point.ctas});
    const Execution execution{.backend = Backend::kCuda, .stream = stream};
    const auto dispatch = [&] {
      return exchange.dispatch({.x = {static_cast<std::byte*>(x), DType::kBF16, tokens, kHidden},
                                .expert = {static_cast<std::int32_t*>(ids), {tokens, kTopK}},
                                .weight = {static_cast<float*>(weight), {tokens, kTopK}},
                                .execution = execution});
    };
    const auto combine = [&](const DeviceReceived& received) {
      exchange.combine(
          {.partials = {static_cast<std::byte*>(partials), DType::kBF16, received.x.rows, kHidden},
           .out = {static_cast<std::byte*>(out), DType::kBF16, tokens, kHidden},
           .execution = execution});
    };
    cudaEvent_t begin = nullptr;
    cudaEvent_t end = nullptr;
    SWITCHYARD_CUDA(cudaEventCreate(&begin));
    SWITCHYARD_CUDA(cudaEventCreate(&end));
    for (const bool pairs : {false, true}) {
      if (!pairs && point.mode == ExchangeMode::kLowLatency) continue;  // it owes its combine
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t exec = nullptr;
      SWITCHYARD_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      for (int i = 0; i < kChain; ++i) {
        const DeviceReceived received = dispatch();
        if (pairs) combine(received);
      }
      SWITCHYARD_CUDA(cudaStreamEndCapture(stream, &graph));
      SWITCHYARD_CUDA(cudaGraphInstantiate(&exec, graph, 0));
      SWITCHYARD_CUDA(cudaGraphUpload(exec, stream));
      for (int repeat = -2; repeat < kRepeats; ++repeat) {
        SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
        comm.barrier("repeat");
        SWITCHYARD_CUDA(cudaEventRecord(begin, stream));
        SWITCHYARD_CUDA(cudaGraphLaunch(exec, stream));
        SWITCHYARD_CUDA(cudaEventRecord(end, stream));
        SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
        exchange.check();
        float ms = 0;
        SWITCHYARD_CUDA(cudaEventElapsedTime(&ms, begin, end));
        if (repeat >= 0) (pairs ? result.pair : result.dispatch).add(repeat, ms * 1e3 / kChain);
      }
      comm.barrier("measured");
      cudaGraphExecDestroy(exec);
      cudaGraphDestroy(graph);
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    comm.barrier("done");
  }
  for (void* memory : {x, out, partials, ids, weight}) cudaFree(memory);
  cudaStreamDestroy(stream);
}

void report(int ranks, const Point& point) {
  Result result;
  run_ranks(ranks, [&](Communicator& comm) { measure(comm, point, result); });
  for (int rank = 0; rank < ranks; ++rank) {
    result.most_rows =
        std::max(result.most_rows, remote_rows(random_experts(point.tokens, rank), rank, ranks));
  }
  const bool low_latency = point.mode == ExchangeMode::kLowLatency;
  const double dispatch_bytes = static_cast<double>(result.most_rows * kHidden) *
                                (point.wire == DType::kF8E4M3 ? 1.03125 : 2.0);
  const double combine_bytes = static_cast<double>(result.most_rows * kHidden * 2);
  const double pair = result.pair.median();
  fmt::print("R{} T{:5} {:11} wire {:4} ctas {:3}  pair {:8.1f} us ({:5.1f} GB/s)", ranks,
             point.tokens, low_latency ? "low-latency" : "throughput", to_string(point.wire),
             point.ctas, pair, (dispatch_bytes + combine_bytes) / pair / 1e3);
  if (!low_latency) {
    const double dispatch = result.dispatch.median();
    fmt::print("  dispatch {:8.1f} us ({:5.1f} GB/s)  rest {:8.1f} us ({:5.1f} GB/s)", dispatch,
               dispatch_bytes / dispatch / 1e3, pair - dispatch,
               combine_bytes / (pair - dispatch) / 1e3);
  }
  fmt::print("\n");
  const auto line = [&](const char* stage, double us, double bytes) {
    const double limit = bytes / kPushBytesPerUs;
    fmt::print(
        "{{\"stage\":\"{}\",\"backend\":\"cuda\",\"case\":{{\"E\":{},\"K\":{},\"H\":{},\"T\":{},"
        "\"R\":{},\"mode\":\"{}\",\"dispatch_wire\":\"{}\",\"combine_wire\":\"bf16\",\"ctas\":{}}},"
        "\"samples\":{},\"median_us\":{:.2f},\"bytes\":{:.0f},\"gbps\":{:.1f},\"limit_us\":{:.2f},"
        "\"limit_by\":\"wire\",\"share\":{:.3f}}}\n",
        stage, kExperts, kTopK, kHidden, point.tokens, ranks,
        low_latency ? "low-latency" : "throughput", to_string(point.wire), point.ctas, kRepeats, us,
        bytes, bytes / us / 1e3, limit, limit / us);
  };
  line("dispatch+combine", pair, dispatch_bytes + combine_bytes);
  if (!low_latency) line("dispatch", result.dispatch.median(), dispatch_bytes);
  std::fflush(stdout);
}

}  // namespace
}  // namespace switchyard

int main() {
  using switchyard::DType;
  using switchyard::ExchangeMode;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    fmt::print(stderr, "no GPU\n");
    return EXIT_FAILURE;
  }
  const int ranks = std::min(devices, 8);
  try {
    for (const DType wire : {DType::kBF16, DType::kF8E4M3}) {
      for (const int ctas : {8, 16, 24, 32, 64}) {
        switchyard::report(ranks, {4096, ExchangeMode::kThroughput, wire, ctas});
      }
    }
    for (const std::int64_t tokens : {8, 128, 512}) {
      for (const int ctas : {16, 32, 64, 128}) {
        switchyard::report(ranks, {tokens, ExchangeMode::kLowLatency, DType::kF8E4M3, ctas});
      }
      switchyard::report(ranks, {tokens, ExchangeMode::kLowLatency, DType::kBF16, 64});
      switchyard::report(ranks, {tokens, ExchangeMode::kThroughput, DType::kF8E4M3, 64});
    }
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return EXIT_FAILURE;
  }
}

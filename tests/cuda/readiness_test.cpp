// The readiness counters of a dispatch, watched by another stream while it runs: what an overlap of
// the exchange with the experts waits for.
#include <cuda.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "testkit/gpu/device_checker.hpp"

namespace switchyard {
namespace {

using WaitValue = CUresult (*)(CUstream, CUdeviceptr, cuuint64_t, unsigned);

/// cuStreamWaitValue64, asked of the runtime: null where there is none.
WaitValue wait_value() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t status = cudaGetDriverEntryPointByVersion("cuStreamWaitValue64", &found, 12000,
                                                              cudaEnableDefault, &result);
  if (status != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<WaitValue>(found);
}

struct Events {
  Events() {
    for (cudaEvent_t* event : {&begin, &first_ready, &end}) SWITCHYARD_CUDA(cudaEventCreate(event));
  }
  ~Events() {
    for (cudaEvent_t event : {begin, first_ready, end}) cudaEventDestroy(event);
  }
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;
  [[nodiscard]] float share() const {
    float first = 0, all = 0;
    SWITCHYARD_CUDA(cudaEventElapsedTime(&first, begin, first_ready));
    SWITCHYARD_CUDA(cudaEventElapsedTime(&all, begin, end));
    return first / all;
  }
  cudaEvent_t begin = nullptr, first_ready = nullptr, end = nullptr;
};

/// Tokens below `end` of `source` that go to rank `to`, ascending.
std::vector<std::int64_t> tokens_to(const ExchangeProblem& problem, const RankInput& source, int to,
                                    std::int64_t end) {
  std::vector<std::int64_t> tokens;
  const std::int64_t top_k = problem.config.top_k;
  for (std::int64_t t = 0; t < std::min(end, source.num_tokens); ++t) {
    for (std::int64_t k = 0; k < top_k; ++k) {
      if (problem.rank_of(source.expert[static_cast<std::size_t>(t * top_k + k)]) != to) continue;
      tokens.push_back(t);
      break;
    }
  }
  return tokens;
}

/// The rows of the first chunk of rank `source` that the watching stream has copied are its tokens.
void check_rows(const ExchangeProblem& problem, const RankInput& source,
                const std::vector<std::int64_t>& tokens, const std::vector<std::byte>& rows) {
  const auto bytes = static_cast<std::size_t>(problem.config.hidden * 2);
  ASSERT_FALSE(tokens.empty());
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const std::byte* want = source.x.data() + static_cast<std::size_t>(tokens[i]) * bytes;
    ASSERT_EQ(std::memcmp(&rows[i * bytes], want, bytes), 0) << "row " << i;
  }
}

TEST(Readiness, TheFirstRowsOfAnotherRankAreThereBeforeAQuarterOfTheDispatch) {
  const int ranks = std::min(num_devices(), 4);
  if (ranks < 2) GTEST_SKIP() << "needs two GPUs";
  const WaitValue wait = wait_value();
  if (wait == nullptr) GTEST_SKIP() << "no cuStreamWaitValue64";
  const ExchangeProblem problem = problem_of(ranks, 64, 8, 7168, 4096);
  run_ranks(
      ranks,
      [&](Communicator& comm) {
        DeviceChecker checker(problem, comm, ExchangeMode::kThroughput);
        checker.run(0);
        const int source = (comm.rank() + 1) % ranks;
        const RankInput input = make_input(problem, source, 1);
        std::int64_t first_row = 0;  // of the source: behind all rows of the ranks before it
        for (int r = 0; r < source; ++r) {
          const RankInput other = make_input(problem, r, 1);
          first_row += std::ssize(tokens_to(problem, other, comm.rank(), other.num_tokens));
        }
        checker.set_input(1);
        cudaStream_t watching = nullptr;
        SWITCHYARD_CUDA(cudaStreamCreateWithFlags(&watching, cudaStreamNonBlocking));
        const Events events;
        const std::int64_t row_bytes = problem.config.hidden * 2;
        comm.barrier("ready");
        std::uint64_t dispatches = 1;
        for (int i = 0; i < 3; ++i, ++dispatches) checker.dispatch();  // so that all begin together
        SWITCHYARD_CUDA(cudaEventRecord(events.begin, checker.stream()));
        const DeviceReceived received = checker.dispatch();
        const DeviceReadiness readiness = checker.device_exchange().readiness();
        ++dispatches;
        SWITCHYARD_CUDA(cudaEventRecord(events.end, checker.stream()));

        const std::uint64_t* counter = readiness.ready + source * readiness.chunks_stride * 4;
        const std::uint64_t target =
            dispatches * static_cast<std::uint64_t>(checker.device_exchange().ctas());
        ASSERT_EQ(wait(watching, reinterpret_cast<CUdeviceptr>(counter), target,
                       CU_STREAM_WAIT_VALUE_GEQ),
                  CUDA_SUCCESS);
        SWITCHYARD_CUDA(cudaEventRecord(events.first_ready, watching));
        const std::vector<std::int64_t> tokens =
            tokens_to(problem, input, comm.rank(), readiness.tokens_per_chunk);
        const auto rows = copy_out<std::byte>(received.x.data + first_row * row_bytes,
                                              std::ssize(tokens) * row_bytes, watching);
        checker.synchronize();
        EXPECT_GT(readiness.chunks, 4);
        check_rows(problem, input, tokens, rows);
        EXPECT_LT(events.share(), 0.25F);
        RecordProperty("share", std::to_string(events.share()));
        fmt::print("rank {}: first rows of rank {} after {:.1f}% of the dispatch\n", comm.rank(),
                   source, 100 * events.share());
        comm.barrier("watched");
        cudaStreamDestroy(watching);
      },
      std::chrono::seconds(60));
}

}  // namespace
}  // namespace switchyard

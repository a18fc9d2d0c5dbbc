// The usual all-to-all as a peer: rows lie in the order of their destinations already.
#include "bench/nccl_all_to_all.hpp"

#include <fmt/core.h>

#include <utility>

#include "comm/nccl_pairs.hpp"
#include "core/cuda_check.hpp"

namespace switchyard {
namespace {

/// What one rank sends and receives in one direction.
struct Direction {
  std::vector<RankBytes> sends;
  std::vector<RankBytes> receives;
  std::size_t sent = 0;
  std::size_t received = 0;
};

/// `transposed`: rows go home.
Direction direction_of(const NcclAllToAll& args, int rank, int ranks, bool transposed,
                       std::int64_t row_bytes) {
  Direction direction;
  const auto bytes = [&](int from, int to) {
    if (transposed) std::swap(from, to);
    return static_cast<std::size_t>(args.rows[static_cast<std::size_t>(from * ranks + to)] *
                                    row_bytes);
  };
  for (int i = 1; i < ranks; ++i) {
    const int to = (rank + i) % ranks;
    const int from = (rank + ranks - i) % ranks;
    direction.sends.push_back({.rank = to, .bytes = bytes(rank, to)});
    direction.receives.push_back({.rank = from, .bytes = bytes(from, rank)});
    direction.sent += bytes(rank, to);
    direction.received += bytes(from, rank);
  }
  return direction;
}

std::byte* device_bytes(std::size_t bytes) {
  void* memory = nullptr;
  SWITCHYARD_CUDA(cudaMalloc(&memory, bytes + 16));
  SWITCHYARD_CUDA(cudaMemset(memory, 0, bytes + 16));
  return static_cast<std::byte*>(memory);
}

void place(std::vector<RankBytes>& parts, std::byte* memory) {
  for (RankBytes& part : parts) {
    part.data = memory;
    memory += part.bytes;
  }
}

void measure_on_rank(Communicator& communicator, NcclPairs& pairs, NcclAllToAll& size, bool graph,
                     cudaStream_t stream) {
  const int rank = communicator.rank();
  const int ranks = communicator.size();
  Direction dispatch = direction_of(size, rank, ranks, false, size.dispatch_row_bytes);
  Direction combine = direction_of(size, rank, ranks, true, size.combine_row_bytes);
  std::byte* const from = device_bytes(std::max(dispatch.sent, combine.sent));
  std::byte* const to = device_bytes(std::max(dispatch.received, combine.received));
  for (Direction* direction : {&dispatch, &combine}) {
    place(direction->sends, from);
    place(direction->receives, to);
  }
  const auto run = [&](const Direction& direction) {
    pairs.exchange(direction.sends, direction.receives, stream);
  };
  run(dispatch);  // connects the pairs
  run(combine);
  SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
  ChainArgs chain{.stream = stream,
                  .enqueue = [&] { run(dispatch); },
                  .check = [&] { pairs.check(); },
                  .graph = graph};
  time_chain(communicator, chain, size.dispatch);
  chain.enqueue = [&] {
    run(dispatch);
    run(combine);
  };
  time_chain(communicator, chain, size.pair);
  cudaFree(from);
  cudaFree(to);
}

void measure_all(int num_ranks, std::deque<NcclAllToAll>& sizes, bool graph) {
  run_ranks(
      num_ranks,
      [&](Communicator& communicator) {
        SWITCHYARD_CUDA(cudaSetDevice(communicator.rank()));
        cudaStream_t stream = nullptr;
        SWITCHYARD_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        NcclPairs pairs(communicator);
        for (NcclAllToAll& size : sizes) {
          measure_on_rank(communicator, pairs, size, graph, stream);
        }
        communicator.barrier("done");
        cudaStreamDestroy(stream);
      },
      std::chrono::seconds(30));
}

}  // namespace

const char* measure_nccl_all_to_all(int num_ranks, std::deque<NcclAllToAll>& sizes) {
  try {
    measure_all(num_ranks, sizes, true);
    return "graph";
  } catch (const std::exception& error) {
    fmt::print(stderr, "NCCL's all-to-all in a graph: {}\n", error.what());
  }
  for (NcclAllToAll& size : sizes) {
    size.dispatch.clear();
    size.pair.clear();
  }
  measure_all(num_ranks, sizes, false);
  return "eager";
}

}  // namespace switchyard

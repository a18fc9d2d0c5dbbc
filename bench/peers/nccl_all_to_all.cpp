// The usual all-to-all as a peer: rows lie in the order of their destinations already.
#include "bench/peers/nccl_all_to_all.hpp"

#include "comm/nccl/pairs/pairs.hpp"
#include "core/gpu/device_buffer.hpp"

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
Direction direction_of(const NcclAllToAllArgs& args, int rank, int ranks, bool transposed,
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

void place(std::vector<RankBytes>& parts, std::byte* memory) {
  for (RankBytes& part : parts) {
    part.data = memory;
    memory += part.bytes;
  }
}

}  // namespace

void measure_nccl_all_to_all(Communicator& communicator, const NcclAllToAllArgs& args,
                             NcclAllToAllTimes& times) {
  SWITCHYARD_CUDA(cudaSetDevice(communicator.rank()));
  cudaStream_t stream = nullptr;
  SWITCHYARD_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const int rank = communicator.rank();
  const int ranks = communicator.size();
  Direction dispatch = direction_of(args, rank, ranks, false, args.dispatch_row_bytes);
  Direction combine = direction_of(args, rank, ranks, true, args.combine_row_bytes);
  DeviceBuffer from;
  DeviceBuffer to;
  from.reserve(static_cast<std::int64_t>(std::max(dispatch.sent, combine.sent)) + 16);
  to.reserve(static_cast<std::int64_t>(std::max(dispatch.received, combine.received)) + 16);
  for (Direction* direction : {&dispatch, &combine}) {
    place(direction->sends, from.data());
    place(direction->receives, to.data());
  }
  {
    NcclPairs pairs(communicator);
    const auto run = [&](const Direction& direction) {
      pairs.exchange(direction.sends, direction.receives, stream);
    };
    run(dispatch);  // connects the pairs
    run(combine);
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
    const ChainArgs chain{.stream = stream, .check = [&] { pairs.check(); }};
    time_chain(
        communicator, chain, [&] { run(dispatch); }, times.dispatch);
    time_chain(
        communicator, chain,
        [&] {
          run(dispatch);
          run(combine);
        },
        times.pair);
    communicator.barrier("done");
  }
  cudaStreamDestroy(stream);
}

}  // namespace switchyard

// Sends and receives of all pairs in one group, which NCCL runs as one kernel.
#include "comm/nccl/pairs/pairs.hpp"

#include <cuda_runtime_api.h>

#include "comm/nccl/nccl.hpp"
#include "comm/nccl/rank.hpp"
#include "comm/ranks/agreement.hpp"
#include "core/check.hpp"

namespace switchyard {

struct NcclPairs::State {
  explicit State(Communicator& communicator) : rank(communicator, NcclWaits::kPolled) {}
  NcclRank rank;
};

NcclPairs::NcclPairs(Communicator& communicator) {
  require_no_trouble(communicator, ErrorCode::kUnsupported, nccl_missing());
  state_ = std::make_unique<State>(communicator);
}
NcclPairs::~NcclPairs() = default;

void NcclPairs::exchange(std::span<const RankBytes> sends, std::span<const RankBytes> receives,
                         void* stream) {
  NcclRank& rank = state_->rank;
  const NcclLibrary& nccl = rank.nccl();
  auto* const cuda_stream = static_cast<cudaStream_t>(stream);
  rank.call("send and receive", [&] {
    ncclResult_t status = nccl.group_start();
    const auto enqueue = [&](const auto& function, const RankBytes& part) {
      if (part.bytes == 0 || (status != ncclSuccess && status != ncclInProgress)) return;
      status = function(part.data, part.bytes, ncclUint8, part.rank, rank.get(), cuda_stream);
    };
    for (const RankBytes& part : sends) enqueue(nccl.send, part);
    for (const RankBytes& part : receives) enqueue(nccl.recv, part);
    const ncclResult_t ended = nccl.group_end();
    return status == ncclSuccess || status == ncclInProgress ? ended : status;
  });
}

void NcclPairs::check() const { state_->rank.check(); }

void NcclPairs::keep() { state_->rank.abandon(); }

void NcclPairs::abort() noexcept { state_->rank.abort(); }

}  // namespace switchyard

// NCCL's calls that wait for other ranks return at once and are polled: a rank that does not come
// is a timeout here, as everywhere.
#include "comm/nccl_rank.hpp"

#include <cstring>
#include <thread>

#include "comm/deadline.hpp"
#include "core/check.hpp"

namespace switchyard {
namespace {

ncclUniqueId id_of_first(Communicator& communicator, const NcclLibrary& nccl) {
  ncclUniqueId id{};
  const auto window = communicator.create_window(sizeof id, 1);
  if (communicator.rank() == 0) {
    const ncclResult_t status = nccl.get_unique_id(&id);
    if (status != ncclSuccess) {
      fail(ErrorCode::kCommunication, "NCCL: unique id: {}", nccl.get_error_string(status));
    }
    for (int to = 0; to < communicator.size(); ++to) {
      window->put(to, 0, &id, sizeof id);
      window->signal(to, 0, 1);
    }
  }
  window->wait(0, 1, {.phase = "NCCL's unique id", .rank = 0});
  std::memcpy(&id, window->local(), sizeof id);
  communicator.barrier("NCCL's unique id");  // nobody drops the window while it is written to
  return id;
}

}  // namespace

NcclRank::NcclRank(Communicator& communicator)
    : nccl_(nccl_library()), communicator_(communicator) {
  const ncclUniqueId id = id_of_first(communicator, nccl_);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  try {
    finish(
        nccl_.comm_init_rank_config(&comm_, communicator.size(), id, communicator.rank(), &config),
        "start");
  } catch (...) {
    if (comm_ != nullptr) nccl_.comm_abort(comm_);
    throw;
  }
}

NcclRank::~NcclRank() {
  if (comm_ == nullptr) return;
  if (!abandoned_) {
    try {
      finish(nccl_.comm_finalize(comm_), "end");
      nccl_.comm_destroy(comm_);
      return;
    } catch (const std::exception&) {
      // Somebody does not come to the end: leave without.
    }
  }
  nccl_.comm_abort(comm_);
}

void NcclRank::abort() noexcept {
  if (comm_ != nullptr) nccl_.comm_abort(comm_);
  comm_ = nullptr;
}

void NcclRank::finish(ncclResult_t status, const char* what) {
  const Deadline deadline = deadline_after(communicator_.timeout());
  while (status == ncclInProgress) {
    if (comm_ == nullptr) fail_with(ncclInternalError, what);
    const ncclResult_t asked = nccl_.comm_get_async_error(comm_, &status);
    if (asked != ncclSuccess) fail_with(asked, what);
    if (status != ncclInProgress) break;
    if (std::chrono::steady_clock::now() >= deadline) {
      abandoned_ = true;
      fail(ErrorCode::kTimeout, "NCCL: {}: waiting for the other ranks, not done after {} ms", what,
           communicator_.timeout().count());
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  if (status != ncclSuccess) fail_with(status, what);
}

void NcclRank::check() const {
  if (comm_ == nullptr) return;
  ncclResult_t status = ncclSuccess;
  const ncclResult_t asked = nccl_.comm_get_async_error(comm_, &status);
  if (asked != ncclSuccess) fail_with(asked, "check");
  if (status != ncclSuccess && status != ncclInProgress) fail_with(status, "check");
}

void NcclRank::fail_with(ncclResult_t status, const char* what) const {
  const char* words = nccl_.get_last_error(comm_);
  fail(ErrorCode::kCommunication, "NCCL: {}: {}{}{}", what, nccl_.get_error_string(status),
       words != nullptr && *words != '\0' ? "; " : "", words == nullptr ? "" : words);
}

}  // namespace switchyard

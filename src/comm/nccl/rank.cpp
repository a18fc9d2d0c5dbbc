// NCCL's calls that wait for other ranks are polled, or made on a thread of their own: a rank that
// does not come is a timeout here, as everywhere.
#include "comm/nccl/rank.hpp"

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>

#include "comm/ranks/deadline.hpp"
#include "core/check.hpp"
#include "core/gpu/cuda_check.hpp"

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

/// What a thread of its own leaves for the one that waits.
struct Call {
  std::mutex mutex;
  std::condition_variable ended;
  bool done = false;
  ncclResult_t status = ncclInProgress;
};

}  // namespace

NcclRank::NcclRank(Communicator& communicator, NcclWaits waits)
    : nccl_(nccl_library()),
      communicator_(communicator),
      waits_(waits),
      comm_(std::make_shared<ncclComm_t>(nullptr)) {
  SWITCHYARD_CUDA(cudaGetDevice(&device_));
  const ncclUniqueId id = id_of_first(communicator, nccl_);
  const auto config = std::make_shared<ncclConfig_t>();
  *config = NCCL_CONFIG_INITIALIZER;
  config->blocking = waits == NcclWaits::kPolled ? 0 : 1;
  try {
    call("start", [&nccl = nccl_, comm = comm_, config, id, ranks = communicator.size(),
                   rank = communicator.rank()] {
      return nccl.comm_init_rank_config(comm.get(), ranks, id, rank, config.get());
    });
  } catch (...) {
    abort();
    throw;
  }
}

NcclRank::~NcclRank() {
  if (get() == nullptr) return;
  if (!abandoned_) {
    try {
      call("end", [&nccl = nccl_, comm = get()] { return nccl.comm_finalize(comm); });
      call("end", [&nccl = nccl_, comm = get()] {
        nccl.comm_destroy(comm);
        return ncclSuccess;
      });
      return;
    } catch (const std::exception&) {
      // Somebody does not come to the end: leave without.
    }
  }
  abort();
}

void NcclRank::abort() noexcept {
  // Where a thread is still in a call, what it uses must stay.
  if (!left_behind_ && get() != nullptr) nccl_.comm_abort(get());
  comm_ = std::make_shared<ncclComm_t>(nullptr);
}

void NcclRank::call(const char* what, const std::function<ncclResult_t()>& body) {
  const ncclResult_t status =
      waits_ == NcclWaits::kPolled ? poll(body(), what) : run_on_thread(what, body);
  if (status != ncclSuccess) fail_with(status, what);
}

ncclResult_t NcclRank::run_on_thread(const char* what, const std::function<ncclResult_t()>& body) {
  const auto shared = std::make_shared<Call>();
  std::thread([shared, body, device = device_] {
    const ncclResult_t status =
        cudaSetDevice(device) == cudaSuccess ? body() : ncclUnhandledCudaError;
    const std::lock_guard lock(shared->mutex);
    shared->status = status;
    shared->done = true;
    shared->ended.notify_all();
  }).detach();
  std::unique_lock lock(shared->mutex);
  const Deadline deadline = deadline_after(communicator_.timeout());
  if (!shared->ended.wait_until(lock, deadline, [&] { return shared->done; })) {
    left_behind_ = true;
    fail_late(what);
  }
  return shared->status;
}

ncclResult_t NcclRank::poll(ncclResult_t status, const char* what) {
  const Deadline deadline = deadline_after(communicator_.timeout());
  while (status == ncclInProgress) {
    if (get() == nullptr) return ncclInternalError;
    const ncclResult_t asked = nccl_.comm_get_async_error(get(), &status);
    if (asked != ncclSuccess) return asked;
    if (status != ncclInProgress) break;
    if (std::chrono::steady_clock::now() >= deadline) fail_late(what);
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return status;
}

void NcclRank::fail_late(const char* what) {
  abandoned_ = true;
  fail(ErrorCode::kTimeout, "NCCL: {}: waiting for the other ranks, not done after {} ms", what,
       communicator_.timeout().count());
}

void NcclRank::check() const {
  if (get() == nullptr) return;
  ncclResult_t status = ncclSuccess;
  const ncclResult_t asked = nccl_.comm_get_async_error(get(), &status);
  if (asked != ncclSuccess) fail_with(asked, "check");
  if (status != ncclSuccess && status != ncclInProgress) fail_with(status, "check");
}

void NcclRank::fail_with(ncclResult_t status, const char* what) const {
  const char* words = nccl_.get_last_error(get());
  fail(ErrorCode::kCommunication, "NCCL: {}: {}{}{}", what, nccl_.get_error_string(status),
       words != nullptr && *words != '\0' ? "; " : "", words == nullptr ? "" : words);
}

}  // namespace switchyard

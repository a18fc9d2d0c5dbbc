// C interface: ranks.
#include <cstring>

#include "capi/capi.hpp"
#include "comm/ranks/launch.hpp"
#include "comm/ranks/process_ranks.hpp"
#include "comm/ranks/unique_id.hpp"
#include "core/check.hpp"

using namespace switchyard;  // NOLINT: this file is the border between the two namespaces

namespace {

static_assert(kUniqueIdDigits < SY_UNIQUE_ID_BYTES);

/// The digits of an id: they become a file's name.
std::string key_of(const sy_unique_id& id) {
  std::string key(id.bytes, strnlen(id.bytes, SY_UNIQUE_ID_BYTES));
  require(is_unique_id(key), "id is none that sy_unique_id_make() has made");
  return key;
}

void set_id(sy_unique_id& id, const std::string& digits) {
  id = {};
  digits.copy(id.bytes, kUniqueIdDigits);
}

}  // namespace

sy_status sy_communicator_from_environment(sy_communicator* communicator) {
  return capi::guarded([&] {
    require(communicator != nullptr, "communicator is NULL");
    auto rank = make_launched_rank();
    if (rank == nullptr) rank = make_single_rank();
    *communicator = new sy_communicator_t(std::move(rank));
  });
}

sy_status sy_communicator_threads(int32_t num_ranks, sy_communicator* communicators) {
  return capi::guarded([&] {
    require(communicators != nullptr, "communicators is NULL");
    auto ranks = make_thread_ranks(num_ranks);
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      communicators[r] = new sy_communicator_t(std::move(ranks[r]));
    }
  });
}

sy_status sy_unique_id_make(sy_unique_id* id) {
  return capi::guarded([&] {
    require(id != nullptr, "id is NULL");
    set_id(*id, make_unique_id());
  });
}

sy_status sy_unique_id_by_file(const char* path, int32_t rank, sy_unique_id* id) {
  return capi::guarded([&] {
    require(path != nullptr && id != nullptr, "path or id is NULL");
    set_id(*id, unique_id_by_file(path, rank, deadline_after(std::chrono::seconds(60))));
  });
}

sy_status sy_communicator_create(int32_t rank, int32_t num_ranks, const sy_unique_id* id,
                                 sy_communicator* communicator) {
  return capi::guarded([&] {
    require(id != nullptr && communicator != nullptr, "id or communicator is NULL");
    require(rank >= 0 && rank < num_ranks, "rank {} is not in 0..{}", rank, num_ranks - 1);
    *communicator = new sy_communicator_t(make_process_rank(
        rank, num_ranks, "processes", tell_by_file(rank, num_ranks, key_of(*id))));
  });
}

void sy_communicator_free(sy_communicator communicator) {
  if (communicator != nullptr && communicator->calls.may_free()) delete communicator;
}

int32_t sy_communicator_rank(sy_communicator communicator) {
  return communicator == nullptr ? 0 : communicator->communicator->rank();
}

int32_t sy_communicator_size(sy_communicator communicator) {
  return communicator == nullptr ? 1 : communicator->communicator->size();
}

sy_status sy_communicator_set_timeout(sy_communicator communicator, int64_t milliseconds) {
  return capi::guarded([&] {
    require(communicator != nullptr, "communicator is NULL");
    const auto call = communicator->calls.begin();
    require(milliseconds > 0, "a timeout of {} ms is not positive", milliseconds);
    communicator->communicator->set_timeout(std::chrono::milliseconds(milliseconds));
  });
}

sy_status sy_communicator_recover(sy_communicator communicator) {
  return capi::guarded([&] {
    require(communicator != nullptr, "communicator is NULL");
    const auto call = communicator->calls.begin();
    communicator->communicator->recover();
  });
}

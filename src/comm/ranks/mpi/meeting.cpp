// The meeting of ranks that recover: nonblocking notices of 16 bytes.
#include "comm/ranks/mpi/meeting.hpp"

#include <algorithm>

#include "comm/ranks/mpi/messages.hpp"

namespace switchyard {
namespace {

std::size_t at(int i) { return static_cast<std::size_t>(i); }

}  // namespace

MessageMeeting::MessageMeeting(MPI_Comm control, int rank, int size)
    : control_(control),
      rank_(rank),
      size_(size),
      came_(at(size)),
      notices_(at(size)),
      requests_(at(size), MPI_REQUEST_NULL) {
  for (int source = 0; source < size_; ++source) {
    if (source == rank_) continue;
    check_mpi(MPI_Irecv(&notices_[at(source)], sizeof(Notice), MPI_BYTE, source, 0, control_,
                        &requests_[at(source)]),
              "MPI_Irecv");
  }
}

MessageMeeting::~MessageMeeting() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized != 0) return;
  for (MPI_Request& request : requests_) {
    if (request == MPI_REQUEST_NULL) continue;
    MPI_Cancel(&request);
    MPI_Wait(&request, MPI_STATUS_IGNORE);  // a cancelled receive is local
  }
  for (auto& [notice, request] : sent_) {
    int done = 0;
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (done == 0) static_cast<void>(notice.release());
  }
}

void MessageMeeting::notify(int rank, const Notice& notice) {
  auto& [copy, request] = sent_.emplace_back(std::make_unique<Notice>(notice), MPI_REQUEST_NULL);
  check_mpi(MPI_Isend(copy.get(), sizeof(Notice), MPI_BYTE, rank, 0, control_, &request),
            "MPI_Isend");
}

void MessageMeeting::progress() {
  for (int source = 0; source < size_; ++source) {
    MPI_Request& request = requests_[at(source)];
    int done = request != MPI_REQUEST_NULL ? 1 : 0;
    while (done != 0) {
      check_mpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
      if (done == 0) break;
      Notice& notice = notices_[at(source)];
      if (notice.kind == Notice::kCome) came_[at(source)] = notice;
      if (notice.kind == Notice::kGo && notice.recoveries == recoveries_) go_ = notice.windows;
      check_mpi(MPI_Irecv(&notice, sizeof(Notice), MPI_BYTE, source, 0, control_, &request),
                "MPI_Irecv");
    }
  }
  std::erase_if(sent_, [](auto& sent) {
    int done = 0;
    check_mpi(MPI_Test(&sent.second, &done, MPI_STATUS_IGNORE), "MPI_Test");
    return done != 0;
  });
}

void MessageMeeting::come(std::uint32_t windows_made) {
  if (come_ || go_.has_value()) return;
  come_ = true;
  const Notice notice{.kind = Notice::kCome, .windows = windows_made, .recoveries = recoveries_};
  came_[at(rank_)] = notice;
  if (rank_ != 0) notify(0, notice);
}

bool MessageMeeting::has_come(int rank) const {
  const std::optional<Notice>& notice = came_[at(rank)];
  return notice.has_value() && notice->recoveries == recoveries_;
}

int MessageMeeting::missing() const {
  if (rank_ != 0) return 0;
  int rank = 0;
  while (rank < size_ && has_come(rank)) ++rank;
  return rank;
}

int MessageMeeting::num_come() const {
  int count = 0;
  for (int rank = 0; rank < size_; ++rank) count += has_come(rank) ? 1 : 0;
  return count;
}

bool MessageMeeting::is_over() {
  if (go_.has_value()) return true;
  if (rank_ != 0 || missing() < size_) return false;
  Notice go{.kind = Notice::kGo, .recoveries = recoveries_};
  for (const auto& made : came_) go.windows = std::max(go.windows, made->windows);
  for (int to = 1; to < size_; ++to) notify(to, go);
  go_ = go.windows;
  return true;
}

std::uint32_t MessageMeeting::end() {
  const std::uint32_t windows = go_.value_or(0);
  go_.reset();
  come_ = false;
  ++recoveries_;
  return windows;
}

}  // namespace switchyard

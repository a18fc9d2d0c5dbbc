#pragma once

#include <mpi.h>

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace switchyard {

/// Where the ranks of recover() wait for each other, on an MPI communicator that nothing else uses:
/// each tells rank 0 that it has come, and rank 0 tells all to go. Nothing here waits: whoever
/// polls calls progress(). A meeting that a rank has left is gone on with when it comes back.
class MessageMeeting {
 public:
  MessageMeeting(MPI_Comm control, int rank, int size);
  ~MessageMeeting();
  MessageMeeting(const MessageMeeting&) = delete;
  MessageMeeting& operator=(const MessageMeeting&) = delete;

  /// Looks for what has arrived.
  void progress();
  /// This rank is in recover() and has made so many windows; said once a meeting.
  void come(std::uint32_t windows_made);
  /// All ranks may go on. On rank 0: all have come, and are told.
  [[nodiscard]] bool is_over();
  /// A rank that has not come, as far as this one knows.
  [[nodiscard]] int missing() const;
  [[nodiscard]] int num_come() const;
  /// After is_over(): begins the next meeting. @return the most windows that any rank has made.
  std::uint32_t end();
  /// Meetings that have ended.
  [[nodiscard]] std::uint64_t recoveries() const { return recoveries_; }

 private:
  struct Notice {
    enum Kind : std::uint32_t { kCome, kGo };
    std::uint32_t kind = kCome;
    std::uint32_t windows = 0;     ///< Windows made so far.
    std::uint64_t recoveries = 0;  ///< Of the sender: an older notice is void.
  };
  void notify(int rank, const Notice& notice);
  [[nodiscard]] bool has_come(int rank) const;

  MPI_Comm control_;
  const int rank_;
  const int size_;
  std::uint64_t recoveries_ = 0;
  bool come_ = false;                        // this rank has said so
  std::vector<std::optional<Notice>> came_;  // rank 0: the last of each; a rank may be one ahead
  std::optional<std::uint32_t> go_;
  // One receive per source is always posted.
  std::vector<Notice> notices_;
  std::vector<MPI_Request> requests_;
  std::list<std::pair<std::unique_ptr<Notice>, MPI_Request>> sent_;
};

}  // namespace switchyard

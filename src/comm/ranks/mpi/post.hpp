#pragma once

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <vector>

namespace switchyard {

/// What travels before the bytes of a put, or alone.
struct Letter {
  enum Kind : std::uint32_t {
    kPut,     ///< window, first = offset, second = bytes; the bytes follow.
    kSignal,  ///< window, first = index, second = value.
    kOffer,   ///< window, first = bytes, second = signals: a window is being made.
    kArrive,  ///< first = barriers that the sender has come to.
    kFailed,  ///< window, first = windows and barriers that all have come to; second = bytes of the
              ///< reason, which follow.
  };
  std::uint32_t kind = kPut;
  std::uint32_t window = 0;
  std::uint64_t first = 0;
  std::uint64_t second = 0;

  /// Bytes that follow.
  [[nodiscard]] std::uint64_t attached() const {
    return kind == kPut || kind == kFailed ? second : 0;
  }
};

/// Letters between the ranks of one MPI communicator, in order per sender; nothing blocks.
class MessagePost {
 public:
  /// Called for each letter that has arrived, with the bytes that followed it.
  using Deliver = std::function<void(int source, const Letter&, const std::byte* bytes)>;

  MessagePost(MPI_Comm communicator, Deliver deliver);
  MessagePost(const MessagePost&) = delete;
  MessagePost& operator=(const MessagePost&) = delete;
  ~MessagePost();

  void send(int rank, const Letter& letter, const void* bytes = nullptr);
  /// Deliver what has come, drop what has left.
  void progress();
  /// Has everything that was sent left this rank?
  [[nodiscard]] bool idle() const { return sends_.empty(); }

 private:
  struct Inbox {
    Letter letter;
    std::vector<std::byte> bytes;
    bool reading = false;  // the bytes of `letter` are under way
    MPI_Request request = MPI_REQUEST_NULL;
  };
  struct Outgoing {
    std::unique_ptr<std::byte[]> memory;
    MPI_Request requests[2] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL};
  };
  void expect(int source);

  MPI_Comm communicator_;
  Deliver deliver_;
  std::vector<std::unique_ptr<Inbox>> inboxes_;
  std::list<Outgoing> sends_;
};

}  // namespace switchyard

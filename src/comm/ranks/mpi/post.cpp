// Letters and the bytes that follow them. A sender's letters arrive in order (MPI does not overtake
// within one communicator and tag), so a signal arrives after the puts before it.
#include "comm/ranks/mpi/post.hpp"

#include <algorithm>
#include <cstring>

#include "comm/ranks/mpi/messages.hpp"
#include "core/check.hpp"

namespace switchyard {
namespace {

constexpr int kLetterTag = 1;
constexpr int kBytesTag = 2;
constexpr std::size_t kMaxMessage = std::size_t{1} << 30;  // MPI counts are int

}  // namespace

MessagePost::MessagePost(MPI_Comm communicator, Deliver deliver)
    : communicator_(communicator), deliver_(std::move(deliver)) {
  int size = 0;
  int rank = 0;
  check_mpi(MPI_Comm_size(communicator_, &size), "MPI_Comm_size");
  check_mpi(MPI_Comm_rank(communicator_, &rank), "MPI_Comm_rank");
  for (int source = 0; source < size; ++source) {
    inboxes_.push_back(std::make_unique<Inbox>());
    if (source != rank) expect(source);
  }
}

/// What is under way may still touch the memory: where it cannot be taken back, that memory stays
/// for the life of the process.
MessagePost::~MessagePost() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized != 0) return;
  for (auto& inbox : inboxes_) {
    if (inbox->request == MPI_REQUEST_NULL) continue;
    MPI_Cancel(&inbox->request);
    int done = 0;
    MPI_Test(&inbox->request, &done, MPI_STATUS_IGNORE);
    if (done == 0) static_cast<void>(inbox.release());
  }
  for (Outgoing& outgoing : sends_) {
    int done = 0;
    MPI_Testall(2, outgoing.requests, &done, MPI_STATUSES_IGNORE);
    if (done == 0) static_cast<void>(outgoing.memory.release());
  }
}

void MessagePost::expect(int source) {
  Inbox& inbox = *inboxes_[static_cast<std::size_t>(source)];
  void* const to = inbox.reading ? static_cast<void*>(inbox.bytes.data()) : &inbox.letter;
  const std::size_t bytes = inbox.reading ? inbox.bytes.size() : sizeof(Letter);
  check_mpi(MPI_Irecv(to, static_cast<int>(bytes), MPI_BYTE, source,
                      inbox.reading ? kBytesTag : kLetterTag, communicator_, &inbox.request),
            "MPI_Irecv");
}

// Calls itself once for each piece of a long message, never deeper.
// NOLINTNEXTLINE(misc-no-recursion)
void MessagePost::send(int rank, const Letter& letter, const void* bytes) {
  if (letter.kind == Letter::kPut && letter.second > kMaxMessage) {
    for (std::uint64_t done = 0; done < letter.second; done += kMaxMessage) {
      Letter piece = letter;
      piece.first += done;
      piece.second = std::min<std::uint64_t>(letter.second - done, kMaxMessage);
      send(rank, piece, static_cast<const std::byte*>(bytes) + done);
    }
    return;
  }
  const std::size_t count = letter.attached();
  // NOLINTBEGIN(clang-analyzer-cplusplus.NewDeleteLeaks): it does not follow the owner.
  Outgoing outgoing;
  outgoing.memory = std::make_unique_for_overwrite<std::byte[]>(sizeof(Letter) + count);
  std::memcpy(outgoing.memory.get(), &letter, sizeof(Letter));
  check_mpi(MPI_Isend(outgoing.memory.get(), static_cast<int>(sizeof(Letter)), MPI_BYTE, rank,
                      kLetterTag, communicator_, &outgoing.requests[0]),
            "MPI_Isend");
  if (count > 0) {
    std::memcpy(outgoing.memory.get() + sizeof(Letter), bytes, count);
    check_mpi(MPI_Isend(outgoing.memory.get() + sizeof(Letter), static_cast<int>(count), MPI_BYTE,
                        rank, kBytesTag, communicator_, &outgoing.requests[1]),
              "MPI_Isend");
  }
  sends_.push_back(std::move(outgoing));
  // NOLINTEND(clang-analyzer-cplusplus.NewDeleteLeaks)
}

void MessagePost::progress() {
  for (auto it = sends_.begin(); it != sends_.end();) {
    int done = 0;
    check_mpi(MPI_Testall(2, it->requests, &done, MPI_STATUSES_IGNORE), "MPI_Testall");
    it = done != 0 ? sends_.erase(it) : std::next(it);
  }
  for (std::size_t source = 0; source < inboxes_.size(); ++source) {
    Inbox& inbox = *inboxes_[source];
    while (inbox.request != MPI_REQUEST_NULL) {
      int done = 0;
      check_mpi(MPI_Test(&inbox.request, &done, MPI_STATUS_IGNORE), "MPI_Test");
      if (done == 0) break;
      if (!inbox.reading && inbox.letter.attached() > 0) {
        inbox.reading = true;
        inbox.bytes.resize(inbox.letter.attached());
      } else {
        inbox.reading = false;
        deliver_(static_cast<int>(source), inbox.letter, inbox.bytes.data());
      }
      expect(static_cast<int>(source));
    }
  }
}

}  // namespace switchyard

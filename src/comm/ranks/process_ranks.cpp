// Ranks as processes of one host. After the first meeting nothing but shared memory is used: a put
// is a copy into the other's pages, a wait looks at a counter, lets others run, then sleeps.
#include "comm/ranks/process_ranks.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>
#include <utility>

#include "comm/ranks/shared_ranks.hpp"
#include "core/check.hpp"

namespace switchyard {
namespace {

class File {
 public:
  File() = default;
  explicit File(int descriptor) : descriptor_(descriptor) {}
  File(File&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  File& operator=(File&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  [[nodiscard]] int get() const { return descriptor_; }

 private:
  int descriptor_ = -1;
};

using Pages = std::shared_ptr<std::byte>;

Pages map_pages(const File& file, std::size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (memory == MAP_FAILED) {
    fail(ErrorCode::kOutOfMemory, "mapping {} bytes of shared memory: {}", bytes,
         std::strerror(errno));
  }
  return {static_cast<std::byte*>(memory), [bytes](std::byte* p) { munmap(p, bytes); }};
}

/// New zeroed pages; they are taken now, so that a lack of memory is an error and not a signal.
Pages make_pages(std::size_t bytes, File& file) {
  file = File(memfd_create("switchyard", MFD_CLOEXEC));
  const int status =
      file.get() < 0 ? errno : posix_fallocate(file.get(), 0, static_cast<off_t>(bytes));
  if (status != 0) {
    fail(ErrorCode::kOutOfMemory, "{} bytes of shared memory: {}", bytes, std::strerror(status));
  }
  return map_pages(file, bytes);
}

std::array<std::uint64_t, 2> words_of(const File& file) {
  return {static_cast<std::uint64_t>(getpid()), static_cast<std::uint64_t>(file.get())};
}

/// Of a process whose files are closed: it runs no more, whether its parent has heard so or not.
bool has_ended(std::uint64_t process) {
  std::ifstream file(fmt::format("/proc/{}/stat", process));
  std::string all;
  if (!std::getline(file, all)) return true;
  const std::size_t name_ends = all.rfind(')');  // the name may have anything in it
  const char state = name_ends + 2 < all.size() ? all[name_ends + 2] : '?';
  return state == 'Z' || state == 'X';
}

/// Null where the owner has ended: it keeps its file open as long as it lives.
Pages open_pages(std::array<std::uint64_t, 2> words, std::size_t bytes) {
  const std::string path = fmt::format("/proc/{}/fd/{}", words[0], words[1]);
  const File file(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (file.get() < 0) {
    const int status = errno;
    if (status == ENOENT || status == ESRCH || has_ended(words[0])) return nullptr;
    fail(ErrorCode::kCommunication, "shared memory of process {} ({}): {}", words[0], path,
         std::strerror(status));
  }
  return map_pages(file, bytes);
}

class ProcessRank final : public SharedRank {
 public:
  ProcessRank(std::shared_ptr<ControlBlock> control, int rank, int size, const char* engine)
      : SharedRank(std::move(control), rank, size), engine_(engine) {}

  [[nodiscard]] const char* engine() const override { return engine_; }
  void ring(int /*rank*/) noexcept override {}  // the others look

 private:
  Part make_part(std::size_t bytes, std::array<std::uint64_t, 2>& words) override {
    Part part = make_pages(std::max<std::size_t>(bytes, 1), offered_);
    words = words_of(offered_);
    return part;
  }
  Part open_part(int rank, std::size_t bytes, std::array<std::uint64_t, 2> words) override {
    Part part = open_pages(words, std::max<std::size_t>(bytes, 1));
    if (!part) {  // as a wait for it would say later
      const std::string where = fmt::format(
          "window: waiting for rank {}, expected its memory, seen that its process {} has ended",
          rank, words[0]);
      give_up(fmt::format("rank {}: {}", this->rank(), where));
      fail(ErrorCode::kTimeout, "{}", where);
    }
    return part;
  }
  bool sleep_until(const std::function<bool()>& ready, Deadline deadline) override {
    // A partner that runs answers within a microsecond; one that waits for this core, when it gets
    // it; one that computes, in its own time.
    constexpr int kLooks = 200;
    constexpr int kYields = 5000;  // some milliseconds
    constexpr std::chrono::microseconds kNap{50};
    for (int i = 0; i < kLooks; ++i) {
      if (ready()) return true;
    }
    for (int i = 0;; ++i) {
      if (ready()) return true;
      if (std::chrono::steady_clock::now() >= deadline) return false;
      if (i < kYields) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(kNap);
      }
    }
  }

  const char* engine_;
  File offered_;  // open until the next window: the others open it in the meantime
};

}  // namespace

std::unique_ptr<Communicator> make_process_rank(int rank, int num_ranks, const char* engine,
                                                const TellAll& tell_all) {
  require(num_ranks >= 1 && num_ranks <= kMaxRanks, "number of ranks is {}, want 1 to {}",
          num_ranks, kMaxRanks);
  File file;
  Pages pages;
  std::array<std::uint64_t, 2> words{};
  if (rank == 0) {
    pages = make_pages(sizeof(ControlBlock), file);
    words = words_of(file);
  }
  words = tell_all(words, deadline_after(std::chrono::seconds(60)));
  if (rank != 0) pages = open_pages(words, sizeof(ControlBlock));
  if (!pages) {
    fail(ErrorCode::kTimeout,
         "start: waiting for rank 0, expected its memory, seen that its process {} has ended",
         words[0]);
  }
  // Zeroed pages are a control block at its start: all of it is atomics and characters.
  const std::shared_ptr<ControlBlock> control(pages, reinterpret_cast<ControlBlock*>(pages.get()));
  auto result = std::make_unique<ProcessRank>(control, rank, num_ranks, engine);
  result->barrier("start");  // all have opened it: rank 0 may close its file
  return result;
}

TellAll tell_by_file(int rank, int num_ranks, const std::string& key) {
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / fmt::format("switchyard-{}-{}", getuid(), key);
  if (rank == 0) {
    // Removed with the last copy of the returned function: once all have read it.
    const std::shared_ptr<const void> remover(nullptr, [path](const void*) {
      std::error_code ignored;
      std::filesystem::remove(path, ignored);
    });
    return [=](std::array<std::uint64_t, 2> words, Deadline) {
      static_cast<void>(remover);
      const std::string temporary = fmt::format("{}.{}", path.string(), getpid());
      std::ofstream(temporary) << words[0] << ' ' << words[1] << ' ' << num_ranks << '\n';
      std::filesystem::rename(temporary, path);  // whole or not at all
      return words;
    };
  }
  return [=](std::array<std::uint64_t, 2> words, Deadline deadline) {
    for (;;) {
      int ranks = 0;
      std::ifstream file(path);
      // A file that a killed job left behind names a process that is gone.
      if (file >> words[0] >> words[1] >> ranks && ranks == num_ranks &&
          access(fmt::format("/proc/{}/fd/{}", words[0], words[1]).c_str(), R_OK) == 0) {
        return words;
      }
      if (std::chrono::steady_clock::now() >= deadline) {
        fail(ErrorCode::kTimeout, "start: waiting for rank 0, expected its file {}", path.string());
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  };
}

}  // namespace switchyard

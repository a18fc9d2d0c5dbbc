// What a load must do: bring the files' bytes in and write the weights once. Reading and copying
// are timed by themselves, loading as users do it, round by round in turn.
#include "bench/load_case.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "core/check.hpp"
#include "experts/cpu_memory.hpp"
#include "switchyard/checkpoint.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard::bench {
namespace {

using Clock = std::chrono::steady_clock;

template <class Body>
double microseconds(const Body& body) {
  const auto start = Clock::now();
  body();
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

/// A file that is read past the mapping.
class PlainFile {
 public:
  explicit PlainFile(const std::filesystem::path& path)
      : name_(path.string()), fd_(open(name_.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (fd_ < 0) fail_io("open");
    bytes_ = static_cast<std::int64_t>(std::filesystem::file_size(path));
  }
  ~PlainFile() {
    if (fd_ >= 0) close(fd_);
  }
  PlainFile(PlainFile&& other) noexcept
      : name_(std::move(other.name_)), fd_(std::exchange(other.fd_, -1)), bytes_(other.bytes_) {}
  PlainFile& operator=(PlainFile&&) = delete;

  [[nodiscard]] std::int64_t bytes() const { return bytes_; }
  void read(std::int64_t at, std::int64_t count, std::byte* out) const {
    while (count > 0) {
      const ssize_t got = pread(fd_, out, static_cast<std::size_t>(count), at);
      if (got <= 0) fail_io("read");
      at += got;
      count -= got;
    }
  }
  /// Out of the page cache.
  void drop() const {
    if (fdatasync(fd_) != 0 || posix_fadvise(fd_, 0, 0, POSIX_FADV_DONTNEED) != 0) fail_io("drop");
  }

 private:
  [[noreturn]] void fail_io(const char* what) const {
    fail(ErrorCode::kIo, "{}: {}: {}", name_, what, std::strerror(errno));
  }

  std::string name_;
  int fd_;
  std::int64_t bytes_ = 0;
};

/// The checkpoint's tensors, as plain files.
class Files {
 public:
  explicit Files(const std::filesystem::path& checkpoint) {
    if (std::filesystem::is_regular_file(checkpoint)) {
      files_.emplace_back(checkpoint);
    } else {
      for (const auto& entry : std::filesystem::directory_iterator(checkpoint)) {
        if (entry.path().extension() == ".safetensors") files_.emplace_back(entry.path());
      }
    }
    for (const PlainFile& file : files_) {
      for (std::int64_t at = 0; at < file.bytes(); at += kChunk) {
        chunks_.push_back({&file, at, std::min(kChunk, file.bytes() - at)});
      }
    }
  }

  [[nodiscard]] double bytes() const {
    double sum = 0;
    for (const PlainFile& file : files_) sum += static_cast<double>(file.bytes());
    return sum;
  }
  void drop() const {
    for (const PlainFile& file : files_) file.drop();
  }
  /// All of them once, into buffers that stay in the caches.
  void read(ThreadPool& pool) const {
    const cpu::HugeBuffer memory(static_cast<std::size_t>(kChunk * pool.num_threads()));
    pool.parallel_for(std::ssize(chunks_), [&](std::int64_t i, int worker) {
      const Chunk& chunk = chunks_[static_cast<std::size_t>(i)];
      chunk.file->read(chunk.at, chunk.bytes, memory.data() + worker * kChunk);
    });
  }

 private:
  static constexpr std::int64_t kChunk = 256 << 10;
  struct Chunk {
    const PlainFile* file;
    std::int64_t at, bytes;
  };
  std::vector<PlainFile> files_;
  std::vector<Chunk> chunks_;
};

/// One pass over `bytes` at the memory's speed: copies into memory that is as new as what a load
/// gets, large pieces at a time.
class CopyMeter {
 public:
  CopyMeter(ThreadPool& pool, double bytes)
      : pool_(pool), from_(kPiece * kSources), bytes_(static_cast<std::int64_t>(bytes)) {
    // Memory that nobody has written is one page of zeros, which the caches hold.
    std::memset(from_.data(), 1, static_cast<std::size_t>(kPiece * kSources));
  }

  /// Microseconds into new memory, and then over what is there.
  [[nodiscard]] std::array<double, 2> sample() const {
    const cpu::HugeBuffer to(static_cast<std::size_t>(bytes_));
    const auto copy = [&] {
      const std::int64_t pieces = (bytes_ + kPiece - 1) / kPiece;
      pool_.parallel_for(pieces, [&](std::int64_t i, int) {
        std::memcpy(to.data() + i * kPiece, from_.data() + i % kSources * kPiece,
                    static_cast<std::size_t>(std::min(kPiece, bytes_ - i * kPiece)));
      });
    };
    return {microseconds(copy), microseconds(copy)};
  }

  /// A virtual machine's host may have to find memory for the first touch of a page, which takes
  /// ten times as long as any load. So that memory is touched before a sample: what follows gets
  /// pages that the machine has, and pays for zeroing them only.
  void touch() const {
    const cpu::HugeBuffer memory(static_cast<std::size_t>(bytes_));
    constexpr std::int64_t kPage = 4096;
    pool_.parallel_for(bytes_ / kPage,
                       [&](std::int64_t i, int) { memory.data()[i * kPage] = std::byte{1}; });
  }

 private:
  static constexpr std::int64_t kPiece = std::int64_t{32} << 20;
  static constexpr std::int64_t kSources = 8;

  ThreadPool& pool_;
  cpu::HugeBuffer from_;
  std::int64_t bytes_;
};

/// Bytes of a line of /proc/self/status.
double status_bytes(const std::string& key) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(key + ":")) return std::stod(line.substr(key.size() + 1)) * 1024;
  }
  return 0;
}

/// Lets VmHWM begin anew.
void forget_peak() { std::ofstream("/proc/self/clear_refs") << "5"; }

using Weights = std::vector<std::unique_ptr<ExpertWeights>>;

/// As a layer loads them, layer after layer.
Weights load(const LayerCase& c, ThreadPool& pool) {
  const Checkpoint checkpoint(c.checkpoint);
  Weights all;
  for (const std::int32_t index : checkpoint.moe_layers()) {
    const LayerModel model = checkpoint.layer(index);
    all.push_back(load_experts({.config = model.config.experts,
                                .source = model.experts.get(),
                                .dtype = c.options.compute.value_or(model.experts->dtype()),
                                .num_local = model.config.experts.num_experts,
                                .quantize_q8 = c.options.quantize_q8,
                                .execution = {.pool = &pool}}));
  }
  return all;
}

double bytes_of(const Weights& weights) {
  double sum = 0;
  for (const auto& layer : weights) sum += layer->bytes_per_expert() * layer->num_local();
  return sum;
}

struct Samples {
  std::vector<double> read_us, copy_us, copy_again_us, load_us, peak_bytes;
  double weights_bytes = 0;

  void forget() {
    for (auto* list : {&read_us, &copy_us, &copy_again_us, &load_us, &peak_bytes}) list->clear();
  }
};

void sample(const LayerCase& c, const Files& files, ThreadPool& pool, Samples& out) {
  const bool is_cold = c.name == "load cold";
  if (is_cold) files.drop();
  out.read_us.push_back(microseconds([&] { files.read(pool); }));
  // Before the first load nobody knows how large the packed weights are: about as the files.
  const CopyMeter copy(pool, out.weights_bytes > 0 ? out.weights_bytes : files.bytes());
  if (is_cold) files.drop();
  copy.touch();
  Weights weights;
  forget_peak();
  const double before = status_bytes("VmRSS");
  out.load_us.push_back(microseconds([&] { weights = load(c, pool); }));
  out.peak_bytes.push_back(status_bytes("VmHWM") - before);
  out.weights_bytes = bytes_of(weights);
  weights.clear();
  const auto [first, again] = copy.sample();
  out.copy_us.push_back(first);
  out.copy_again_us.push_back(again);
}

StageFigures stage(const char* name, const std::vector<double>& us, double bytes, double limit_us) {
  StageFigures figures{.stage = name, .us = statistics(us), .samples = us.size()};
  figures.work.bytes = bytes;
  figures.limit_us = limit_us;
  figures.share = limit_us / figures.us.median;
  return figures;
}

}  // namespace

std::vector<LayerCase> load_cases(const LayerCase& base) {
  std::vector<LayerCase> cases(2, base);
  const Checkpoint checkpoint(base.checkpoint);
  const LayerConfig config = checkpoint.layer(checkpoint.moe_layers().front()).config;
  for (LayerCase& c : cases) c.config = config;
  cases[0].name = "load warm";
  cases[1].name = "load cold";
  return cases;
}

CaseResult run_load_case(const LayerCase& c, const Limits& limits) {
  constexpr double kMostTime = 1.15;
  constexpr double kMostMemory = 1.10;
  CaseResult result = start_result(c, limits);
  ThreadPool pool(c.num_threads);
  const Files files(c.checkpoint);
  Samples samples;
  RunCounter counter(c.count);
  for (int run = 0; run < counter.total(); ++run) {
    if (run == counter.warmup()) samples.forget();
    const auto start = Clock::now();
    sample(c, files, pool, samples);
    if (run == 0) counter.set_time(Clock::now() - start);
  }
  const double read_us = statistics(samples.read_us).median;
  const double copy_us = statistics(samples.copy_us).median;
  const double copy_again_us = statistics(samples.copy_again_us).median;
  const double load_us = statistics(samples.load_us).median;
  const double peak = *std::max_element(samples.peak_bytes.begin(), samples.peak_bytes.end());
  const double ratio = load_us / (read_us + copy_us);
  const double memory = peak / samples.weights_bytes;
  result.holds = ratio <= kMostTime && memory <= kMostMemory;
  result.what.cold = c.name == "load cold";
  result.verdict = fmt::format(
      "{}: {:.0f} ms, reading {:.0f} ms and one copy {:.0f} ms ({:.0f} ms into old memory), ratio "
      "{:.2f} (want {:.2f}); "
      "peak memory {:.3f} of the weights (want {:.2f})",
      c.name, load_us * 1e-3, read_us * 1e-3, copy_us * 1e-3, copy_again_us * 1e-3, ratio,
      kMostTime, memory, kMostMemory);
  result.more = {{"bar", "load"},
                 {"value", ratio},
                 {"target", kMostTime},
                 {"holds", result.holds},
                 {"read_us", read_us},
                 {"copy_us", copy_us},
                 {"copy_again_us", copy_again_us},
                 {"file_bytes", files.bytes()},
                 {"weights_bytes", samples.weights_bytes},
                 {"peak_resident_bytes", peak},
                 {"peak_share", memory},
                 {"peak_share_target", kMostMemory}};
  result.stages = {
      stage("read", samples.read_us, files.bytes(), read_us),
      stage("copy", samples.copy_us, 2 * samples.weights_bytes, copy_us),
      stage("load", samples.load_us, files.bytes() + samples.weights_bytes, read_us + copy_us)};
  return result;
}

}  // namespace switchyard::bench

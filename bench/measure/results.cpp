// Result lines and how they get into a file.
#include "bench/measure/results.hpp"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <string_view>

#include "bench/measure/process_memory.hpp"
#include "core/check.hpp"

namespace switchyard::bench {
namespace {

nlohmann::json case_json(const Case& c) {
  return {{"name", c.name},
          {"E", c.num_experts},
          {"K", c.top_k},
          {"H", c.hidden},
          {"I", c.inner},
          {"T", c.num_tokens},
          {"R", c.num_ranks},
          {"S", c.shared_experts},
          {"threads", c.num_threads},
          {"compute", c.compute},
          {"layout", c.layout},
          {"skew", c.skew},
          {"engine", c.engine},
          {"wire", c.wire},
          {"activation", c.activation},
          {"gated", c.gated},
          {"experts", c.experts},
          {"capacity_factor", c.capacity_factor},
          {"drop_policy", c.drop_policy},
          {"batch_invariant", c.batch_invariant},
          {"cold", c.cold}};
}

std::string now() {
  return fmt::format(
      "{:%Y-%m-%dT%H:%M:%SZ}",
      fmt::gmtime(std::chrono::system_clock::to_time_t(std::chrono::system_clock::now())));
}

nlohmann::json stage_json(const StageFigures& f, const Case& what) {
  const double us = f.us.median;
  return {{"stage", f.stage},
          {"samples", f.samples},
          {"median_us", us},
          {"p95_us", f.us.p95},
          {"mean_us", f.us.mean},
          {"std_us", f.us.std},
          {"bytes", f.work.bytes},
          {"flops", f.work.flops},
          {"flops_executed", f.work.flops_executed},
          {"intensity", f.work.bytes > 0 ? f.work.flops / f.work.bytes : 0},
          {"gbps", f.gbps()},
          {"tflops", f.gflops() * 1e-3},
          {"tokens_per_s", us > 0 ? static_cast<double>(what.num_tokens) / us * 1e6 : 0},
          {"limit_us", f.limit_us},
          {"limit_by", f.limit_by},
          {"share", f.share},
          {"implementation", f.implementation}};
}

/// A file descriptor, locked against other writers.
class LockedFile {
 public:
  explicit LockedFile(const std::string& path)
      : path_(path), fd_(open(path.c_str(), O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0644)) {
    if (fd_ < 0 || flock(fd_, LOCK_EX) != 0) fail_io("cannot be opened for appending");
  }
  ~LockedFile() {
    if (fd_ >= 0) close(fd_);
  }
  LockedFile(const LockedFile&) = delete;
  LockedFile& operator=(const LockedFile&) = delete;

  /// All of it or, where that fails, nothing.
  void append(std::string_view text) {
    const off_t before = lseek(fd_, 0, SEEK_END);
    while (!text.empty()) {
      const ssize_t written = write(fd_, text.data(), text.size());
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) fail_back_at(before);
      text.remove_prefix(static_cast<std::size_t>(written));  // a short one fails the next time
    }
    if (fsync(fd_) != 0 && errno != EINVAL) fail_back_at(before);  // EINVAL: a device
  }

  [[nodiscard]] std::string read() const {
    std::string text;
    std::string piece(1 << 16, '\0');
    for (;;) {
      const ssize_t got = pread(fd_, piece.data(), piece.size(), static_cast<off_t>(text.size()));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) fail_io("cannot be read");
      if (got == 0) return text;
      text.append(piece, 0, static_cast<std::size_t>(got));
    }
  }

  void cut(off_t size) {
    if (ftruncate(fd_, size) != 0) fail_io("cannot be cut");
  }

 private:
  [[noreturn]] void fail_back_at(off_t size) const {
    const int error = errno;
    if (size >= 0 && ftruncate(fd_, size) != 0) errno = error;
    fail_io("cannot be written");
  }
  [[noreturn]] void fail_io(const char* what) const {
    fail(ErrorCode::kIo, "{} {} ({})", path_, what, std::strerror(errno));
  }

  std::string path_;
  int fd_;
};

}  // namespace

nlohmann::json load_json(const metrics::Load& load) {
  return {{"cv", load.cv},
          {"cv_floor", load.cv_floor},
          {"max_over_mean", load.max_over_mean},
          {"min_over_mean", load.min_over_mean},
          {"kl", load.kl},
          {"entropy", load.entropy},
          {"effective_experts", load.effective_experts},
          {"gini", load.gini},
          {"dead_experts", load.dead_experts}};
}

nlohmann::json load_json(const Load& load) {
  nlohmann::json out = load_json(static_cast<const metrics::Load&>(load));
  out["dropped"] = load.dropped;
  return out;
}

std::vector<nlohmann::json> to_lines(const CaseResult& result, const Machine& machine) {
  nlohmann::json common = {{"schema", 1},
                           {"time", now()},
                           {"commit", build_commit()},
                           {"machine",
                            {{"cpu", machine.cpu},
                             {"isa", machine.isa},
                             {"gpu", machine.gpu},
                             {"driver", machine.driver},
                             {"bandwidth", result.limits.bandwidth},
                             {"read_bandwidth", result.limits.read_bandwidth},
                             {"flops_f32", result.limits.flops_f32},
                             {"flops_bf16", result.limits.flops_bf16},
                             {"flops_f16", result.limits.flops_f16}}},
                           {"versions", versions()},
                           {"seed", result.seed},
                           {"case", case_json(result.what)},
                           {"backend", result.backend},
                           {"routing_share", result.routing_share},
                           {"load", load_json(result.load)},
                           {"peak_bytes", peak_resident_bytes()},
                           {"peers", nlohmann::json::object()}};
  if (!result.verdict.empty()) {
    common["verdict"] = result.verdict;
    common["holds"] = result.holds;
  }
  if (result.more.is_object()) common.update(result.more);
  std::vector<nlohmann::json> lines;
  for (const StageFigures& stage : result.stages) {
    nlohmann::json line = common;
    line.update(stage_json(stage, result.what));
    if (stage.stage == result.whole) {
      for (const auto& [name, us] : result.peers) line["peers"][name] = us;
    }
    const auto torch = result.torch_us.find(stage.stage);
    if (torch != result.torch_us.end()) line["peers"]["torch"] = torch->second;
    lines.push_back(std::move(line));
  }
  return lines;
}

void append_lines(const std::string& path, const std::vector<nlohmann::json>& lines) {
  std::string text;
  for (const nlohmann::json& line : lines) text += line.dump() + "\n";
  LockedFile(path).append(text);
}

void mend_lines(const std::string& path, const std::function<std::size_t(std::string_view)>& kept) {
  if (access(path.c_str(), F_OK) != 0) return;
  LockedFile file(path);
  const std::string text = file.read();
  const std::size_t size = kept(text);
  if (size < text.size()) file.cut(static_cast<off_t>(size));
  if (size > 0 && text[size - 1] != '\n') file.append("\n");
}

std::string to_csv(const std::vector<CaseResult>& results) {
  std::string out =
      "name,E,K,H,I,T,R,compute,layout,skew,stage,samples,median_us,p95_us,bytes,flops,"
      "flops_executed,gbps,tflops,limit_us,limit_by,share\n";
  for (const CaseResult& result : results) {
    const Case& c = result.what;
    for (const StageFigures& f : result.stages) {
      out += fmt::format("{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{}\n",
                         c.name, c.num_experts, c.top_k, c.hidden, c.inner, c.num_tokens,
                         c.num_ranks, c.compute, c.layout, c.skew, f.stage, f.samples, f.us.median,
                         f.us.p95, f.work.bytes, f.work.flops, f.work.flops_executed, f.gbps(),
                         f.gflops() * 1e-3, f.limit_us, f.limit_by, f.share);
    }
  }
  return out;
}

}  // namespace switchyard::bench

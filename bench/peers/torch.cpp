// Talks to a Python process: one line of JSON each way. Tensors go through a file.
#include "bench/peers/torch.hpp"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "bench/torch_peer_py.hpp"
#include "checkpoint/files/safetensors.hpp"
#include "core/check.hpp"

extern char** environ;

namespace switchyard::bench {
namespace {

using nlohmann::json;

constexpr std::chrono::seconds kLongestAnswer{240};

/// A folder of its own that goes with the object.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name =
        (std::filesystem::temp_directory_path() / "switchyard-torch-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) {
      fail(ErrorCode::kIo, "{} cannot be made ({})", name, std::strerror(errno));
    }
    path_ = name;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  [[nodiscard]] std::filesystem::path operator/(const char* name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

/// A child whose stdin and stdout are one socket of ours.
class PythonProcess {
 public:
  explicit PythonProcess(const char* device) {
    std::array<int, 2> ends{};
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) {
      fail(ErrorCode::kIo, "no socket for a process ({})", std::strerror(errno));
    }
    socket_ = ends[0];
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    std::array<std::string, 4> words{"python3", "-c", kTorchPeerScript, device};
    std::array<char*, 5> arguments{words[0].data(), words[1].data(), words[2].data(),
                                   words[3].data(), nullptr};
    const int error = posix_spawnp(&pid_, "python3", &actions, nullptr, arguments.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    if (error == 0) return;
    close(socket_);
    fail(ErrorCode::kUnsupported, "python3 cannot be started ({})", std::strerror(error));
  }
  ~PythonProcess() {
    close(socket_);  // the end of its stdin: it leaves
    for (int i = 0; i < 50; ++i) {
      if (waitpid(pid_, nullptr, WNOHANG) != 0) return;
      usleep(100000);
    }
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  PythonProcess(const PythonProcess&) = delete;
  PythonProcess& operator=(const PythonProcess&) = delete;

  void say(const json& value) {
    const std::string line = value.dump() + "\n";
    std::size_t sent = 0;
    while (sent < line.size()) {
      const ssize_t part = send(socket_, line.data() + sent, line.size() - sent, MSG_NOSIGNAL);
      if (part < 0 && errno == EINTR) continue;
      if (part <= 0) fail(ErrorCode::kIo, "the torch process is gone");
      sent += static_cast<std::size_t>(part);
    }
  }

  /// The next line.
  json hear() {
    const auto deadline = std::chrono::steady_clock::now() + kLongestAnswer;
    std::size_t end = 0;
    while ((end = heard_.find('\n')) == std::string::npos) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          deadline - std::chrono::steady_clock::now());
      pollfd ready{.fd = socket_, .events = POLLIN, .revents = 0};
      const int found = poll(&ready, 1, static_cast<int>(std::max<std::int64_t>(0, left.count())));
      if (found < 0 && errno == EINTR) continue;
      if (found <= 0) {
        fail(ErrorCode::kTimeout, "the torch process has not answered in {} s",
             kLongestAnswer.count());
      }
      std::array<char, 4096> bytes{};
      const ssize_t size = recv(socket_, bytes.data(), bytes.size(), 0);
      if (size < 0 && errno == EINTR) continue;
      if (size <= 0) fail(ErrorCode::kIo, "the torch process is gone; its words are above");
      heard_.append(bytes.data(), static_cast<std::size_t>(size));
    }
    json value = json::parse(heard_.substr(0, end));
    heard_.erase(0, end + 1);
    return value;
  }

 private:
  int socket_ = -1;
  pid_t pid_ = -1;
  std::string heard_;
};

template <typename T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

void write_inputs(const std::filesystem::path& path, const TorchWork& work) {
  const std::int64_t num_tokens = work.tokens.rows;
  const std::int64_t hidden = work.tokens.cols;
  const std::int64_t top_k = work.c.config.router.top_k();
  const std::int64_t experts = work.c.config.router.num_experts;
  const std::vector<StoredTensor> tensors{
      {.spec = {"tokens", stored_type(work.tokens.dtype), {num_tokens, hidden}},
       .bytes = {work.tokens.data, static_cast<std::size_t>(work.tokens.bytes())}},
      {.spec = {"expert", StoredType::kI32, {num_tokens, top_k}},
       .bytes = bytes_of(work.routing.expert)},
      {.spec = {"weight", StoredType::kF32, {num_tokens, top_k}},
       .bytes = bytes_of(work.routing.weight)},
      {.spec = {"gate", StoredType::kF32, {experts, hidden}}, .bytes = bytes_of(work.gate)},
  };
  write_safetensors(path, tensors);
}

}  // namespace

struct TorchPeer::State {
  explicit State(const char* device) : process(device) {}
  PythonProcess process;
  TemporaryFolder folder;
  std::string version;
};

TorchPeer::TorchPeer(Backend backend)
    : state_(std::make_unique<State>(backend == Backend::kCuda ? "cuda" : "cpu")) {
  const json hello = state_->process.hear();
  if (hello.contains("error")) {
    fail(ErrorCode::kUnsupported, "{}", hello.at("error").get<std::string>());
  }
  state_->version = hello.at("version");
}
TorchPeer::~TorchPeer() = default;

const std::string& TorchPeer::version() const { return state_->version; }

void TorchPeer::measure(const TorchWork& work, CaseResult& result) {
  if (work.tokens.rows == 0) return;
  const std::filesystem::path file = state_->folder / "inputs.safetensors";
  write_inputs(file, work);
  const LayerCase& c = work.c;
  state_->process.say({{"work", work.work},
                       {"file", file.string()},
                       {"seed", c.seed},
                       {"H", c.config.experts.hidden},
                       {"I", c.config.experts.inner},
                       {"E", c.config.router.num_experts},
                       {"K", c.config.router.top_k()},
                       {"gated", c.config.experts.gated},
                       {"activation", to_string(c.config.experts.activation)}});
  json answer = state_->process.hear();
  if (answer.contains("median_us")) result.torch_us = answer.at("median_us");
  answer["version"] = state_->version;
  result.more["torch"] = std::move(answer);
}

void judge_against_torch(const std::string& bar, double target, CaseResult& result) {
  const auto torch = result.torch_us.find("experts+combine");
  if (torch == result.torch_us.end()) return;
  double ours = 0;
  for (const StageFigures& stage : result.stages) {
    if (stage.stage.starts_with("gemm") || stage.stage == "combine") ours += stage.us.median;
  }
  const double ratio = torch->second / ours;
  result.more["bar"] = bar;
  result.more["value"] = ratio;
  result.more["target"] = target;
  result.more["holds"] = ratio >= target;
}

}  // namespace switchyard::bench

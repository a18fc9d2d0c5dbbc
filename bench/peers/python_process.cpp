// A Python process that is asked one line of JSON at a time.
#include "bench/peers/python_process.hpp"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <utility>

#include "core/check.hpp"

extern char** environ;

namespace switchyard::bench {
namespace {

using nlohmann::json;

constexpr std::chrono::seconds kLongestAnswer{480};

}  // namespace

PythonProcess::PythonProcess(std::string name, const char* script, const char* word)
    : name_(std::move(name)) {
  std::array<int, 2> ends{};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) {
    fail(ErrorCode::kIo, "no socket for a process ({})", std::strerror(errno));
  }
  socket_ = ends[0];
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  std::array<std::string, 4> words{"python3", "-c", script, word};
  std::array<char*, 5> arguments{words[0].data(), words[1].data(), words[2].data(), words[3].data(),
                                 nullptr};
  const int error = posix_spawnp(&pid_, "python3", &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  if (error == 0) return;
  close(socket_);
  fail(ErrorCode::kUnsupported, "python3 cannot be started ({})", std::strerror(error));
}

PythonProcess::~PythonProcess() {
  close(socket_);  // the end of its stdin: it leaves
  for (int i = 0; i < 50; ++i) {
    if (waitpid(pid_, nullptr, WNOHANG) != 0) return;
    usleep(100000);
  }
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

json PythonProcess::hello() {
  json value = hear();
  if (value.contains("error")) {
    fail(ErrorCode::kUnsupported, "{}", value.at("error").get<std::string>());
  }
  return value;
}

json PythonProcess::ask(const json& request) {
  say(request);
  return hear();
}

void PythonProcess::say(const json& value) {
  const std::string line = value.dump() + "\n";
  std::size_t sent = 0;
  while (sent < line.size()) {
    const ssize_t part = send(socket_, line.data() + sent, line.size() - sent, MSG_NOSIGNAL);
    if (part < 0 && errno == EINTR) continue;
    if (part <= 0) fail(ErrorCode::kIo, "the {} process is gone", name_);
    sent += static_cast<std::size_t>(part);
  }
}

/// The next line.
json PythonProcess::hear() {
  const auto deadline = std::chrono::steady_clock::now() + kLongestAnswer;
  std::size_t end = 0;
  while ((end = heard_.find('\n')) == std::string::npos) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    pollfd ready{.fd = socket_, .events = POLLIN, .revents = 0};
    const int found = poll(&ready, 1, static_cast<int>(std::max<std::int64_t>(0, left.count())));
    if (found < 0 && errno == EINTR) continue;
    if (found <= 0) {
      fail(ErrorCode::kTimeout, "the {} process has not answered in {} s", name_,
           kLongestAnswer.count());
    }
    std::array<char, 4096> bytes{};
    const ssize_t size = recv(socket_, bytes.data(), bytes.size(), 0);
    if (size < 0 && errno == EINTR) continue;
    if (size <= 0) fail(ErrorCode::kIo, "the {} process is gone; its words are above", name_);
    heard_.append(bytes.data(), static_cast<std::size_t>(size));
  }
  json value = json::parse(heard_.substr(0, end));
  heard_.erase(0, end + 1);
  return value;
}

}  // namespace switchyard::bench

#pragma once

#include <sys/types.h>

#include <nlohmann/json.hpp>
#include <string>

namespace switchyard::bench {

/// `python3 -c SCRIPT WORD` of PATH, a child whose stdin and stdout are one socket of ours: one
/// line of JSON each way. What it prints otherwise goes to our stderr. It leaves when the object
/// goes.
class PythonProcess {
 public:
  /// `name`: of the peer, for errors. @throws Error{kUnsupported}: no python3; {kIo}.
  PythonProcess(std::string name, const char* script, const char* word);
  ~PythonProcess();
  PythonProcess(const PythonProcess&) = delete;
  PythonProcess& operator=(const PythonProcess&) = delete;

  /// The first line: what the script says of itself.
  /// @throws Error{kUnsupported}: with its words, where it says {"error": why}.
  nlohmann::json hello();
  /// The answer to a request. @throws Error{kTimeout}: none within eight minutes; {kIo}: the
  /// process is gone.
  nlohmann::json ask(const nlohmann::json& request);

 private:
  void say(const nlohmann::json& value);
  nlohmann::json hear();

  std::string name_;
  int socket_ = -1;
  pid_t pid_ = -1;
  std::string heard_;
};

}  // namespace switchyard::bench

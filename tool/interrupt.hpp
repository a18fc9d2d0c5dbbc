#pragma once

namespace switchyard::tool {

/// SIGINT and SIGTERM remove what is being written, leave a terminal at the begin of a line, and
/// end the process with 130.
void install_interrupt_handler();

/// While there is one, the first SIGINT or SIGTERM only says so, and the command ends where it can
/// be gone on from; the second ends the process as without it. One at a time.
class InterruptRequest {
 public:
  InterruptRequest();
  ~InterruptRequest();
  InterruptRequest(const InterruptRequest&) = delete;
  InterruptRequest& operator=(const InterruptRequest&) = delete;

  [[nodiscard]] bool came() const;
};

}  // namespace switchyard::tool

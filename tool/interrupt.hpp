#pragma once

namespace switchyard::tool {

/// SIGINT and SIGTERM remove what is being written, leave a terminal at the begin of a line, and
/// end the process with 130.
void install_interrupt_handler();

}  // namespace switchyard::tool

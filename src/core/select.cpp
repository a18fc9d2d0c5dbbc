// What a choice of an implementation says on stderr.
#include "core/select.hpp"

#include <cstdio>

namespace switchyard {

void print_choice(const char* stage, const std::string& sizes, const char* chosen,
                  const std::string& others) {
  // One write a line, which ranks' threads do not mix; a stderr that is closed is no error.
  const std::string line = fmt::format("switchyard: {} of {}: {}{}{}\n", stage, sizes, chosen,
                                       others.empty() ? "" : "; not ", others);
  std::fputs(line.c_str(), stderr);
}

}  // namespace switchyard

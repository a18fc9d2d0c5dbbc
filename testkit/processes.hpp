#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <vector>

namespace switchyard::test {

/// Waits for processes that fork() has made: each has to leave with 0.
inline void expect_success(const std::vector<pid_t>& children) {
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), 0);
  }
}

}  // namespace switchyard::test

#pragma once

// Random layers on a GPU against the reference.

#include <gtest/gtest.h>

#include <sstream>
#include <utility>
#include <vector>

#include "verify/verify.hpp"

namespace switchyard::test {

/// What `switchyard verify` does with these options on a GPU: every case holds.
inline void expect_random_layers(verify::VerifyOptions options, std::vector<int> ranks = {1}) {
  options.backend = Backend::kCuda;
  options.threads = {1};
  options.ranks = std::move(ranks);
  std::ostringstream out;
  EXPECT_EQ(verify::run_verify(options, out), 0) << out.str();
}

}  // namespace switchyard::test

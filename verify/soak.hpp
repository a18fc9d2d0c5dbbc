#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>

#include "verify/verify.hpp"

namespace switchyard::verify {

/// What one rank has met. Memory in bytes, after a tenth of the exchanges and after all.
struct SoakStory {
  std::string wrong{};  ///< Empty: nothing.
  std::int64_t before = 0, after = 0;
  std::int64_t device_before = 0, device_after = 0;  ///< Of its GPU.
  std::uint64_t checksum = 0;                        ///< Of the outputs' bits; on GPUs.
};

/// Of this process, in bytes.
[[nodiscard]] std::int64_t resident_memory();

/// VerifyOptions::soak exchanges in one process over 24 shapes that take turns, each result
/// compared bit by bit; no rank may take more memory, of its host or its GPU, at the end than after
/// the first tenth.
/// @returns 0: all holds; 1: a wrong bit, or memory has grown.
int run_soak(const VerifyOptions& options, std::ostream& out);

}  // namespace switchyard::verify

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "core/check.hpp"

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace switchyard::cpu {

/// Memory that the system is asked to back with huge pages: streaming weights from 4 KiB pages
/// costs up to 40 % of the bandwidth (one thread, Zen 4, 2026-11-20).
class HugeBuffer {
 public:
  HugeBuffer() = default;
  /// @throws Error{kOutOfMemory}.
  explicit HugeBuffer(std::size_t bytes) { reserve(bytes); }

  /// At least this many bytes; what was there is lost where it grows.
  void reserve(std::size_t bytes) {
    if (bytes <= bytes_) return;
    const std::size_t alignment = bytes < kHugePage ? 64 : kHugePage;
    const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
    data_.reset();
    bytes_ = 0;
    data_.reset(std::aligned_alloc(alignment, rounded));
    if (!data_) fail(ErrorCode::kOutOfMemory, "cannot allocate {} bytes of host memory", rounded);
    bytes_ = rounded;
#if defined(__linux__)
    // Only advice: without huge pages everything still works.
    if (alignment == kHugePage) madvise(data_.get(), rounded, MADV_HUGEPAGE);
#endif
  }
  [[nodiscard]] std::byte* data() const { return static_cast<std::byte*>(data_.get()); }

 private:
  static constexpr std::size_t kHugePage = std::size_t{2} << 20;
  struct Free {
    void operator()(void* memory) const noexcept { std::free(memory); }
  };
  std::unique_ptr<void, Free> data_;
  std::size_t bytes_ = 0;
};

/// Asks for lines of memory that will soon be written (or with `kRead` read): where each piece is
/// on a page of its own, the hardware does not see it coming.
inline constexpr bool kRead = true;
inline void fetch_lines(const std::byte* from, std::int64_t bytes, bool read = false) {
  for (std::int64_t line = 0; line < bytes; line += 64) {
    if (read) {
      __builtin_prefetch(from + line);
    } else {
      __builtin_prefetch(from + line, 1);
    }
  }
}

/// A copy that is a move of vectors where it has the length of a panel, or of half of one, of some
/// instruction set: not a call.
inline void copy_bytes(const std::byte* from, std::int64_t bytes, std::byte* to) {
  switch (bytes) {
    case 32: std::memcpy(to, from, 32); break;
    case 64: std::memcpy(to, from, 64); break;
    case 128: std::memcpy(to, from, 128); break;
    default: std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
}

/// To memory that nobody reads soon, past the caches: a store would first fetch what it overwrites.
/// `from` is aligned to 16 bytes. stream_fence() before another thread may read it.
inline void stream_bytes(const std::byte* from, std::int64_t bytes, std::byte* to) {
#if defined(__SSE2__)
  if (reinterpret_cast<std::uintptr_t>(to) % 16 == 0) {
    for (; bytes >= 16; bytes -= 16, from += 16, to += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to),
                       _mm_load_si128(reinterpret_cast<const __m128i*>(from)));
    }
  }
#endif
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

inline void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace switchyard::cpu

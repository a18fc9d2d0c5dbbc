#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "switchyard/thread_pool.hpp"

namespace switchyard {

/// The first two passes of a stable counting sort of `size` items in `num_keys` buckets, in chunks
/// that threads take: counts per (chunk, key), then where each chunk's items of a key begin.
class ChunkedCounts {
 public:
  ChunkedCounts(ThreadPool* pool, std::int64_t size, std::int64_t num_keys)
      : pool_(pool),
        size_(size),
        num_keys_(num_keys),
        chunks_(std::clamp<std::int64_t>(size / 2048, 1, 4 * std::int64_t{num_threads(pool)})),
        counts_(static_cast<std::size_t>(chunks_ * num_keys)) {}

  /// body(begin, end, counters[num_keys]) for every chunk, on the pool. Called twice: to count into
  /// the counters, and, after scan(), to take places from them.
  template <typename Body>
  void for_each_chunk(const Body& body) {
    parallel_for(pool_, chunks_, [&](std::int64_t c, int) {
      body(c * size_ / chunks_, (c + 1) * size_ / chunks_, counts_.data() + c * num_keys_);
    });
  }

  /// Makes each counter the number of the key's items in the chunks before; totals[key] is the sum.
  template <typename Count>
  void scan(Count* totals) {
    for (std::int64_t key = 0; key < num_keys_; ++key) {
      std::int32_t sum = 0;
      for (std::int64_t c = 0; c < chunks_; ++c) {
        std::int32_t& count = counts_[static_cast<std::size_t>(c * num_keys_ + key)];
        const std::int32_t before = sum;
        sum += count;
        count = before;
      }
      totals[key] = sum;
    }
  }

 private:
  ThreadPool* pool_;
  std::int64_t size_;
  std::int64_t num_keys_;
  std::int64_t chunks_;
  std::vector<std::int32_t> counts_;
};

}  // namespace switchyard

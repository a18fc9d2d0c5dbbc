#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "comm/exchange_layout.hpp"
#include "switchyard/comm.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard {

/// One array of a window's rows: element i lies at begin + i * stride.
struct RowArray {
  std::int64_t begin = 0;
  std::int64_t stride = 0;  ///< Bytes; 0: the array does not exist.
};

/// Where one row is to be written, per array.
struct RowTarget {
  std::vector<std::byte*> base;  ///< Of row 0 of this piece.
  std::vector<std::int64_t> stride;
  [[nodiscard]] std::byte* at(std::size_t array, std::int64_t i) const {
    return base[array] + i * stride[array];
  }
};

/// Writes rows that follow each other into another rank's window: in place where the engine gives
/// its memory, else through a local copy and one put per array.
class RowWriter {
 public:
  /// `fill(target, i)` writes row i of `count`; called in parallel on `pool`.
  void write(Window& window, std::int32_t rank, const std::vector<RowArray>& arrays,
             std::int64_t count, ThreadPool* pool,
             const std::function<void(const RowTarget&, std::int64_t)>& fill);

 private:
  std::vector<std::byte> staging_;
};

}  // namespace switchyard

// Bound by memory bandwidth: each row is read once and written once (twice where it is staged).
#include "comm/host/row_writer.hpp"

#include <algorithm>

namespace switchyard {
namespace {

constexpr std::int64_t kRowsPerTask = 16;  // some 100 KB: far more than handing out a task costs

void fill_all(const RowTarget& target, std::int64_t count, ThreadPool* pool,
              const std::function<void(const RowTarget&, std::int64_t)>& fill) {
  parallel_for(pool, (count + kRowsPerTask - 1) / kRowsPerTask, [&](std::int64_t task, int) {
    const std::int64_t end = std::min(count, (task + 1) * kRowsPerTask);
    for (std::int64_t i = task * kRowsPerTask; i < end; ++i) fill(target, i);
  });
}

}  // namespace

void RowWriter::write(Window& window, std::int32_t rank, const std::vector<RowArray>& arrays,
                      std::int64_t count, ThreadPool* pool,
                      const std::function<void(const RowTarget&, std::int64_t)>& fill) {
  if (count == 0) return;
  RowTarget target;
  std::byte* const peer = window.peer(rank);
  std::int64_t staged_bytes = 0;
  for (const RowArray& array : arrays) {
    target.stride.push_back(array.stride);
    target.base.push_back(peer != nullptr ? peer + array.begin : nullptr);
    staged_bytes += ExchangeLayout::align(count * array.stride);
  }
  if (peer != nullptr) {
    fill_all(target, count, pool, fill);
    return;
  }
  if (std::ssize(staging_) < staged_bytes) staging_.resize(static_cast<std::size_t>(staged_bytes));
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    target.base[i] = staging_.data() + offset;
    offset += ExchangeLayout::align(count * arrays[i].stride);
  }
  fill_all(target, count, pool, fill);
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    window.put(rank, static_cast<std::size_t>(arrays[i].begin), target.base[i],
               static_cast<std::size_t>(count * arrays[i].stride));
  }
}

}  // namespace switchyard

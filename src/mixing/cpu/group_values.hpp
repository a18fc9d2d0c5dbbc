#pragma once

// What the work on one group of tokens wants in f32, and who works on groups.

#include "core/cpu/memory.hpp"
#include "core/row_ops.hpp"
#include "mixing/rows_of.hpp"
#include "mixing/slot_groups.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard::mixing {

/// A matrix of f32 in memory that is kept from call to call.
class Values {
 public:
  [[nodiscard]] Matrix<float> matrix(std::int64_t rows, std::int64_t cols) {
    memory_.reserve(static_cast<std::size_t>(rows * cols * 4));
    return {reinterpret_cast<float*>(memory_.data()), {rows, cols}};
  }

 private:
  cpu::HugeBuffer memory_;
};

[[nodiscard]] inline Matrix<float> floats_of(RawMatrix rows) {
  return {reinterpret_cast<float*>(rows.data), {rows.rows, rows.cols}};
}

/// The values themselves where they are f32, else a copy in `memory`.
[[nodiscard]] inline Matrix<const float> widened(ConstRawMatrix rows, Values& memory) {
  if (rows.dtype == DType::kF32) {
    return {reinterpret_cast<const float*>(rows.data), {rows.rows, rows.cols}};
  }
  const Matrix<float> out = memory.matrix(rows.rows, rows.cols);
  row_ops::widen(rows.dtype, rows.data, out.data, out.size());
  return out;
}

/// body(group, pool of its loops) for each group: side by side where there are enough of them, else
/// one after the other with all threads in each. No bit depends on which.
template <typename Body>
void for_groups(const SlotGroups& groups, ThreadPool* pool, const Body& body) {
  if (groups.count() >= num_threads(pool)) {
    parallel_for(pool, groups.count(), [&](std::int64_t g, int) { body(g, nullptr); });
    return;
  }
  for (std::int64_t g = 0; g < groups.count(); ++g) body(g, pool);
}

}  // namespace switchyard::mixing

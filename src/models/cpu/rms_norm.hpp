#pragma once

// y = x / sqrt(mean(x^2) + epsilon) * weight, row by row. Zhang and Sennrich 2019
// (arXiv:1910.07467).

#include <cstdint>
#include <vector>

#include "core/cpu/vector_loops.hpp"
#include "switchyard/thread_pool.hpp"

namespace switchyard::models {

struct RmsNormArgs {
  const float* x;       ///< [rows, size].
  const float* weight;  ///< [size].
  std::int64_t rows;
  std::int64_t size;
  float epsilon;
  float* y;      ///< out [rows, size].
  float* scale;  ///< out [rows]: 1 / sqrt(mean(x^2) + epsilon), for the way back; or null.
  ThreadPool* pool;
};
void rms_norm(const RmsNormArgs& args);

struct RmsNormBackwardArgs {
  const float* x;
  const float* weight;
  const float* scale;  ///< As the forward has left it.
  std::int64_t rows;
  std::int64_t size;
  const float* dy;  ///< [rows, size].
  float* dx;        ///< [rows, size]: the gradient is added to it.
  float* dweight;   ///< out [size], or null.
  bool accumulate;  ///< Of dweight.
  ThreadPool* pool;
};
void rms_norm_backward(const RmsNormBackwardArgs& args);

/// Of one row, for whoever normalizes pieces of rows. @returns the scale.
SWITCHYARD_INLINE inline float norm_scale(const float* x, std::int64_t size, float epsilon) {
  return 1.0F / __builtin_sqrtf(cpu::dot_of(x, x, size) / static_cast<float>(size) + epsilon);
}

/// dx += the gradient of one row; dweight += its part. `weighted` [size] is for use here.
SWITCHYARD_INLINE inline void norm_row_backward(const float* x, const float* weight, float scale,
                                                std::int64_t size, const float* dy, float* dx,
                                                float* dweight, float* weighted) {
  for (std::int64_t i = 0; i < size; ++i) weighted[i] = dy[i] * weight[i];
  const float share = cpu::dot_of(weighted, x, size) * scale * scale / static_cast<float>(size);
  for (std::int64_t i = 0; i < size; ++i) {
    dx[i] += scale * (weighted[i] - x[i] * share);
    dweight[i] += dy[i] * x[i] * scale;
  }
}

/// Gradients of what all rows share: each task of rows adds up its own, then they are added in
/// order. Tasks follow from the number of rows alone.
class SharedSums {
 public:
  static constexpr std::int64_t kRowsPerTask = 64;

  SharedSums(std::int64_t rows, std::int64_t size)
      : tasks_((rows + kRowsPerTask - 1) / kRowsPerTask),
        size_(size),
        parts_(static_cast<std::size_t>(tasks_ * size)) {}
  [[nodiscard]] std::int64_t tasks() const { return tasks_; }
  [[nodiscard]] float* of_task(std::int64_t task) { return parts_.data() + task * size_; }
  void write(float* out, bool accumulate) const;  ///< Null: nowhere.

 private:
  std::int64_t tasks_;
  std::int64_t size_;
  std::vector<float> parts_;
};

}  // namespace switchyard::models

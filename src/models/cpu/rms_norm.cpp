#include "models/cpu/rms_norm.hpp"

#include <algorithm>

namespace switchyard::models {

void rms_norm(const RmsNormArgs& args) {
  constexpr std::int64_t kRows = SharedSums::kRowsPerTask;
  const std::int64_t size = args.size;
  parallel_for(args.pool, (args.rows + kRows - 1) / kRows, [&](std::int64_t task, int) {
    const std::int64_t end = std::min(args.rows, (task + 1) * kRows);
    cpu::vectorized([&]() SWITCHYARD_INLINE {
      for (std::int64_t row = task * kRows; row < end; ++row) {
        const float* x = args.x + row * size;
        float* y = args.y + row * size;
        const float scale = norm_scale(x, size, args.epsilon);
        for (std::int64_t i = 0; i < size; ++i) y[i] = x[i] * scale * args.weight[i];
        if (args.scale != nullptr) args.scale[row] = scale;
      }
    });
  });
}

void rms_norm_backward(const RmsNormBackwardArgs& args) {
  const std::int64_t size = args.size;
  SharedSums sums(args.rows, size);
  parallel_for(args.pool, sums.tasks(), [&](std::int64_t task, int) {
    const std::int64_t end = std::min(args.rows, (task + 1) * SharedSums::kRowsPerTask);
    std::vector<float> weighted(static_cast<std::size_t>(size));
    float* const dweight = sums.of_task(task);
    cpu::vectorized([&]() SWITCHYARD_INLINE {
      for (std::int64_t row = task * SharedSums::kRowsPerTask; row < end; ++row) {
        norm_row_backward(args.x + row * size, args.weight, args.scale[row], size,
                          args.dy + row * size, args.dx + row * size, dweight, weighted.data());
      }
    });
  });
  sums.write(args.dweight, args.accumulate);
}

void SharedSums::write(float* out, bool accumulate) const {
  if (out == nullptr) return;
  if (!accumulate) std::fill_n(out, size_, 0.0F);
  cpu::vectorized([&]() SWITCHYARD_INLINE {
    for (std::int64_t task = 0; task < tasks_; ++task) {
      const float* part = parts_.data() + task * size_;
      for (std::int64_t i = 0; i < size_; ++i) out[i] += part[i];
    }
  });
}

}  // namespace switchyard::models

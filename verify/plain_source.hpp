#pragma once

#include <cstdint>
#include <vector>

#include "core/half.hpp"
#include "switchyard/experts.hpp"

namespace switchyard::verify {

/// Experts in plain vectors: what random layers are made of. Written apart from the library's own
/// memory source, so that a mistake in one of them shows.
class PlainSource final : public ExpertSource {
 public:
  PlainSource(const ExpertConfig& config, DType stored)
      : gate(cells(config)),
        up(config.gated ? cells(config) : 0),
        down(cells(config)),
        gate_bias(config.bias ? rows(config, config.inner) : 0),
        up_bias(config.bias && config.gated ? rows(config, config.inner) : 0),
        down_bias(config.bias ? rows(config, config.hidden) : 0),
        config_(config),
        stored_(stored) {}

  [[nodiscard]] DType dtype() const override { return stored_; }

  void read(std::int32_t expert, ExpertPart part, std::int64_t first_row, std::int64_t num_rows,
            DType dtype, void* out) const override {
    const bool is_down = part == ExpertPart::kDown;
    const std::vector<float>& values = is_down ? down : part == ExpertPart::kUp ? up : gate;
    const std::int64_t cols = is_down ? config_.inner : config_.hidden;
    const std::int64_t rows = is_down ? config_.hidden : config_.inner;
    const auto begin = (expert * rows + first_row) * cols;
    for (std::int64_t i = 0; i < num_rows * cols; ++i) {
      store_float(out, dtype, i, values[static_cast<std::size_t>(begin + i)]);
    }
  }

  void read_bias(std::int32_t expert, ExpertPart part, float* out) const override {
    const bool is_down = part == ExpertPart::kDown;
    const std::vector<float>& values = is_down                   ? down_bias
                                       : part == ExpertPart::kUp ? up_bias
                                                                 : gate_bias;
    const std::int64_t size = is_down ? config_.hidden : config_.inner;
    for (std::int64_t i = 0; i < size; ++i) {
      out[i] = values[static_cast<std::size_t>(expert * size + i)];
    }
  }

  std::vector<float> gate;       ///< [E, I, H]
  std::vector<float> up;         ///< [E, I, H]
  std::vector<float> down;       ///< [E, H, I]
  std::vector<float> gate_bias;  ///< [E, I]
  std::vector<float> up_bias;    ///< [E, I]
  std::vector<float> down_bias;  ///< [E, H]

 private:
  static std::size_t rows(const ExpertConfig& config, std::int64_t size) {
    return static_cast<std::size_t>(config.num_experts * size);
  }
  static std::size_t cells(const ExpertConfig& config) {
    return rows(config, config.hidden * config.inner);
  }

  ExpertConfig config_;
  DType stored_;
};

}  // namespace switchyard::verify

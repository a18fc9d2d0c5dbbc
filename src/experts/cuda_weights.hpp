#pragma once

#include <cstdint>

#include "switchyard/experts.hpp"

namespace switchyard {

/// Device memory, freed with its owner; move-free, made once when weights are loaded.
class DeviceMemory {
 public:
  /// @throws Error{kOutOfMemory}.
  explicit DeviceMemory(std::int64_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  [[nodiscard]] std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
};

/// The experts of one rank on a GPU, as every CUDA path reads them, in place and without a copy.
class CudaExpertWeights final : public ExpertWeights {
 public:
  explicit CudaExpertWeights(const LoadExpertsArgs& args);

  /// [El, 2I, H], gate rows, then up rows; plain: [El, I, H].
  [[nodiscard]] std::byte* w13() const { return w13_.data(); }
  /// [El, H, I].
  [[nodiscard]] std::byte* w2() const { return w2_.data(); }
  /// [El, 2I] (plain: [El, I]) and [El, H]; null without biases.
  [[nodiscard]] float* b13() const { return reinterpret_cast<float*>(b13_.data()); }
  [[nodiscard]] float* b2() const { return reinterpret_cast<float*>(b2_.data()); }
  /// Rows of w13 an expert has: 2I or I.
  [[nodiscard]] std::int64_t first_rows() const {
    return config().gated ? 2 * config().inner : config().inner;
  }
  [[nodiscard]] double bytes_per_expert() const override {
    return static_cast<double>((first_rows() + config().inner) * config().hidden *
                               size_of(dtype()));
  }

 private:
  DeviceMemory w13_, w2_, b13_, b2_;
};

}  // namespace switchyard

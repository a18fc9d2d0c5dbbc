#pragma once

#include <cstdint>
#include <vector>

#include "core/gpu/device_buffer.hpp"
#include "core/gpu/tensor_map.hpp"
#include "switchyard/experts.hpp"

namespace switchyard {

/// Weights that lie on a GPU in the form that CudaExpertWeights has; biases may be null.
struct WeightsOnDevice {
  const void* w13 = nullptr;
  const void* w2 = nullptr;
  const float* b13 = nullptr;
  const float* b2 = nullptr;
};

/// The experts of one rank on a GPU, as every CUDA path reads them, in place and without a copy.
/// Stored weights (format() with codes) are matrices as coded/pack.hpp leaves them, in the order of
/// exact ones.
class CudaExpertWeights final : public ExpertWeights {
 public:
  /// Memory for them, to be filled.
  explicit CudaExpertWeights(const LoadExpertsArgs& args);
  /// Those of `num_local` experts, used where they lie, which outlives this.
  CudaExpertWeights(const ExpertConfig& config, DType dtype, const WeightsOnDevice& weights,
                    std::int32_t first_expert, std::int32_t num_local);

  /// [El, 2I, H], gate rows, then up rows; plain: [El, I, H].
  [[nodiscard]] std::byte* w13() const { return w13_.data(); }
  /// [El, H, I].
  [[nodiscard]] std::byte* w2() const { return w2_.data(); }
  /// Of stored weights but int4, else null: a factor for each matrix, or the scales of blocks
  /// (StreamingParams says how they lie).
  [[nodiscard]] float* scales13() const { return reinterpret_cast<float*>(scales13_.data()); }
  [[nodiscard]] float* scales2() const { return reinterpret_cast<float*>(scales2_.data()); }
  [[nodiscard]] const Int4Form& int4_form() const { return int4_; }  ///< Of kInt4.
  /// Of kMxfp4: whether the scales of every matrix are near enough to each other to be exponents of
  /// e5m2 (coded::Packed).
  [[nodiscard]] bool scales_fold() const { return scales_fold_; }
  void set_scales_fold(bool fold) { scales_fold_ = fold; }
  /// [El, 2I] (plain: [El, I]) and [El, H]; null without biases.
  [[nodiscard]] float* b13() const { return reinterpret_cast<float*>(b13_.data()); }
  [[nodiscard]] float* b2() const { return reinterpret_cast<float*>(b2_.data()); }
  /// The tensor maps of w13 and w2, for whichever kernels run.
  [[nodiscard]] TensorMaps& maps() const { return maps_; }
  void read(std::int32_t expert, ExpertPart part, std::int64_t first_row, std::int64_t num_rows,
            DType dtype, void* out) const override;
  void read_bias(std::int32_t expert, ExpertPart part, float* out) const override;
  /// Rows of w13 an expert has: 2I or I.
  [[nodiscard]] std::int64_t first_rows() const {
    return config().gated ? 2 * config().inner : config().inner;
  }
  [[nodiscard]] double bytes_per_expert() const override {
    return static_cast<double>(num_first() * first_place() + down_place());
  }
  /// Matrices of w13 an expert has: gate and up, or one.
  [[nodiscard]] std::int64_t num_first() const { return config().gated ? 2 : 1; }
  /// Bytes of one of them, and of a matrix of w2; scales of one.
  [[nodiscard]] std::int64_t first_place() const {
    return place_of(config().inner, config().hidden);
  }
  [[nodiscard]] std::int64_t down_place() const {
    return place_of(config().hidden, config().inner);
  }
  [[nodiscard]] std::int64_t first_scales() const {
    return scales_of(config().inner, config().hidden);
  }
  [[nodiscard]] std::int64_t down_scales() const {
    return scales_of(config().hidden, config().inner);
  }

 private:
  [[nodiscard]] std::int64_t place_of(std::int64_t rows, std::int64_t cols) const;
  [[nodiscard]] std::int64_t scales_of(std::int64_t rows, std::int64_t cols) const;
  [[nodiscard]] StoredLayout layout_of(std::int64_t rows, std::int64_t cols) const {
    return {.format = format(), .rows = rows, .cols = cols, .int4 = int4_};
  }
  void read_stored(std::int64_t matrix, ExpertPart part, std::int64_t first_row,
                   std::int64_t num_rows, float* out) const;
  /// Of a matrix that lies in units, or as it is stored.
  void read_units(const std::byte* matrix, const std::vector<float>& scales, std::int64_t cols,
                  std::int64_t first_row, std::int64_t num_rows, float* out) const;
  void read_rows(const std::byte* matrix, float factor, const StoredLayout& layout,
                 std::int64_t first_row, std::int64_t num_rows, float* out) const;

  Int4Form int4_;
  bool scales_fold_ = false;
  DeviceMemory w13_, w2_, b13_, b2_, scales13_, scales2_;
  mutable TensorMaps maps_;
};

}  // namespace switchyard

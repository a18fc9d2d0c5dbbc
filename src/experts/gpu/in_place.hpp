#pragma once

#include "experts/gpu/weights.hpp"

namespace switchyard {

/// Weights that lie on a GPU, which its layers use there: what make_device_source() makes.
class DeviceSource final : public ExpertSource {
 public:
  DeviceSource(const ExpertConfig& config, DType dtype, const WeightsOnDevice& weights);

  [[nodiscard]] DType dtype() const override { return reader_.dtype(); }
  void read(std::int32_t expert, ExpertPart part, std::int64_t first_row, std::int64_t num_rows,
            DType dtype, void* out) const override;
  void read_bias(std::int32_t expert, ExpertPart part, float* out) const override;

  [[nodiscard]] const WeightsOnDevice& weights() const { return weights_; }
  [[nodiscard]] std::int32_t num_experts() const { return reader_.config().num_experts; }
  /// All of them, where they lie: experts `first` and following of a layer's.
  [[nodiscard]] std::unique_ptr<ExpertWeights> in_place(const ExpertConfig& layer,
                                                        std::int32_t first) const;

 private:
  WeightsOnDevice weights_;
  CudaExpertWeights reader_;
};

}  // namespace switchyard

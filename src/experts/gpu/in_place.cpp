// Expert weights where they lie on a GPU.
#include "experts/gpu/in_place.hpp"

#include "core/gpu/cuda_device.hpp"
#include "experts/source_check.hpp"

namespace switchyard {

DeviceSource::DeviceSource(const ExpertConfig& config, DType dtype, const WeightsOnDevice& weights)
    : weights_(weights), reader_(config, dtype, weights, 0, config.num_experts) {}

void DeviceSource::read(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                        std::int64_t num_rows, DType dtype, void* out) const {
  reader_.read(expert, part, first_row, num_rows, dtype, out);
}

void DeviceSource::read_bias(std::int32_t expert, ExpertPart part, float* out) const {
  reader_.read_bias(expert, part, out);
}

std::unique_ptr<ExpertWeights> DeviceSource::in_place(const ExpertConfig& layer,
                                                      std::int32_t first) const {
  return std::make_unique<CudaExpertWeights>(layer, reader_.dtype(), weights_, first,
                                             num_experts());
}

std::unique_ptr<ExpertSource> make_device_source(const ExpertConfig& config, DType dtype,
                                                 const void* w13, const void* w2, const float* b13,
                                                 const float* b2) {
  check_source(config, dtype, w13, w2, b13, b2);
  for (const void* array : {w13, w2, static_cast<const void*>(b13), static_cast<const void*>(b2)}) {
    require(is_aligned_16(array), "expert weights on a GPU are not aligned to 16 bytes");
  }
  return std::make_unique<DeviceSource>(config, dtype,
                                        WeightsOnDevice{.w13 = w13,
                                                        .w2 = w2,
                                                        .b13 = config.bias ? b13 : nullptr,
                                                        .b2 = config.bias ? b2 : nullptr});
}

}  // namespace switchyard

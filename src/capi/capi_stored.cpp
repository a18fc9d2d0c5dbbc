// Experts that are given as codes with scales.
#include "capi/capi.hpp"
#include "core/check.hpp"

namespace switchyard::capi {
namespace {

constexpr std::uint8_t kFloat8E4M3 = 10;  // DLPack's kFloat8_e4m3fn

/// A tensor of bytes, or of `also`, of this shape on the host.
const void* bytes_of(const char* name, const sy_tensor* tensor,
                     std::initializer_list<std::int64_t> shape, std::uint8_t also = SY_CODE_UINT) {
  check_tensor(name, tensor, shape, Backend::kCpu);
  const bool right = tensor->type_bits == 8 && tensor->type_lanes == 1 &&
                     (tensor->type_code == SY_CODE_UINT || tensor->type_code == also);
  require(right, "{} is {}, want u8", name, type_name(*tensor));
  return data_of(*tensor);
}

const float* floats_of(const char* name, const sy_tensor* tensor,
                       std::initializer_list<std::int64_t> shape) {
  if (tensor == nullptr) return nullptr;
  check_tensor(name, tensor, shape, Backend::kCpu);
  check_dtype(name, *tensor, DType::kF32);
  return reinterpret_cast<const float*>(data_of(*tensor));
}

constexpr std::int64_t blocks_of(std::int64_t extent) {
  return (extent + kE4M3Block - 1) / kE4M3Block;
}

}  // namespace

std::unique_ptr<ExpertSource> stored_source_of(const ExpertConfig& config,
                                               const sy_layer_arrays& arrays) {
  const std::int64_t num = config.num_experts, matrices = config.gated ? 2 : 1;
  const std::int64_t hidden = config.hidden, inner = config.inner;
  require((arrays.b13 == nullptr) == (arrays.b2 == nullptr),
          "b13 and b2 must both be given, or neither");
  StoredExperts stored{.b13 = floats_of("b13", arrays.b13, {num, matrices * inner}),
                       .b2 = floats_of("b2", arrays.b2, {num, hidden})};
  const bool e4m3 = arrays.w13_scales->type_code == SY_CODE_FLOAT;
  if (e4m3) {
    stored.w13 = bytes_of("w13", arrays.w13, {num, matrices * inner, hidden}, kFloat8E4M3);
    stored.w2 = bytes_of("w2", arrays.w2, {num, hidden, inner}, kFloat8E4M3);
    stored.scales13 = floats_of("w13_scales", arrays.w13_scales,
                                {num, matrices * blocks_of(inner), blocks_of(hidden)});
    stored.scales2 =
        floats_of("w2_scales", arrays.w2_scales, {num, blocks_of(hidden), blocks_of(inner)});
    return make_stored_source(config, stored);
  }
  stored.format = WeightFormat::kMxfp4;
  stored.w13 = bytes_of("w13", arrays.w13, {num, matrices * inner, hidden / 2});
  stored.w2 = bytes_of("w2", arrays.w2, {num, hidden, inner / 2});
  stored.scales13 =
      bytes_of("w13_scales", arrays.w13_scales, {num, matrices * inner, hidden / kMxfp4Block});
  stored.scales2 = bytes_of("w2_scales", arrays.w2_scales, {num, hidden, inner / kMxfp4Block});
  return make_stored_source(config, stored);
}

}  // namespace switchyard::capi

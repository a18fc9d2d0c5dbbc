// Experts that are given as codes with scales.
#include "capi/capi.hpp"
#include "core/check.hpp"

namespace switchyard::capi {
namespace {

constexpr std::uint8_t kFloat8E4M3 = 10;  // DLPack's kFloat8_e4m3fn

using Shape = std::initializer_list<std::int64_t>;

/// A tensor of bytes, or of `also`, of this shape on the host.
const void* bytes_of(const char* name, const sy_tensor* tensor, Shape shape,
                     std::uint8_t also = SY_CODE_UINT) {
  check_tensor(name, tensor, shape, Backend::kCpu);
  const bool right = tensor->type_bits == 8 && tensor->type_lanes == 1 &&
                     (tensor->type_code == SY_CODE_UINT || tensor->type_code == also);
  require(right, "{} is {}, want u8", name, type_name(*tensor));
  return data_of(*tensor);
}

const float* floats_of(const char* name, const sy_tensor* tensor, Shape shape) {
  if (tensor == nullptr) return nullptr;
  check_tensor(name, tensor, shape, Backend::kCpu);
  check_dtype(name, *tensor, DType::kF32);
  return reinterpret_cast<const float*>(data_of(*tensor));
}

/// Codes and scales of `matrices` matrices an expert, each laid out as `of`.
ConstStoredRows rows_of(const char* name, const sy_tensor* codes, const char* name_of_scales,
                        const sy_tensor* scales, std::int64_t num_experts, std::int64_t matrices,
                        const StoredLayout& of) {
  const Shape values{num_experts, matrices * of.rows, of.value_row_bytes()};
  const bool e4m3 = of.format == WeightFormat::kE4M3;
  const std::int64_t scale_bytes = e4m3 ? sizeof(float) : 1;
  const Shape blocks{num_experts, matrices * of.scale_rows(), of.scale_row_bytes() / scale_bytes};
  const void* const from =
      bytes_of(name, codes, values, e4m3 ? kFloat8E4M3 : std::uint8_t{SY_CODE_UINT});
  return {static_cast<const std::byte*>(from),
          static_cast<const std::byte*>(
              e4m3 ? static_cast<const void*>(floats_of(name_of_scales, scales, blocks))
                   : bytes_of(name_of_scales, scales, blocks))};
}

}  // namespace

std::unique_ptr<ExpertSource> stored_source_of(const ExpertConfig& config,
                                               const StoredArrays& arrays) {
  const std::int64_t num = config.num_experts, matrices = config.gated ? 2 : 1;
  require(arrays.w13_scales != nullptr && arrays.w2_scales != nullptr,
          "w13_scales and w2_scales must both be given");
  require((arrays.b13 == nullptr) == (arrays.b2 == nullptr),
          "b13 and b2 must both be given, or neither");
  const WeightFormat format =
      arrays.w13_scales->type_code == SY_CODE_FLOAT ? WeightFormat::kE4M3 : WeightFormat::kMxfp4;
  const ConstStoredRows first =
      rows_of("w13", arrays.w13, "w13_scales", arrays.w13_scales, num, matrices,
              {.format = format, .rows = config.inner, .cols = config.hidden});
  const ConstStoredRows second =
      rows_of("w2", arrays.w2, "w2_scales", arrays.w2_scales, num, 1,
              {.format = format, .rows = config.hidden, .cols = config.inner});
  return make_stored_source(config,
                            {.format = format,
                             .w13 = first.values,
                             .scales13 = first.scales,
                             .w2 = second.values,
                             .scales2 = second.scales,
                             .b13 = floats_of("b13", arrays.b13, {num, matrices * config.inner}),
                             .b2 = floats_of("b2", arrays.b2, {num, config.hidden})});
}

}  // namespace switchyard::capi

#include "layer/compute_check.hpp"

#include "core/shape_check.hpp"

namespace switchyard {

void check_compute(const LayerModel& model, const LayerOptions& options) {
  if (!computes_fp8(options)) {
    if (options.compute) require_float("the compute type", *options.compute);
    return;
  }
  if (options.backend != Backend::kCuda) {
    fail(ErrorCode::kUnsupported,
         "compute=fp8 on {}: rows of e4m3 are multiplied on cuda only; want f32, bf16 or f16",
         to_string(options.backend));
  }
  const WeightFormat stored = model.experts->stored_format();
  if (options.weights == WeightFormat::kExact || options.weights == WeightFormat::kQ8) {
    fail(ErrorCode::kUnsupported,
         "compute=fp8 with weights={}: want weights=stored or e4m3, of experts that are stored so",
         to_string(options.weights));
  }
  if (stored != WeightFormat::kE4M3) {
    fail(ErrorCode::kUnsupported,
         "compute=fp8 of experts stored as {}: want those that are stored as e4m3",
         to_string(stored));
  }
  const ExpertConfig& experts = model.config.experts;
  if (!experts.gated) {
    fail(ErrorCode::kUnsupported, "compute=fp8 of plain experts: want gated ones");
  }
  constexpr std::int64_t kMultiple = 16;
  if (experts.hidden % kMultiple != 0 || experts.inner % kMultiple != 0) {
    fail(ErrorCode::kUnsupported, "compute=fp8: hidden={} and inner={} want multiples of {}",
         experts.hidden, experts.inner, kMultiple);
  }
}

}  // namespace switchyard

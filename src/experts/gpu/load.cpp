// Places the weights of a rank's experts on the GPU: one expert's matrix at a time goes through
// host memory, so no second copy of all ever exists.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

#include "core/gpu/cuda_check.hpp"
#include "core/gpu/cuda_memory.hpp"
#include "core/row_ops.hpp"
#include "core/shape_check.hpp"
#include "experts/gpu/coded/layout.hpp"
#include "experts/gpu/coded/pack.hpp"
#include "experts/gpu/weights.hpp"
#include "experts/implementations.hpp"

namespace switchyard {
namespace {

class Loader {
 public:
  Loader(const LoadExpertsArgs& args, const CudaExpertWeights& weights)
      : args_(args), weights_(weights) {}

  void load(std::int32_t local) {
    const ExpertConfig& config = args_.config;
    const std::int64_t parts = weights_.num_first();
    for (int part = 0; part < parts; ++part) {
      const std::int64_t matrix = std::int64_t{local} * parts + part;
      load_matrix(local, part == 0 ? ExpertPart::kGate : ExpertPart::kUp, config.inner,
                  config.hidden, weights_.w13() + matrix * weights_.first_place(),
                  weights_.scales13() + matrix * weights_.first_scales());
    }
    load_matrix(local, ExpertPart::kDown, config.hidden, config.inner,
                weights_.w2() + local * weights_.down_place(),
                weights_.scales2() + local * weights_.down_scales());
    if (!config.bias) return;
    float* bias = weights_.b13() + local * weights_.first_rows();
    load_bias(local, ExpertPart::kGate, config.inner, bias);
    if (config.gated) load_bias(local, ExpertPart::kUp, config.inner, bias + config.inner);
    load_bias(local, ExpertPart::kDown, config.hidden, weights_.b2() + local * config.hidden);
  }
  /// Of all matrices so far (coded::Packed).
  [[nodiscard]] bool folds() const { return folds_; }

 private:
  void load_matrix(std::int32_t local, ExpertPart part, std::int64_t rows, std::int64_t cols,
                   std::byte* to, float* scales_to) {
    if (args_.format != WeightFormat::kExact) {
      load_stored(local, part, rows, cols, to, scales_to);
      return;
    }
    host_.resize(static_cast<std::size_t>(rows * cols * size_of(args_.dtype)));
    args_.source->read(args_.first_expert + local, part, 0, rows, args_.dtype, host_.data());
    copy(to, host_.data(), host_.size());
  }
  /// A refused code or scale is named with its place in the matrix.
  void load_stored(std::int32_t local, ExpertPart part, std::int64_t rows, std::int64_t cols,
                   std::byte* to, float* scales_to) {
    const StoredLayout layout{
        .format = args_.format, .rows = rows, .cols = cols, .int4 = weights_.int4_form()};
    host_.resize(static_cast<std::size_t>(layout.value_bytes()));
    scales_.resize(static_cast<std::size_t>(layout.scale_bytes()));
    const StoredRows stored{host_.data(), scales_.data(),
                            args_.source->stored_factor(args_.first_expert + local, part)};
    args_.source->read_stored(args_.first_expert + local, part, 0, rows, stored);
    packed_.assign(static_cast<std::size_t>(coded::bytes_of(layout)), std::byte{0});
    const coded::Packed packed = coded::pack(layout, stored, packed_.data());
    folds_ = folds_ && packed.folds;
    copy(to, packed_.data(), packed_.size());
    if (args_.format == WeightFormat::kE4M3) {
      copy(scales_to, scales_.data(), scales_.size());
    } else if (coded::floats_of(layout) != 0) {
      copy(scales_to, &packed.factor, sizeof packed.factor);
    }
  }
  static void copy(void* to, const void* from, std::size_t bytes) {
    copy_to_device(to, from, bytes);
  }
  void load_bias(std::int32_t local, ExpertPart part, std::int64_t count, float* to) {
    bias_.resize(static_cast<std::size_t>(count));
    args_.source->read_bias(args_.first_expert + local, part, bias_.data());
    copy(to, bias_.data(), bias_.size() * sizeof(float));
  }

  const LoadExpertsArgs& args_;
  const CudaExpertWeights& weights_;
  std::vector<std::byte> host_, scales_, packed_;
  std::vector<float> bias_;
  bool folds_ = true;
};

DeviceMemory room_for_weights(std::int64_t bytes) {
  try {
    return DeviceMemory(bytes);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kOutOfMemory) throw;
    fail(ErrorCode::kOutOfMemory, "the GPU has no room for {} MB of expert weights",
         bytes / 1000000);
  }
}

}  // namespace

CudaExpertWeights::CudaExpertWeights(const LoadExpertsArgs& args)
    : ExpertWeights(args.config, args.dtype, args.format, Backend::kCuda, args.first_expert,
                    args.num_local),
      int4_(args.format == WeightFormat::kInt4 ? args.source->int4_form() : Int4Form{}),
      w13_(room_for_weights(args.num_local * num_first() * first_place())),
      w2_(room_for_weights(args.num_local * down_place())),
      b13_(room_for_weights(args.config.bias ? args.num_local * first_rows() * 4 : 0)),
      b2_(room_for_weights(args.config.bias ? args.num_local * args.config.hidden * 4 : 0)),
      scales13_(room_for_weights(args.num_local * num_first() * first_scales() * 4)),
      scales2_(room_for_weights(args.num_local * down_scales() * 4)) {}

std::int64_t CudaExpertWeights::place_of(std::int64_t rows, std::int64_t cols) const {
  return format() == WeightFormat::kExact ? rows * cols * size_of(dtype())
                                          : coded::bytes_of(layout_of(rows, cols));
}

std::int64_t CudaExpertWeights::scales_of(std::int64_t rows, std::int64_t cols) const {
  return coded::floats_of(layout_of(rows, cols));
}

CudaExpertWeights::CudaExpertWeights(const ExpertConfig& config, DType dtype,
                                     const WeightsOnDevice& weights, std::int32_t first_expert,
                                     std::int32_t num_local)
    : ExpertWeights(config, dtype, WeightFormat::kExact, Backend::kCuda, first_expert, num_local),
      w13_(weights.w13),
      w2_(weights.w2),
      b13_(static_cast<const void*>(weights.b13)),
      b2_(static_cast<const void*>(weights.b2)) {}

void CudaExpertWeights::read(std::int32_t expert, ExpertPart part, std::int64_t first_row,
                             std::int64_t num_rows, DType type, void* out) const {
  const std::int64_t local = local_of(expert, part, first_row, num_rows);
  require_float("the type that weights are read in", type);
  const bool down = part == ExpertPart::kDown;
  const std::int64_t cols = down ? config().inner : config().hidden;
  if (format() != WeightFormat::kExact) {
    std::vector<float> numbers(static_cast<std::size_t>(num_rows * cols));
    const std::int64_t matrix =
        down ? local : local * num_first() + (part == ExpertPart::kUp ? 1 : 0);
    if (num_rows > 0) read_stored(matrix, part, first_row, num_rows, numbers.data());
    row_ops::convert(DType::kF32, reinterpret_cast<const std::byte*>(numbers.data()), type,
                     static_cast<std::byte*>(out), num_rows * cols);
    return;
  }
  const std::int64_t row = (down ? local * config().hidden : local * first_rows()) +
                           (part == ExpertPart::kUp ? config().inner : 0) + first_row;
  std::vector<std::byte> host(static_cast<std::size_t>(num_rows * cols * size_of(dtype())));
  SWITCHYARD_CUDA(cudaMemcpy(host.data(), (down ? w2() : w13()) + row * cols * size_of(dtype()),
                             host.size(), cudaMemcpyDeviceToHost));
  row_ops::convert(dtype(), host.data(), type, static_cast<std::byte*>(out), num_rows * cols);
}

void CudaExpertWeights::read_stored(std::int64_t matrix, ExpertPart part, std::int64_t first_row,
                                    std::int64_t num_rows, float* out) const {
  const bool down = part == ExpertPart::kDown;
  const std::byte* from = down ? w2() + matrix * down_place() : w13() + matrix * first_place();
  const std::int64_t count = down ? down_scales() : first_scales();
  std::vector<float> scales(static_cast<std::size_t>(std::max<std::int64_t>(1, count)), 1.0F);
  if (count > 0) {
    SWITCHYARD_CUDA(cudaMemcpy(scales.data(), (down ? scales2() : scales13()) + matrix * count,
                               scales.size() * sizeof(float), cudaMemcpyDeviceToHost));
  }
  const StoredLayout layout = down ? layout_of(config().hidden, config().inner)
                                   : layout_of(config().inner, config().hidden);
  if (coded::unit_bytes(format()) != 0) {
    read_units(from, scales, layout.cols, first_row, num_rows, out);
  } else {
    read_rows(from, scales[0], layout, first_row, num_rows, out);
  }
}

void CudaExpertWeights::read_units(const std::byte* matrix, const std::vector<float>& scales,
                                   std::int64_t cols, std::int64_t first_row, std::int64_t num_rows,
                                   float* out) const {
  const std::int64_t of_group = coded::group_bytes(format(), cols);
  const std::int64_t first_group = first_row / coded::kGroupRows;
  std::vector<std::byte> codes(
      static_cast<std::size_t>((coded::groups_of(first_row + num_rows) - first_group) * of_group));
  SWITCHYARD_CUDA(cudaMemcpy(codes.data(), matrix + first_group * of_group, codes.size(),
                             cudaMemcpyDeviceToHost));
  coded::unpack(format(), cols, codes.data(), scales[0], scales.data(), first_row, num_rows, out);
}

void CudaExpertWeights::read_rows(const std::byte* matrix, float factor, const StoredLayout& layout,
                                  std::int64_t first_row, std::int64_t num_rows, float* out) const {
  const StoredLayout these = layout_of(num_rows, layout.cols);
  std::vector<std::byte> values(static_cast<std::size_t>(these.value_bytes()));
  std::vector<std::byte> scales(static_cast<std::size_t>(these.scale_bytes()));
  SWITCHYARD_CUDA(cudaMemcpy(values.data(), matrix + first_row * layout.value_row_bytes(),
                             values.size(), cudaMemcpyDeviceToHost));
  SWITCHYARD_CUDA(cudaMemcpy(scales.data(),
                             matrix + layout.value_bytes() + first_row * layout.scale_row_bytes(),
                             scales.size(), cudaMemcpyDeviceToHost));
  decode(these, {values.data(), scales.data(), factor}, DType::kF32, out);
}

void CudaExpertWeights::read_bias(std::int32_t expert, ExpertPart part, float* out) const {
  const std::int64_t local = local_of(expert, part, 0, 0);
  require(config().bias, "the experts have no biases");
  const bool down = part == ExpertPart::kDown;
  const std::int64_t count = down ? config().hidden : config().inner;
  const float* from =
      down ? b2() + local * config().hidden
           : b13() + local * first_rows() + (part == ExpertPart::kUp ? config().inner : 0);
  SWITCHYARD_CUDA(cudaMemcpy(out, from, static_cast<std::size_t>(count) * sizeof(float),
                             cudaMemcpyDeviceToHost));
}

std::unique_ptr<ExpertWeights> load_experts_cuda(const LoadExpertsArgs& args) {
  if (args.format != WeightFormat::kExact) {
    if (!has_codes(args.format)) {
      fail(ErrorCode::kUnsupported,
           "{} weights on cuda: it computes with exact, e4m3, mxfp4, int4 or nvfp4 ones",
           to_string(args.format));
    }
    if (args.dtype != DType::kBF16) {
      fail(ErrorCode::kUnsupported, "{} weights on cuda: they compute with bf16, not {}",
           to_string(args.format), to_string(args.dtype));
    }
    for (const std::int64_t extent : {args.config.hidden, args.config.inner}) {
      if (extent % coded::kGroupRows != 0) {
        fail(ErrorCode::kUnsupported,
             "{} weights on cuda: hidden={} and inner={} want multiples of {}",
             to_string(args.format), args.config.hidden, args.config.inner, coded::kGroupRows);
      }
    }
  }
  auto weights = std::make_unique<CudaExpertWeights>(args);
  Loader loader(args, *weights);
  for (std::int32_t local = 0; local < args.num_local; ++local) {
    loader.load(local);
    if (args.progress) args.progress(static_cast<double>(local + 1) / args.num_local);
  }
  weights->set_scales_fold(loader.folds());
  return weights;
}

}  // namespace switchyard

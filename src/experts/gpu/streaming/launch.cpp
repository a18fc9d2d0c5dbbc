// Checks a few-token call of the experts and enqueues its two kernels.

#include <cuda_runtime_api.h>

#include <algorithm>

#include "core/check.hpp"
#include "core/gpu/cuda_check.hpp"
#include "core/gpu/cuda_device.hpp"
#include "core/gpu/prepare_once.hpp"
#include "core/gpu/tensor_map.hpp"
#include "experts/gpu/coded/layout.hpp"
#include "experts/gpu/streaming/args.hpp"
#include "experts/gpu/streaming/kernels.hpp"
#include "experts/gpu/streaming/shape.hpp"

namespace switchyard {
namespace {

using namespace streaming;

constexpr int kMaxGroups = 32;

bool aligned(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; }

void check(const StreamingParams& p) {
  const std::int64_t multiple = p.dtype == DType::kF32 ? 4 : 8;
  require(p.dtype == DType::kF32 || p.dtype == DType::kBF16 || p.dtype == DType::kF16,
          "experts compute in f32, bf16 or f16, not {}", to_string(p.dtype));
  require(p.hidden > 0 && p.hidden % multiple == 0,
          "hidden={} is not a positive multiple of {} ({})", p.hidden, multiple,
          to_string(p.dtype));
  require(p.inner > 0 && p.inner % multiple == 0, "inner={} is not a positive multiple of {} ({})",
          p.inner, multiple, to_string(p.dtype));
  require(1 <= p.num_experts && p.num_experts <= 1024, "num_experts={} lies outside [1, 1024]",
          p.num_experts);
  require(p.num_tokens >= 0 && p.max_rows >= 0 && p.max_assignments >= 0,
          "negative counts: num_tokens={}, max_rows={}, max_assignments={}", p.num_tokens,
          p.max_rows, p.max_assignments);
  require(1 <= p.subtree.num_groups && p.subtree.num_groups <= kMaxGroups,
          "num_groups={} lies outside [1, {}]", p.subtree.num_groups, kMaxGroups);
  require(p.gated || p.activation != Activation::kClampedSwiglu,
          "clamped_swiglu needs gated experts");
  require(aligned(p.x) && aligned(p.w13) && aligned(p.w2) && aligned(p.act),
          "x, w13, w2 and act must be aligned to 16 bytes");
  if (p.format != WeightFormat::kExact) {
    require(coded::unit_bytes(p.format) != 0, "weights in {} are not streamed",
            to_string(p.format));
    require(p.dtype == DType::kBF16, "{} weights are streamed for bf16, not {}",
            to_string(p.format), to_string(p.dtype));
    require(p.scales13 != nullptr && p.scales2 != nullptr, "{} weights without their scales",
            to_string(p.format));
    require(
        !p.batch_invariant,
        "{} weights are not streamed batch-invariantly: a row's bits depend on how many rows its "
        "expert has",
        to_string(p.format));
  }
  require(
      p.sums_dtype == DType::kF32 || p.sums_dtype == DType::kBF16 || p.sums_dtype == DType::kF16,
      "sums are f32, bf16 or f16, not {}", to_string(p.sums_dtype));
}

Pieces pieces(const StreamingKernelShape& shape, WeightFormat format, int weight_rows,
              std::int64_t row_bytes) {
  Pieces pieces{};
  int bytes = shape.piece_bytes;
  for (int level = 0; level < kPieceLevels; ++level) {
    pieces.bytes[level] = bytes;
    pieces.count[level] = static_cast<int>((row_bytes + bytes - 1) / bytes);
    pieces.tokens_at[level] = static_cast<int>(weight_bytes(format, weight_rows, bytes));
    bytes = next_piece(format, bytes);
  }
  pieces.stage_bytes = shape.stage_bytes;
  pieces.num_stages = shape.num_stages;
  pieces.lead_stages = shape.lead_stages;
  return pieces;
}

UpArgs up_args(const StreamingParams& p, const StreamingShape& shape, bool hopper) {
  const UpLayout at = up_layout(p.problem());
  UpArgs args{};
  const bool by_maps = hopper && p.format == WeightFormat::kExact;
  args.pieces = pieces(shape.up, p.format, 16 * shape.up.tiles, p.hidden * size_of(p.dtype));
  for (int level = 0; by_maps && level < kPieceLevels; ++level) {
    args.w13_map[level] = tensor_map_of(
        p.weight_maps, StackMapArgs{.data = p.w13,
                                    .matrices = std::int64_t{p.num_experts} * (p.gated ? 2 : 1),
                                    .rows = p.inner,
                                    .row_bytes = p.hidden * size_of(p.dtype),
                                    .box_matrices = p.gated ? 2 : 1,
                                    .box_rows = (p.gated ? 8 : 16) * shape.up.tiles,
                                    .box_bytes = args.pieces.bytes[level]});
  }
  args.x = static_cast<const std::byte*>(p.x);
  args.w13 = static_cast<const std::byte*>(p.w13);
  args.b13 = p.b13;
  args.act = p.act;
  args.expert_begin = p.expert_begin;
  args.expert_rows = p.expert_rows;
  args.row_token = p.x_is_packed ? nullptr : p.row_token;
  args.num_experts = p.num_experts;
  args.max_rows = static_cast<int>(p.max_rows);
  args.hidden = static_cast<int>(p.hidden);
  args.inner = static_cast<int>(p.inner);
  args.gated = p.gated;
  args.plan_is_older = p.plan_is_older;
  args.activation = p.activation;
  args.alpha = p.alpha;
  args.limit = p.limit;
  args.pass_rows = pass_rows(shape, p.format);
  args.hits_at = at.hits;
  args.tokens_at = at.tokens;
  args.parts_at = at.parts;
  args.ring_at = at.ring;
  args.scales13 = p.scales13;
  return args;
}

DownArgs down_args(const StreamingParams& p, const StreamingShape& shape, bool hopper) {
  const DownLayout at = down_layout(p.problem(), shape.down.num_blocks);
  DownArgs args{};
  // In units of rows that lie together.
  const int unit = row_unit(p.format);
  const auto few = static_cast<int>(p.hidden / unit / shape.down.num_blocks);
  const int most = few + (p.hidden / unit % shape.down.num_blocks == 0 ? 0 : 1);
  args.tiles_per_block = (unit * most + 16 * shape.down.tiles - 1) / (16 * shape.down.tiles);
  args.few_rows = few / args.tiles_per_block;
  args.pieces = pieces(shape.down, p.format,
                       down_tile_rows(p.problem(), shape.down.num_blocks, shape.down.tiles),
                       p.inner * size_of(p.dtype));
  const bool by_maps = hopper && p.format == WeightFormat::kExact;
  for (int more = 0; more < 2; ++more) {
    for (int level = 0; by_maps && level < kPieceLevels; ++level) {
      args.w2_map[more][level] =
          tensor_map_of(p.weight_maps, StackMapArgs{.data = p.w2,
                                                    .matrices = p.num_experts,
                                                    .rows = p.hidden,
                                                    .row_bytes = p.inner * size_of(p.dtype),
                                                    .box_rows = std::max(1, args.few_rows + more),
                                                    .box_bytes = args.pieces.bytes[level]});
    }
  }
  args.act = static_cast<const std::byte*>(p.act);
  args.w2 = static_cast<const std::byte*>(p.w2);
  args.b2 = p.b2;
  args.sums = p.sums;
  args.expert_begin = p.expert_begin;
  args.expert_rows = p.expert_rows;
  args.row_weight = p.row_weight;
  args.token_begin = p.token_begin;
  args.token_row = p.token_row;
  args.num_experts = p.num_experts;
  args.num_tokens = static_cast<int>(p.num_tokens);
  args.hidden = static_cast<int>(p.hidden);
  args.inner = static_cast<int>(p.inner);
  args.pass_rows = pass_rows(shape, p.format);
  args.sums_dtype = p.sums_dtype;
  args.order = p.subtree.order;
  args.first_expert = p.first_expert;
  args.first_group = p.subtree.first_group;
  args.num_groups = p.subtree.num_groups;
  args.each_group = p.each_group;
  args.hits_at = at.hits;
  args.parts_at = at.parts;
  args.groups_at = at.groups;
  args.begins_at = at.begins;
  args.terms_at = at.terms;
  args.y_at = at.y;
  args.ring_at = at.ring;
  args.report = p.report;
  args.status = p.status;
  args.scales2 = p.scales2;
  return args;
}

WholeArgs whole_args(const StreamingParams& p, const StreamingShape& shape, const UpArgs& up) {
  const WholeLayout at = whole_layout(p.problem(), shape.ring.num_blocks);
  WholeArgs args{.up = up,
                 .down = down_args(p, shape, true),
                 .sync = p.sync,
                 .claims_at = at.claims,
                 .makes_plan = p.plan != nullptr,
                 .plan = p.plan != nullptr ? *p.plan : planning::PlanParams{},
                 .experts_at = at.experts};
  for (Pieces* pieces : {&args.up.pieces, &args.down.pieces}) {
    pieces->stage_bytes = shape.ring.stage_bytes;
    pieces->num_stages = shape.ring.num_stages;
    pieces->lead_stages = shape.ring.lead_stages;
  }
  args.up.pieces.lead_stages = 0;
  args.up.hits_at = at.up_hits;
  args.up.tokens_at = at.tokens;
  args.up.parts_at = args.down.parts_at = at.parts;
  args.up.ring_at = args.down.ring_at = at.ring;
  args.down.hits_at = at.down_hits;
  args.down.groups_at = at.groups;
  args.down.begins_at = at.begins;
  args.down.terms_at = at.terms;
  args.down.y_at = at.y;
  return args;
}

Kernels kernels_for(DType dtype, WeightFormat format, bool hopper, const StreamingShape& shape) {
  if (format == WeightFormat::kMxfp4) return kernels_hopper_mxfp4(shape);
  if (format == WeightFormat::kE4M3) return kernels_hopper_e4m3(shape);
  switch (dtype) {
    case DType::kF32: return (hopper ? kernels_hopper_f32 : kernels_portable_f32)(shape);
    case DType::kF16: return (hopper ? kernels_hopper_f16 : kernels_portable_f16)(shape);
    default: return (hopper ? kernels_hopper_bf16 : kernels_portable_bf16)(shape);
  }
}

void enqueue(const void* kernel, const StreamingKernelShape& shape, int ring_at, void* args,
             int consumers, bool hopper, cudaStream_t stream) {
  const int shared_bytes = ring_at + shape.num_stages * shape.stage_bytes;
  prepare_once(kernel, [kernel] {
    allow_most_shared_memory(kernel);
    // Both kernels of a layer, and those of the next, lie on an SM side by side.
    SWITCHYARD_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                         cudaSharedmemCarveoutMaxShared));
  });
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.num_blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads_of_block(consumers)));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = hopper ? 1 : 0;
  void* arguments[] = {args};
  SWITCHYARD_CUDA(cudaLaunchKernelExC(&config, kernel, arguments));
}

}  // namespace

StreamingChip streaming_chip() {
  const int device = current_device();
  // A call asks some times, and the host's time counts where a layer takes 30 us.
  thread_local int known = -1;
  thread_local StreamingChip chip;
  if (device == known) return chip;
  chip = {.num_sms = num_multiprocessors(),
          .shared_bytes_per_sm = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor),
          .shared_bytes_per_block = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
          .hopper = device_attribute(cudaDevAttrComputeCapabilityMajor) == 9};
  known = device;
  return chip;
}

void launch_streaming(const StreamingParams& params, const StreamingShape& shape,
                      cudaStream_t stream) {
  check(params);
  const StreamingChip chip = streaming_chip();
  if (params.path == StreamingPath::kHopper && !chip.hopper) {
    fail(ErrorCode::kUnsupported, "the device has no bulk copies (compute capability 9.0 only)");
  }
  if (!shape.fits) {
    fail(ErrorCode::kUnsupported, "{} rows of {} values do not fit the shared memory of {} blocks",
         params.max_rows, params.hidden, shape.down.num_blocks);
  }
  if (params.num_tokens == 0) return;
  const bool hopper = chip.hopper && params.path != StreamingPath::kPortable;
  if (params.format != WeightFormat::kExact && !hopper) {
    fail(ErrorCode::kUnsupported, "{} weights are streamed by compute capability 9.0 only",
         to_string(params.format));
  }
  const Kernels kernels = kernels_for(params.dtype, params.format, hopper, shape);
  if (kernels.up == nullptr || kernels.down == nullptr) {
    fail(ErrorCode::kUnsupported, "no kernels of {} and {} tiles are built", shape.up.tiles,
         shape.down.tiles);
  }
  UpArgs up = up_args(params, shape, hopper);
  if (shape.whole) {
    require(hopper && kernels.whole != nullptr, "no whole kernel of {} and {} tiles is built",
            shape.up.tiles, shape.down.tiles);
    WholeArgs whole = whole_args(params, shape, up);
    enqueue(kernels.whole, shape.ring, whole.up.ring_at, &whole, kFewConsumers, true, stream);
    return;
  }
  require(params.plan == nullptr, "two kernels do not make the plan");
  const int crew = consumers(shape, params.format);
  if (shape.up.num_blocks > 0) {
    enqueue(kernels.up, shape.up, up.ring_at, &up, crew, hopper, stream);
  }
  if (shape.down.num_blocks == 0) return;
  DownArgs down = down_args(params, shape, hopper);
  enqueue(kernels.down, shape.down, down.ring_at, &down, crew, hopper, stream);
}

void launch_streaming(const StreamingParams& params, cudaStream_t stream) {
  StreamingChip chip = streaming_chip();
  chip.hopper = chip.hopper && params.path != StreamingPath::kPortable;
  launch_streaming(params, choose_streaming(params, chip), stream);
}

}  // namespace switchyard

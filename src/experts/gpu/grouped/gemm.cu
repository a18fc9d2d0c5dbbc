#include "experts/gpu/grouped/gemm.hpp"

#include <cstdint>

#include "core/gpu/cuda_check.hpp"
#include "core/gpu/cuda_device.hpp"
#include "experts/gpu/grouped/product.hpp"
#include "experts/gpu/grouped/schedule.hpp"
#include "experts/gpu/grouped/sm80/launch.cuh"

namespace switchyard {
namespace {

constexpr int kMaxExperts = 1024;

struct Chip {
  int num_sms = 0;
  int major = 0;
};

Chip current_chip() {
  return {.num_sms = num_multiprocessors(),
          .major = device_attribute(cudaDevAttrComputeCapabilityMajor)};
}

/// Whether the Hopper kernels run; fails where no kernel does.
bool use_sm90(const GroupedGemmParams& p, const Chip& chip) {
  if (chip.major < 8 || (p.path == GroupedPath::kSm90 && chip.major != 9)) {
    fail(ErrorCode::kUnsupported, "grouped GEMM needs {}, the device is sm_{}x",
         p.path == GroupedPath::kSm90 ? "sm_90" : "sm_80 or later", chip.major);
  }
  return chip.major == 9 && p.path != GroupedPath::kSm80 && p.path != GroupedPath::kSm80Flat;
}

void require_aligned(const void* pointer, const char* name) {
  require(reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0, "{} is not 16-byte aligned", name);
}

void check_sizes(const GroupedGemmParams& p) {
  require(p.num_experts >= 1 && p.num_experts <= kMaxExperts, "num_experts={} is not in [1, {}]",
          p.num_experts, kMaxExperts);
  require(p.dtype == DType::kF32 || p.dtype == DType::kBF16 || p.dtype == DType::kF16,
          "grouped GEMM computes in f32, bf16 or f16, not {}", to_string(p.dtype));
  const std::int64_t multiple = 16 / size_of(p.dtype);
  require(p.hidden >= 1 && p.hidden % multiple == 0, "hidden={} is not a multiple of {} ({})",
          p.hidden, multiple, to_string(p.dtype));
  require(p.inner >= 1 && p.inner % multiple == 0, "inner={} is not a multiple of {} ({})", p.inner,
          multiple, to_string(p.dtype));
  require(p.gated || p.activation != Activation::kClampedSwiglu,
          "clamped_swiglu needs a gated expert");
  require(p.expert_begin != nullptr && p.expert_rows != nullptr && p.workspace != nullptr,
          "expert_begin, expert_rows or workspace is null");
  constexpr std::int64_t kMaxIndex = 0x7FFFFFFF;
  require(p.num_experts * 2 * p.inner <= kMaxIndex && p.num_experts * p.hidden <= kMaxIndex &&
              p.max_rows <= kMaxIndex - kStackRows,
          "{} experts of {} x {} or {} rows exceed 32-bit indices", p.num_experts, p.hidden,
          p.inner, p.max_rows);
  require(p.num_tokens * (p.hidden / 8) <= 0xFFFFFFFF, "{} tokens of {} values exceed 2^35 values",
          p.num_tokens, p.hidden);
}

/// The counters of the two launches lie on lines of their own.
std::int32_t* counter_of(const GroupedGemmParams& p, int launch) {
  return p.dynamic ? static_cast<std::int32_t*>(p.workspace) + launch * 32 : nullptr;
}

/// The first product where the pre-activation is kept.
void launch_kept(const GroupedProduct& product, bool sm90, cudaStream_t stream) {
  const bool f32 = product.layer.dtype == DType::kF32;
  if (product.layer.gated) {
    const auto hopper = f32 ? launch_f32_sm90_gated_kept : launch_sm90_gated_kept;
    const auto portable = f32 ? launch_f32_gated_kept : launch_sm80_gated_kept;
    (sm90 ? hopper : portable)(product, stream);
    return;
  }
  const auto hopper = f32 ? launch_f32_sm90_plain_kept : launch_sm90_plain_kept;
  const auto portable = f32 ? launch_f32_plain_kept : launch_sm80_plain_kept;
  (sm90 ? hopper : portable)(product, stream);
}

}  // namespace

TileShape tile_of(const GroupedGemmParams& p) {
  if (!p.gated || p.preactivation != nullptr) return TileShape::kCooperative;
  if (p.tile != TileShape::kAuto) return p.tile;
  const std::int64_t rows = p.expected_rows > 0 ? p.expected_rows : p.max_rows;
  return choose_tile({p.hidden, p.inner, (rows + p.num_experts - 1) / p.num_experts});
}

bool has_room_for_sm80() {
  return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) >= kSm80DeepBytes;
}

void launch_gate_up(const GroupedGemmParams& p, cudaStream_t stream) {
  check_sizes(p);
  require_aligned(p.x, "x");
  require_aligned(p.w13, "w13");
  require_aligned(p.act, "act");
  if (p.max_rows == 0) return;
  const Chip chip = current_chip();
  const bool sm90 = use_sm90(p, chip);
  const GroupedProduct product{.layer = p,
                               .rows = p.x,
                               .row_token = p.row_token,
                               .weights = p.w13,
                               .bias = p.b13,
                               .out = p.act,
                               .counter = counter_of(p, 0),
                               .depth = p.hidden,
                               .columns = p.inner,
                               .num_sms = chip.num_sms};
  if (p.preactivation != nullptr) {
    require_aligned(p.preactivation, "the pre-activation");
    launch_kept(product, sm90, stream);
    return;
  }
  if (p.dtype == DType::kF32) {
    if (sm90) {
      (p.gated ? launch_f32_sm90_gated : launch_f32_sm90_plain)(product, stream);
    } else {
      (p.gated ? launch_f32_gated : launch_f32_plain)(product, stream);
    }
    return;
  }
  if (!p.gated) {
    (sm90 ? launch_sm90_plain : launch_sm80_plain)(product, stream);
    return;
  }
  if (!sm90) {
    launch_sm80_gated(product, stream);
    return;
  }
  const bool ping_pong = tile_of(p) == TileShape::kPingPong;
  (ping_pong ? launch_sm90_gated_ping_pong : launch_sm90_gated)(product, stream);
}

void launch_down(const GroupedGemmParams& p, cudaStream_t stream) {
  check_sizes(p);
  require_aligned(p.act, "act");
  require_aligned(p.w2, "w2");
  require_aligned(p.y, "y");
  if (p.max_rows == 0) return;
  const Chip chip = current_chip();
  const bool sm90 = use_sm90(p, chip);
  const GroupedProduct product{.layer = p,
                               .rows = p.act,
                               .row_token = nullptr,
                               .weights = p.w2,
                               .bias = p.b2,
                               .out = p.y,
                               .counter = counter_of(p, 1),
                               .depth = p.inner,
                               .columns = p.hidden,
                               .num_sms = chip.num_sms};
  if (p.dtype == DType::kF32) {
    (sm90 ? launch_f32_sm90_down : launch_f32_down)(product, stream);
    return;
  }
  (sm90 ? launch_sm90_down : launch_sm80_down)(product, stream);
}

}  // namespace switchyard

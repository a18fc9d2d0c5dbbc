// The one spelling of every enumerator. A switch without a default is how a compiler tells of one
// that has no word yet.
#include "switchyard/names.hpp"

#include <array>

#include "switchyard/perft.hpp"

namespace switchyard {
namespace {

// A null pointer stands behind the last enumerator.

constexpr const char* word_of(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "f32";
    case DType::kBF16: return "bf16";
    case DType::kF16: return "f16";
    case DType::kF8E4M3: return "fp8";
    case DType::kF64: return "f64";
    case DType::kI64: return "i64";
    case DType::kI32: return "i32";
    case DType::kU8: return "u8";
  }
  return nullptr;
}

constexpr const char* word_of(Backend backend) {
  switch (backend) {
    case Backend::kCpu: return "cpu";
    case Backend::kCuda: return "cuda";
  }
  return nullptr;
}

constexpr const char* word_of(WeightFormat format) {
  switch (format) {
    case WeightFormat::kExact: return "exact";
    case WeightFormat::kQ8: return "q8";
    case WeightFormat::kE4M3: return "e4m3";
    case WeightFormat::kMxfp4: return "mxfp4";
    case WeightFormat::kInt4: return "int4";
    case WeightFormat::kNvfp4: return "nvfp4";
    case WeightFormat::kStored: return "stored";
  }
  return nullptr;
}

constexpr const char* word_of(WeightPacking packing) {
  switch (packing) {
    case WeightPacking::kPlain: return "plain";
    case WeightPacking::kGptq: return "gptq";
    case WeightPacking::kAwq: return "awq";
    case WeightPacking::kPackQuantized: return "pack-quantized";
    case WeightPacking::kNvfp4Packed: return "nvfp4-pack-quantized";
    case WeightPacking::kModelOpt: return "modelopt";
  }
  return nullptr;
}

constexpr const char* word_of(DeviceEngine engine) {
  switch (engine) {
    case DeviceEngine::kAuto: return "auto";
    case DeviceEngine::kPeer: return "peer";
    case DeviceEngine::kNccl: return "nccl";
    case DeviceEngine::kNcclPairs: return "nccl-pairs";
  }
  return nullptr;
}

constexpr const char* word_of(ExchangeMode mode) {
  switch (mode) {
    case ExchangeMode::kAuto: return "auto";
    case ExchangeMode::kThroughput: return "throughput";
    case ExchangeMode::kLowLatency: return "low-latency";
  }
  return nullptr;
}

constexpr const char* word_of(Score score) {
  switch (score) {
    case Score::kSoftmax: return "softmax";
    case Score::kTopkSoftmax: return "topk-softmax";
    case Score::kSigmoid: return "sigmoid";
    case Score::kSparseMixer: return "sparse-mixer";
  }
  return nullptr;
}

constexpr const char* word_of(GroupScore score) {
  switch (score) {
    case GroupScore::kMax: return "max";
    case GroupScore::kTop2Sum: return "top2sum";
  }
  return nullptr;
}

constexpr const char* word_of(Activation activation) {
  switch (activation) {
    case Activation::kSilu: return "silu";
    case Activation::kGelu: return "gelu";
    case Activation::kGeluTanh: return "gelu_tanh";
    case Activation::kRelu: return "relu";
    case Activation::kRelu2: return "relu2";
    case Activation::kClampedSwiglu: return "clamped_swiglu";
    case Activation::kIdentity: return "identity";
  }
  return nullptr;
}

constexpr const char* word_of(LayoutKind kind) {
  switch (kind) {
    case LayoutKind::kCompact: return "compact";
    case LayoutKind::kAligned: return "aligned";
    case LayoutKind::kPadded: return "padded";
  }
  return nullptr;
}

constexpr const char* word_of(DropPolicy policy) {
  switch (policy) {
    case DropPolicy::kToken: return "token";
    case DropPolicy::kChoice: return "choice";
    case DropPolicy::kProbs: return "probs";
    case DropPolicy::kBpr: return "bpr";
    case DropPolicy::kReroute: return "reroute";
  }
  return nullptr;
}

constexpr const char* word_of(Recompute recompute) {
  switch (recompute) {
    case Recompute::kNone: return "none";
    case Recompute::kActivationInput: return "activation_input";
  }
  return nullptr;
}

constexpr const char* word_of(BalanceShare share) {
  switch (share) {
    case BalanceShare::kAssignments: return "assignments";
    case BalanceShare::kTokens: return "tokens";
    case BalanceShare::kFirstChoice: return "first-choice";
  }
  return nullptr;
}

constexpr const char* word_of(LossScope scope) {
  switch (scope) {
    case LossScope::kBatch: return "batch";
    case LossScope::kSequence: return "sequence";
    case LossScope::kGlobal: return "global";
  }
  return nullptr;
}

constexpr const char* word_of(PerftKind kind) {
  switch (kind) {
    case PerftKind::kRouted: return "routed";
    case PerftKind::kEmbedded: return "embedded";
    case PerftKind::kDense: return "dense";
    case PerftKind::kShared: return "shared";
  }
  return nullptr;
}

constexpr const char* word_of(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kPortable: return "portable";
    case CpuIsa::kAvx2: return "avx2";
    case CpuIsa::kAvx512: return "avx512";
    case CpuIsa::kAvx512Bf16: return "avx512_bf16";
    case CpuIsa::kAmxBf16: return "amx_bf16";
  }
  return nullptr;
}

constexpr const char* word_of(ThreadRuntime runtime) {
  switch (runtime) {
    case ThreadRuntime::kAuto: return "auto";
    case ThreadRuntime::kOwn: return "own";
    case ThreadRuntime::kOpenMp: return "openmp";
  }
  return nullptr;
}

template <typename Enum>
constexpr const char* word_or_unknown(Enum value) {
  const char* word = word_of(value);
  return word != nullptr ? word : "unknown";
}

template <typename Enum>
constexpr std::size_t count_of() {
  std::size_t count = 0;
  while (word_of(static_cast<Enum>(count)) != nullptr) ++count;
  return count;
}

template <typename Enum>
constexpr auto kWords = [] {
  std::array<const char*, count_of<Enum>()> words{};
  for (std::size_t i = 0; i < words.size(); ++i) words[i] = word_of(static_cast<Enum>(i));
  return words;
}();

}  // namespace

const char* to_string(DType dtype) noexcept { return word_or_unknown(dtype); }
const char* to_string(Backend backend) noexcept { return word_or_unknown(backend); }
const char* to_string(WeightFormat format) noexcept { return word_or_unknown(format); }
const char* to_string(WeightPacking packing) noexcept { return word_or_unknown(packing); }
const char* to_string(DeviceEngine engine) noexcept { return word_or_unknown(engine); }
const char* to_string(ExchangeMode mode) noexcept { return word_or_unknown(mode); }
const char* to_string(Score score) noexcept { return word_or_unknown(score); }
const char* to_string(GroupScore score) noexcept { return word_or_unknown(score); }
const char* to_string(Activation activation) noexcept { return word_or_unknown(activation); }
const char* to_string(LayoutKind kind) noexcept { return word_or_unknown(kind); }
const char* to_string(DropPolicy policy) noexcept { return word_or_unknown(policy); }
const char* to_string(Recompute recompute) noexcept { return word_or_unknown(recompute); }
const char* to_string(BalanceShare share) noexcept { return word_or_unknown(share); }
const char* to_string(LossScope scope) noexcept { return word_or_unknown(scope); }
const char* to_string(PerftKind kind) noexcept { return word_or_unknown(kind); }
const char* to_string(CpuIsa isa) noexcept { return word_or_unknown(isa); }
const char* to_string(ThreadRuntime runtime) noexcept { return word_or_unknown(runtime); }

template <typename Enum>
std::span<const char* const> names_of() noexcept {
  return kWords<Enum>;
}

template std::span<const char* const> names_of<DType>() noexcept;
template std::span<const char* const> names_of<Backend>() noexcept;
template std::span<const char* const> names_of<WeightFormat>() noexcept;
template std::span<const char* const> names_of<WeightPacking>() noexcept;
template std::span<const char* const> names_of<DeviceEngine>() noexcept;
template std::span<const char* const> names_of<ExchangeMode>() noexcept;
template std::span<const char* const> names_of<Score>() noexcept;
template std::span<const char* const> names_of<GroupScore>() noexcept;
template std::span<const char* const> names_of<Activation>() noexcept;
template std::span<const char* const> names_of<LayoutKind>() noexcept;
template std::span<const char* const> names_of<DropPolicy>() noexcept;
template std::span<const char* const> names_of<Recompute>() noexcept;
template std::span<const char* const> names_of<BalanceShare>() noexcept;
template std::span<const char* const> names_of<LossScope>() noexcept;
template std::span<const char* const> names_of<PerftKind>() noexcept;
template std::span<const char* const> names_of<CpuIsa>() noexcept;
template std::span<const char* const> names_of<ThreadRuntime>() noexcept;

}  // namespace switchyard

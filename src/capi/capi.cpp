#include "capi/capi.hpp"

#include <algorithm>
#include <array>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "core/check.hpp"
#include "core/id_check.hpp"
#include "switchyard/routing/router_kinds.hpp"

namespace switchyard::capi {
namespace {

thread_local std::string last_error;

sy_status remember(sy_status status, const char* message) noexcept {
  try {
    last_error = message;
  } catch (...) {
    last_error.clear();
  }
  return status;
}

sy_status status_of(ErrorCode code) { return static_cast<sy_status>(static_cast<int>(code) + 1); }
static_assert(static_cast<int>(ErrorCode::kInvalidArgument) + 1 == SY_INVALID_ARGUMENT);
static_assert(static_cast<int>(ErrorCode::kTimeout) + 1 == SY_TIMEOUT);
static_assert(static_cast<int>(ErrorCode::kCommunication) + 1 == SY_COMMUNICATION);

// The same numbers in C and in C++: only then may one be cast to the other.
template <typename E, typename C>
constexpr bool same(E ours, C c) {
  return static_cast<int>(ours) == static_cast<int>(c);
}
static_assert(same(Score::kSoftmax, SY_SOFTMAX) && same(Score::kTopkSoftmax, SY_TOPK_SOFTMAX) &&
              same(Score::kSigmoid, SY_SIGMOID) && same(Score::kSparseMixer, SY_SPARSE_MIXER));
static_assert(same(GroupScore::kMax, SY_GROUP_MAX) &&
              same(GroupScore::kTop2Sum, SY_GROUP_TOP2_SUM));
static_assert(same(LayoutKind::kCompact, SY_LAYOUT_COMPACT) &&
              same(LayoutKind::kAligned, SY_LAYOUT_ALIGNED) &&
              same(LayoutKind::kPadded, SY_LAYOUT_PADDED));
static_assert(same(Activation::kSilu, SY_SILU) && same(Activation::kGelu, SY_GELU) &&
              same(Activation::kGeluTanh, SY_GELU_TANH) && same(Activation::kRelu, SY_RELU) &&
              same(Activation::kRelu2, SY_RELU2) &&
              same(Activation::kClampedSwiglu, SY_CLAMPED_SWIGLU) &&
              same(Activation::kIdentity, SY_IDENTITY));
static_assert(same(DropPolicy::kToken, SY_DROP_TOKEN) &&
              same(DropPolicy::kChoice, SY_DROP_CHOICE) &&
              same(DropPolicy::kProbs, SY_DROP_PROBS) && same(DropPolicy::kBpr, SY_DROP_BPR) &&
              same(DropPolicy::kReroute, SY_DROP_REROUTE));
static_assert(same(DeviceEngine::kAuto, SY_ENGINE_AUTO) &&
              same(DeviceEngine::kPeer, SY_ENGINE_PEER) &&
              same(DeviceEngine::kNccl, SY_ENGINE_NCCL) &&
              same(DeviceEngine::kNcclPairs, SY_ENGINE_NCCL_PAIRS));

static_assert(same(Recompute::kNone, SY_RECOMPUTE_NONE) &&
              same(Recompute::kActivationInput, SY_RECOMPUTE_ACTIVATION_INPUT));
static_assert(same(WeightFormat::kExact, SY_WEIGHTS_EXACT) &&
              same(WeightFormat::kQ8, SY_WEIGHTS_Q8) &&
              same(WeightFormat::kE4M3, SY_WEIGHTS_E4M3) &&
              same(WeightFormat::kMxfp4, SY_WEIGHTS_MXFP4) &&
              same(WeightFormat::kInt4, SY_WEIGHTS_INT4) &&
              same(WeightFormat::kNvfp4, SY_WEIGHTS_NVFP4) &&
              same(WeightFormat::kStored, SY_WEIGHTS_STORED));

const char* device_name(Backend backend) { return backend == Backend::kCpu ? "CPU" : "CUDA"; }

}  // namespace

std::string type_name(const sy_tensor& tensor) {
  static constexpr std::array<const char*, 7> kKinds = {"i", "u", "f", "opaque", "bf", "c", "bool"};
  if (tensor.type_code >= kKinds.size()) {
    return fmt::format("of the DLPack type {} with {} bits", tensor.type_code, tensor.type_bits);
  }
  std::string name = kKinds[tensor.type_code];
  if (name != "bool") name += fmt::format("{}", tensor.type_bits);
  if (tensor.type_lanes != 1) name += fmt::format("x{}", tensor.type_lanes);
  return name;
}

sy_status guarded(const std::function<void()>& body) noexcept {
  try {
    body();
    return SY_OK;
  } catch (const Error& error) {
    return remember(status_of(error.code()), error.what());
  } catch (const std::bad_alloc&) {
    return remember(SY_OUT_OF_MEMORY, "out of memory: the host has no more");
  } catch (const std::exception& error) {
    return remember(SY_INTERNAL, error.what());
  } catch (...) {
    return remember(SY_INTERNAL, "unknown error");
  }
}

Backend backend_of(const char* name, const sy_tensor* tensor) {
  require(tensor != nullptr, "{} is NULL", name);
  if (tensor->device_type == SY_DEVICE_CPU) return Backend::kCpu;
  require(tensor->device_type == SY_DEVICE_CUDA,
          "{} lies on DLPack device type {}; 1 (CPU) and 2 (CUDA) are understood", name,
          tensor->device_type);
  return Backend::kCuda;
}

void check_tensor(const char* name, const sy_tensor* tensor,
                  std::initializer_list<std::int64_t> shape, Backend backend) {
  const Backend where = backend_of(name, tensor);
  require(where == backend, "{} lies on {}, want {}", name, device_name(where),
          device_name(backend));
  require(tensor->ndim == static_cast<std::int32_t>(shape.size()), "{} has {} dimensions, want {}",
          name, tensor->ndim, shape.size());
  const std::int64_t* want = shape.begin();
  std::int64_t dense = 1;
  for (std::int32_t i = tensor->ndim - 1; i >= 0; --i) {
    const std::int64_t size = tensor->shape[i];
    require(size >= 0 && (want[i] == kAny || want[i] == size), "{}: dimension {} is {}, want {}",
            name, i, size, want[i]);
    require(tensor->strides == nullptr || size <= 1 || tensor->strides[i] == dense,
            "{}: stride {} of dimension {} leaves a gap; row-major without gaps is taken", name,
            tensor->strides == nullptr ? 0 : tensor->strides[i], i);
    dense *= size;
  }
  require(dense == 0 || tensor->data != nullptr, "{} has no data", name);
}

DType dtype_of(const char* name, const sy_tensor& tensor) {
  if (tensor.type_lanes == 1) {
    if (tensor.type_code == SY_CODE_FLOAT && tensor.type_bits == 32) return DType::kF32;
    if (tensor.type_code == SY_CODE_FLOAT && tensor.type_bits == 16) return DType::kF16;
    if (tensor.type_code == SY_CODE_BFLOAT && tensor.type_bits == 16) return DType::kBF16;
    if (tensor.type_code == SY_CODE_INT && tensor.type_bits == 32) return DType::kI32;
  }
  fail(ErrorCode::kInvalidArgument, "{} is {}; f32, f16, bf16 and i32 are understood", name,
       type_name(tensor));
}

void check_dtype(const char* name, const sy_tensor& tensor, DType want) {
  const DType have = dtype_of(name, tensor);
  require(have == want, "{} is {}, want {}", name, to_string(have), to_string(want));
}

std::byte* data_of(const sy_tensor& tensor) {
  return static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
}

RawMatrix raw_matrix(const char* name, const sy_tensor* tensor, std::int64_t rows,
                     std::int64_t cols, Backend backend) {
  check_tensor(name, tensor, {rows, cols}, backend);
  const DType dtype = dtype_of(name, *tensor);
  require(dtype != DType::kI32, "{} is i32, want f32, bf16 or f16", name);
  return {data_of(*tensor), dtype, tensor->shape[0], tensor->shape[1]};
}

Vector<const float> optional_vector(const char* name, const sy_tensor* tensor, std::int64_t size,
                                    Backend backend) {
  if (tensor == nullptr) return {};
  check_tensor(name, tensor, {size}, backend);
  check_dtype(name, *tensor, DType::kF32);
  return {reinterpret_cast<const float*>(data_of(*tensor)), {size}};
}

DType to_dtype(const char* name, std::int32_t value) {
  switch (value) {
    case SY_F32: return DType::kF32;
    case SY_BF16: return DType::kBF16;
    case SY_F16: return DType::kF16;
    case SY_FP8_E4M3: return DType::kF8E4M3;
    default: fail(ErrorCode::kInvalidArgument, "{}={} is no sy_dtype", name, value);
  }
}

Layout to_layout(std::int32_t layout, std::int32_t alignment) {
  return {.kind = enumerator("layout", layout, "sy_layout", LayoutKind::kPadded),
          .alignment = alignment};
}

DropPolicy to_drop_policy(std::int32_t value) {
  return enumerator("drop_policy", value, "sy_drop_policy", DropPolicy::kReroute);
}

DeviceEngine to_engine(std::int32_t value) {
  return enumerator("device_engine", value, "sy_device_engine", DeviceEngine::kNcclPairs);
}

namespace {

void set_hash_table(const sy_tensor& table, RouterConfig& router) {
  auto* hash = std::get_if<HashRouter>(&router.kind);
  require(hash != nullptr, "hash_table is given, but the router is not hash");
  const auto values = matrix<std::int32_t>("hash_table", &table, kAny, hash->top_k, Backend::kCpu);
  const Matrix<const std::int32_t> experts{values.data, values.shape};
  require_ids("hash_table", experts, router.num_experts);
  const std::int32_t* const end = experts.data + experts.size();
  require(std::find(experts.data, end, -1) == end, "hash_table has -1, want experts");
  hash->table = std::make_shared<const std::vector<std::int32_t>>(experts.data, end);
}

}  // namespace

RouterConfig to_config(const sy_router_config& config) {
  const RouterConfig top_k{
      .num_experts = config.num_experts,
      .kind =
          TopKRouter{.top_k = config.top_k,
                     .score = enumerator("score", config.score, "sy_score", Score::kSparseMixer),
                     .renormalize = config.renormalize != 0,
                     .scale = config.scale,
                     .groups = config.groups,
                     .top_groups = config.top_groups,
                     .group_score = enumerator("group_score", config.group_score, "sy_group_score",
                                               GroupScore::kTop2Sum)}};
  const bool by_name = config.router != nullptr && *config.router != 0;
  RouterConfig router = by_name ? parse_router(config.router, top_k) : top_k;
  if (config.hash_table != nullptr) set_hash_table(*config.hash_table, router);
  return router;
}

ExpertConfig to_config(const sy_expert_config& config, bool bias) {
  return {.num_experts = config.num_experts,
          .hidden = config.hidden,
          .inner = config.inner,
          .gated = config.gated != 0,
          .activation =
              enumerator("activation", config.activation, "sy_activation", Activation::kIdentity),
          .alpha = config.alpha,
          .limit = config.limit,
          .bias = bias};
}

void check_weights(const ExpertConfig& config, const sy_tensor* w13, const sy_tensor* w2,
                   const sy_tensor* b13, const sy_tensor* b2, Backend backend,
                   const std::string& prefix) {
  const std::int64_t rows = (config.gated ? 2 : 1) * config.inner;
  const std::string name13 = prefix + "w13", name2 = prefix + "w2";
  check_tensor(name13.c_str(), w13, {config.num_experts, rows, config.hidden}, backend);
  check_tensor(name2.c_str(), w2, {config.num_experts, config.hidden, config.inner}, backend);
  const DType dtype = dtype_of(name13.c_str(), *w13);
  require(dtype != DType::kI32, "{} is i32, want f32, bf16 or f16", name13);
  check_dtype(name2.c_str(), *w2, dtype);
  require((b13 == nullptr) == (b2 == nullptr), "b13 and b2 must both be given, or neither");
  if (b13 == nullptr) return;
  static_cast<void>(matrix<float>("b13", b13, config.num_experts, rows, backend));
  static_cast<void>(matrix<float>("b2", b2, config.num_experts, config.hidden, backend));
}

std::unique_ptr<ExpertSource> source_of(const ExpertConfig& config, const sy_tensor* w13,
                                        const sy_tensor* w2, const sy_tensor* b13,
                                        const sy_tensor* b2, const std::string& prefix,
                                        Backend where) {
  check_weights(config, w13, w2, b13, b2, where, prefix);
  const auto bias = [](const sy_tensor* tensor) {
    return tensor == nullptr ? nullptr : reinterpret_cast<const float*>(data_of(*tensor));
  };
  const auto make = where == Backend::kCuda ? make_device_source : make_memory_source;
  return make(config, dtype_of("w13", *w13), data_of(*w13), data_of(*w2), bias(b13), bias(b2));
}

void read_expert(const ExpertWeights& weights, std::int32_t expert, const sy_tensor* w13,
                 const sy_tensor* w2, const sy_tensor* b13, const sy_tensor* b2) {
  const ExpertConfig& config = weights.config();
  const std::int64_t rows = (config.gated ? 2 : 1) * config.inner;
  const std::int32_t first = weights.first_expert();
  require(expert >= first && expert < first + weights.num_local(),
          "expert={} is none of this rank's, {} to {}", expert, first,
          first + weights.num_local() - 1);
  require(config.bias || (b13 == nullptr && b2 == nullptr), "the experts have no biases");
  // All is checked before anything is written.
  RawMatrix first_product, second_product;
  if (w13 != nullptr) first_product = raw_matrix("w13", w13, rows, config.hidden, Backend::kCpu);
  if (w2 != nullptr) {
    second_product = raw_matrix("w2", w2, config.hidden, config.inner, Backend::kCpu);
  }
  const auto bias_of = [](const char* name, const sy_tensor* tensor, std::int64_t size) {
    return const_cast<float*>(optional_vector(name, tensor, size, Backend::kCpu).data);
  };
  float* const first_bias = bias_of("b13", b13, rows);
  float* const second_bias = bias_of("b2", b2, config.hidden);
  if (w13 != nullptr) {
    weights.read(expert, ExpertPart::kGate, 0, config.inner, first_product.dtype,
                 first_product.row(0));
    if (config.gated) {
      weights.read(expert, ExpertPart::kUp, 0, config.inner, first_product.dtype,
                   first_product.row(config.inner));
    }
  }
  if (w2 != nullptr) {
    weights.read(expert, ExpertPart::kDown, 0, config.hidden, second_product.dtype,
                 second_product.row(0));
  }
  if (first_bias != nullptr) {
    weights.read_bias(expert, ExpertPart::kGate, first_bias);
    if (config.gated) weights.read_bias(expert, ExpertPart::kUp, first_bias + config.inner);
  }
  if (second_bias != nullptr) weights.read_bias(expert, ExpertPart::kDown, second_bias);
}

}  // namespace switchyard::capi

const char* sy_version(void) { return SWITCHYARD_VERSION; }
const char* sy_last_error(void) { return switchyard::capi::last_error.c_str(); }

const char* sy_status_name(sy_status status) {
  if (status == SY_OK) return "ok";
  if (status == SY_INTERNAL) return "internal error";
  return switchyard::to_string(static_cast<switchyard::ErrorCode>(static_cast<int>(status) - 1));
}

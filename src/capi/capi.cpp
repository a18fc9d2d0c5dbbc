#include "capi/capi.hpp"

#include <exception>
#include <new>
#include <string>

#include "core/check.hpp"

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

const char* device_name(Backend backend) { return backend == Backend::kCpu ? "CPU" : "CUDA"; }

}  // namespace

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
  fail(ErrorCode::kInvalidArgument,
       "{} has DLPack type ({}, {} bits, {} lanes); f32, f16, bf16 and i32 are understood", name,
       tensor.type_code, tensor.type_bits, tensor.type_lanes);
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

RouterConfig to_config(const sy_router_config& config) {
  require(config.score >= 0 && config.score <= 2, "score={} is no sy_score", config.score);
  require(config.group_score == 0 || config.group_score == 1, "group_score={} is neither 0 nor 1",
          config.group_score);
  return {.num_experts = config.num_experts,
          .kind = TopKRouter{.top_k = config.top_k,
                             .score = static_cast<Score>(config.score),
                             .renormalize = config.renormalize != 0,
                             .scale = config.scale,
                             .groups = config.groups,
                             .top_groups = config.top_groups,
                             .group_score = static_cast<GroupScore>(config.group_score)}};
}

ExpertConfig to_config(const sy_expert_config& config, bool bias) {
  require(config.activation >= 0 && config.activation <= 5, "activation={} is not in 0..5",
          config.activation);
  return {.num_experts = config.num_experts,
          .hidden = config.hidden,
          .inner = config.inner,
          .gated = config.gated != 0,
          .activation = static_cast<Activation>(config.activation),
          .alpha = config.alpha,
          .limit = config.limit,
          .bias = bias};
}

void check_weights(const ExpertConfig& config, const sy_tensor* w13, const sy_tensor* w2,
                   const sy_tensor* b13, const sy_tensor* b2, Backend backend) {
  const std::int64_t rows = (config.gated ? 2 : 1) * config.inner;
  check_tensor("w13", w13, {config.num_experts, rows, config.hidden}, backend);
  check_tensor("w2", w2, {config.num_experts, config.hidden, config.inner}, backend);
  const DType dtype = dtype_of("w13", *w13);
  require(dtype != DType::kI32, "w13 is i32, want f32, bf16 or f16");
  check_dtype("w2", *w2, dtype);
  require((b13 == nullptr) == (b2 == nullptr), "b13 and b2 must both be given, or neither");
  if (b13 == nullptr) return;
  static_cast<void>(matrix<float>("b13", b13, config.num_experts, rows, backend));
  static_cast<void>(matrix<float>("b2", b2, config.num_experts, config.hidden, backend));
}

std::unique_ptr<ExpertSource> source_of(const ExpertConfig& config, const sy_tensor* w13,
                                        const sy_tensor* w2, const sy_tensor* b13,
                                        const sy_tensor* b2) {
  check_weights(config, w13, w2, b13, b2, Backend::kCpu);
  const auto bias = [](const sy_tensor* tensor) {
    return tensor == nullptr ? nullptr : reinterpret_cast<const float*>(data_of(*tensor));
  };
  return make_memory_source(config, dtype_of("w13", *w13), data_of(*w13), data_of(*w2), bias(b13),
                            bias(b2));
}

}  // namespace switchyard::capi

const char* sy_version(void) { return "0.1.0"; }
const char* sy_last_error(void) { return switchyard::capi::last_error.c_str(); }

const char* sy_status_name(sy_status status) {
  if (status == SY_OK) return "ok";
  if (status == SY_INTERNAL) return "internal error";
  return switchyard::to_string(static_cast<switchyard::ErrorCode>(static_cast<int>(status) - 1));
}

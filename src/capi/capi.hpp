#pragma once

// What every part of the C interface uses: the guard between exceptions and status codes, and the
// reading of tensor descriptions.

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>

#include "switchyard/layer.hpp"
#include "switchyard/switchyard.h"

struct sy_communicator_t {
  std::unique_ptr<switchyard::Communicator> communicator;
};

namespace switchyard::capi {

/// Runs `body` and turns what it throws into a status and this thread's message.
sy_status guarded(const std::function<void()>& body) noexcept;

/// A size that a tensor must have; kAny leaves it open.
constexpr std::int64_t kAny = -1;

/// Refuses a null description, other sizes, gaps, and memory that is not where it should be.
/// `name` is the parameter's name in the header.
void check_tensor(const char* name, const sy_tensor* tensor,
                  std::initializer_list<std::int64_t> shape, Backend backend);

/// Where the tensor lies. @throws Error{kInvalidArgument} for devices that we do not know.
[[nodiscard]] Backend backend_of(const char* name, const sy_tensor* tensor);

/// The element type. @throws Error{kInvalidArgument} that lists what is understood.
[[nodiscard]] DType dtype_of(const char* name, const sy_tensor& tensor);

/// sy_dtype -> DType.
[[nodiscard]] DType to_dtype(const char* name, std::int32_t value);

[[nodiscard]] RouterConfig to_config(const sy_router_config& config);
[[nodiscard]] ExpertConfig to_config(const sy_expert_config& config, bool bias);

/// A checked matrix of any of f32, bf16, f16.
[[nodiscard]] RawMatrix raw_matrix(const char* name, const sy_tensor* tensor, std::int64_t rows,
                                   std::int64_t cols, Backend backend);

template <typename T>
constexpr DType kDTypeOf = DType::kF32;
template <>
inline constexpr DType kDTypeOf<std::int32_t> = DType::kI32;

void check_dtype(const char* name, const sy_tensor& tensor, DType want);
[[nodiscard]] std::byte* data_of(const sy_tensor& tensor);

/// A checked matrix of float or int32.
template <typename T>
[[nodiscard]] Matrix<T> matrix(const char* name, const sy_tensor* tensor, std::int64_t rows,
                               std::int64_t cols, Backend backend) {
  check_tensor(name, tensor, {rows, cols}, backend);
  check_dtype(name, *tensor, kDTypeOf<T>);
  return {reinterpret_cast<T*>(data_of(*tensor)), {tensor->shape[0], tensor->shape[1]}};
}

/// A checked vector of float, empty for a null description.
[[nodiscard]] Vector<const float> optional_vector(const char* name, const sy_tensor* tensor,
                                                  std::int64_t size, Backend backend);

/// Refuses weights that sy_experts_create and sy_layer_from_arrays do not take.
void check_weights(const ExpertConfig& config, const sy_tensor* w13, const sy_tensor* w2,
                   const sy_tensor* b13, const sy_tensor* b2, Backend backend);

/// The source of weights that sy_experts_create and sy_layer_from_arrays take; views, no copy.
[[nodiscard]] std::unique_ptr<ExpertSource> source_of(const ExpertConfig& config,
                                                      const sy_tensor* w13, const sy_tensor* w2,
                                                      const sy_tensor* b13, const sy_tensor* b2);

}  // namespace switchyard::capi

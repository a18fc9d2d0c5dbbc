#pragma once

// What every part of the C interface uses: the guard between exceptions and status codes, and the
// reading of tensor descriptions.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>

#include "capi/calls.hpp"
#include "core/check.hpp"
#include "switchyard/layer.hpp"
#include "switchyard/switchyard.h"

struct sy_communicator_t {
  explicit sy_communicator_t(std::unique_ptr<switchyard::Communicator> rank)
      : communicator(std::move(rank)),
        calls("the communicator", communicator->size() > 1
                                      ? switchyard::capi::StaysBehind::kRanks
                                      : switchyard::capi::StaysBehind::kNothing) {}

  std::unique_ptr<switchyard::Communicator> communicator;
  switchyard::capi::Calls calls;  // and on all that is made with it
};

namespace switchyard::capi {

/// Runs `body` and turns what it throws into a status and this thread's message.
sy_status guarded(const std::function<void()>& body) noexcept;

/// The size of a struct when it first had a struct_size: no program knows less of it.
template <typename T>
constexpr std::size_t kFirstSize = sizeof(T);
template <>
inline constexpr std::size_t kFirstSize<sy_layer_arrays> = 112;
template <>
inline constexpr std::size_t kFirstSize<sy_router_config> = 40;
template <>
inline constexpr std::size_t kFirstSize<sy_layer_options> = 80;
template <>
inline constexpr std::size_t kFirstSize<sy_gradients> = 112;
template <>
inline constexpr std::size_t kFirstSize<sy_route_request> = 48;
static_assert(kFirstSize<sy_router_config> == 40 && kFirstSize<sy_plan_config> == 40 &&
              kFirstSize<sy_expert_config> == 48 && kFirstSize<sy_ep_config> == 88 &&
              kFirstSize<sy_layer_options> == 80 && kFirstSize<sy_checkpoint_recipe> == 80 &&
              kFirstSize<sy_gradients> == 112);

template <typename T>
void check_struct(const char* name, const T* s) {
  require(s != nullptr, "{} is NULL", name);
  require(s->struct_size >= kFirstSize<T> && s->struct_size <= sizeof(T),
          "{}.struct_size is {}, want {}: initialise it, by the header of this library ({})", name,
          s->struct_size, sizeof(T), sy_version());
}

/// What a caller has filled; fields that its header does not have keep their default.
template <typename T>
[[nodiscard]] T taken(const char* name, const T* from, T defaults = {}) {
  check_struct(name, from);
  std::memcpy(&defaults, from, from->struct_size);
  return defaults;
}

/// Fills as much of a caller's struct as its header has.
template <typename T>
void give(T* to, T values, std::size_t struct_size) {
  values.struct_size = struct_size;
  std::memcpy(to, &values, std::min(struct_size, sizeof(T)));
}

/// A C enumerator as ours, which has the same numbers up to `last`.
template <typename E>
[[nodiscard]] E enumerator(const char* name, std::int32_t value, const char* type, E last) {
  require(value >= 0 && value <= static_cast<std::int32_t>(last),
          "{}={} is no {}, which has 0 to {}", name, value, type, static_cast<std::int32_t>(last));
  return static_cast<E>(value);
}

[[nodiscard]] Layout to_layout(std::int32_t layout, std::int32_t alignment);
[[nodiscard]] DropPolicy to_drop_policy(std::int32_t value);
[[nodiscard]] DeviceEngine to_engine(std::int32_t value);

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

/// A DLPack type in our spelling: "f64", "i64", "u8", "bool", "c64"; "f32x2" with lanes.
[[nodiscard]] std::string type_name(const sy_tensor& tensor);

/// sy_dtype -> DType.
[[nodiscard]] DType to_dtype(const char* name, std::int32_t value);

[[nodiscard]] RouterConfig to_config(const sy_router_config& config);
/// The request of one call; token ids are checked to be [num_tokens] and in the memory of `where`.
[[nodiscard]] RouteRequest to_request(const sy_route_request* request, std::int64_t num_tokens,
                                      Backend where);
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
/// `prefix` goes before the names of w13 and w2.
void check_weights(const ExpertConfig& config, const sy_tensor* w13, const sy_tensor* w2,
                   const sy_tensor* b13, const sy_tensor* b2, Backend backend,
                   const std::string& prefix = "");

/// The source of weights that sy_experts_create and sy_layer_from_arrays take; views, no copy.
/// @param where  kCuda: they are used where they lie.
[[nodiscard]] std::unique_ptr<ExpertSource> source_of(const ExpertConfig& config,
                                                      const sy_tensor* w13, const sy_tensor* w2,
                                                      const sy_tensor* b13, const sy_tensor* b2,
                                                      const std::string& prefix = "",
                                                      Backend where = Backend::kCpu);

/// Experts that are given as codes with scales.
struct StoredArrays {
  const sy_tensor* w13 = nullptr;
  const sy_tensor* w13_scales = nullptr;
  const sy_tensor* w2 = nullptr;
  const sy_tensor* w2_scales = nullptr;
  const sy_tensor* b13 = nullptr;
  const sy_tensor* b2 = nullptr;
};
/// Their source; views, no copy.
[[nodiscard]] std::unique_ptr<ExpertSource> stored_source_of(const ExpertConfig& config,
                                                             const StoredArrays& arrays);

/// What sy_experts_read_expert and sy_layer_read_expert do.
void read_expert(const ExpertWeights& weights, std::int32_t expert, const sy_tensor* w13,
                 const sy_tensor* w2, const sy_tensor* b13, const sy_tensor* b2);

}  // namespace switchyard::capi

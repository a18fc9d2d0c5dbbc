#include "switchyard/parameter.hpp"

#include <utility>

#include "core/row_ops.hpp"
#include "core/shape_check.hpp"

namespace switchyard {

Parameter::Parameter(std::vector<float> values) : size_(std::ssize(values)) {
  const auto owner = std::make_shared<const std::vector<float>>(std::move(values));
  data_ = reinterpret_cast<const std::byte*>(owner->data());
  owner_ = owner;
}

Parameter::Parameter(const void* data, DType dtype, std::int64_t size, Backend where,
                     std::shared_ptr<const void> owner)
    : data_(static_cast<const std::byte*>(data)),
      dtype_(dtype),
      size_(size),
      where_(where),
      owner_(std::move(owner)) {
  require_float("a parameter", dtype);
  require(size >= 0 && (size == 0 || data != nullptr), "a parameter of {} values{}", size,
          data == nullptr ? " without memory" : "");
}

ConstRawMatrix Parameter::matrix(std::int64_t rows, std::int64_t cols) const {
  require(rows * cols == size_, "a parameter of {} values is not [{}, {}]", size_, rows, cols);
  return {data_, dtype_, rows, cols};
}

Vector<const float> Parameter::vector() const {
  if (empty()) return {};
  require(dtype_ == DType::kF32, "a parameter is {}, want f32", to_string(dtype_));
  return {reinterpret_cast<const float*>(data_), {size_}};
}

std::span<const float> Parameter::floats() const {
  require(where_ == Backend::kCpu, "a parameter lies on a GPU, want host memory");
  const Vector<const float> values = vector();
  return {values.data, static_cast<std::size_t>(size_)};
}

std::vector<float> Parameter::widened() const {
  require(where_ == Backend::kCpu, "a parameter lies on a GPU, want host memory");
  std::vector<float> values(static_cast<std::size_t>(size_));
  row_ops::widen(dtype_, data_, values.data(), size_);
  return values;
}

}  // namespace switchyard

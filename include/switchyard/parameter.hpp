#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "switchyard/execution.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

/// Numbers that a layer computes with beside the weights of its experts, row-major without a gap.
/// Either values of its own, which copies share, or a tensor of somebody else that is used where it
/// lies: what is written there counts from the next call on.
class Parameter {
 public:
  Parameter() = default;  ///< None.
  /// f32 in host memory.
  Parameter(std::vector<float> values);  // NOLINT: a list of values is a parameter
  /// `size` values of f32, bf16 or f16 at `data`, in the memory of `where`. They outlive this and
  /// its copies, or `owner` keeps them.
  Parameter(const void* data, DType dtype, std::int64_t size, Backend where,
            std::shared_ptr<const void> owner = {});

  [[nodiscard]] bool empty() const { return size_ == 0; }
  [[nodiscard]] std::int64_t size() const { return size_; }
  [[nodiscard]] DType dtype() const { return dtype_; }
  [[nodiscard]] Backend where() const { return where_; }
  /// Null for none.
  [[nodiscard]] const void* data() const { return data_; }

  /// As [rows, cols]. @throws Error{kInvalidArgument}: these are not its size.
  [[nodiscard]] ConstRawMatrix matrix(std::int64_t rows, std::int64_t cols) const;
  /// f32 as [size()], empty for none. @throws Error{kInvalidArgument}: another type.
  [[nodiscard]] Vector<const float> vector() const;
  /// The same in host memory. @throws Error{kInvalidArgument}: another type, or on a GPU.
  [[nodiscard]] std::span<const float> floats() const;
  /// A copy as f32, which is exact. @throws Error{kInvalidArgument}: on a GPU.
  [[nodiscard]] std::vector<float> widened() const;

 private:
  const std::byte* data_ = nullptr;
  DType dtype_ = DType::kF32;
  std::int64_t size_ = 0;
  Backend where_ = Backend::kCpu;
  std::shared_ptr<const void> owner_;
};

}  // namespace switchyard

#pragma once

// Owners of device memory and of host memory that the device writes.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <new>
#include <utility>

#include "core/gpu/cuda_check.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

/// Device memory that only grows. Growing waits for the device: make it large enough before a
/// graph is captured.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  /// At least `bytes`; new memory is zero.
  std::byte* reserve(std::int64_t bytes) {
    if (bytes > bytes_) {
      SWITCHYARD_CUDA(cudaFree(std::exchange(data_, nullptr)));
      bytes_ = 0;
      void* memory = nullptr;
      SWITCHYARD_CUDA(cudaMalloc(&memory, static_cast<std::size_t>(bytes)));
      data_ = static_cast<std::byte*>(memory);
      bytes_ = bytes;
      SWITCHYARD_CUDA(cudaMemset(data_, 0, static_cast<std::size_t>(bytes)));
      SWITCHYARD_CUDA(cudaDeviceSynchronize());
    }
    return data_;
  }
  [[nodiscard]] RawMatrix matrix(DType dtype, std::int64_t rows, std::int64_t cols) {
    return {reserve(rows * cols * size_of(dtype)), dtype, rows, cols};
  }
  template <typename T>
  [[nodiscard]] Matrix<T> matrix(std::int64_t rows, std::int64_t cols) {
    return {reinterpret_cast<T*>(reserve(rows * cols * std::int64_t{sizeof(T)})), {rows, cols}};
  }
  template <typename T>
  [[nodiscard]] Vector<T> vector(std::int64_t size) {
    return {matrix<T>(size, 1).data, {size}};
  }
  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::int64_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

/// One T in host memory that copies from the device may write while the host goes on.
template <typename T>
class PinnedValue {
 public:
  PinnedValue() {
    void* memory = nullptr;
    SWITCHYARD_CUDA(cudaMallocHost(&memory, sizeof(T)));
    value_ = new (memory) T{};
  }
  ~PinnedValue() { cudaFreeHost(value_); }
  PinnedValue(const PinnedValue&) = delete;
  PinnedValue& operator=(const PinnedValue&) = delete;
  [[nodiscard]] T& operator*() const { return *value_; }
  [[nodiscard]] T* operator->() const { return value_; }

 private:
  T* value_ = nullptr;
};

}  // namespace switchyard

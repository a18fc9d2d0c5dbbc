#pragma once

// Owners of device memory and of host memory that the device writes.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

#include "core/gpu/cuda_check.hpp"
#include "core/gpu/device_wide.hpp"
#include "core/gpu/memory_count.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

/// Device memory of one size, freed with its owner, or somebody else's.
class DeviceMemory {
 public:
  /// What is in it is not known.
  /// @throws Error{kOutOfMemory}.
  explicit DeviceMemory(std::int64_t bytes = 0) {
    if (bytes == 0) return;
    void* memory = nullptr;
    SWITCHYARD_CUDA(cudaMalloc(&memory, static_cast<std::size_t>(bytes)));
    data_ = static_cast<std::byte*>(memory);
    owned_ = bytes;
    DeviceMemoryCount::add(bytes);
  }
  /// Not its own: `data` outlives it.
  explicit DeviceMemory(const void* data)
      : data_(static_cast<std::byte*>(const_cast<void*>(data))) {}
  ~DeviceMemory() {
    if (owned_ == 0) return;
    cudaFree(data_);
    DeviceMemoryCount::add(-owned_);
  }
  DeviceMemory(DeviceMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), owned_(std::exchange(other.owned_, 0)) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(owned_, other.owned_);
    return *this;
  }
  [[nodiscard]] std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  std::int64_t owned_ = 0;  ///< Bytes; 0: none, or somebody else's.
};

/// Device memory that only grows. Growing waits for the device: make it large enough before a
/// graph is captured.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : memory_(std::move(other.memory_)), bytes_(std::exchange(other.bytes_, 0)) {}
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  /// At least `bytes`; new memory is zero.
  std::byte* reserve(std::int64_t bytes) {
    if (bytes > bytes_) {
      bytes_ = 0;
      { const DeviceMemory before = std::move(memory_); }  // freed before there is more
      memory_ = DeviceMemory(bytes);
      bytes_ = bytes;
      SWITCHYARD_CUDA(cudaMemset(data(), 0, static_cast<std::size_t>(bytes)));
      SWITCHYARD_CUDA(wait_for_device());
    }
    return data();
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
  [[nodiscard]] std::byte* data() const { return memory_.data(); }
  [[nodiscard]] std::int64_t bytes() const { return bytes_; }

 private:
  DeviceMemory memory_;
  std::int64_t bytes_ = 0;
};

/// Host memory that copies run from and to while the host goes on. Only grows.
class PinnedBytes {
 public:
  PinnedBytes() = default;
  ~PinnedBytes() { cudaFreeHost(data_); }
  PinnedBytes(const PinnedBytes&) = delete;
  PinnedBytes& operator=(const PinnedBytes&) = delete;
  std::byte* reserve(std::size_t bytes) {
    if (bytes > bytes_) {
      SWITCHYARD_CUDA(cudaFreeHost(std::exchange(data_, nullptr)));
      bytes_ = 0;
      SWITCHYARD_CUDA(cudaMallocHost(&data_, bytes));
      bytes_ = bytes;
    }
    return data();
  }
  [[nodiscard]] std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
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

#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "core/gpu/cuda_check.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

/// Device memory of a test; made from host values, or poisoned with 0xff bytes.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t size) : size_(size) {
    SWITCHYARD_CUDA(cudaMalloc(reinterpret_cast<void**>(&data_), size * sizeof(T) + 256));
    SWITCHYARD_CUDA(cudaMemset(data_, 0xff, size * sizeof(T) + 256));
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) { set(values); }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  void set(const std::vector<T>& values) const {
    SWITCHYARD_CUDA(
        cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  /// The values, after all work on the device.
  [[nodiscard]] std::vector<T> get() const {
    SWITCHYARD_CUDA(cudaDeviceSynchronize());
    std::vector<T> values(size_);
    SWITCHYARD_CUDA(cudaMemcpy(values.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }
  [[nodiscard]] T* data() const { return data_; }
  [[nodiscard]] std::byte* bytes() const { return reinterpret_cast<std::byte*>(data_); }
  [[nodiscard]] Vector<T> vector() const { return {data_, {static_cast<std::int64_t>(size_)}}; }
  [[nodiscard]] Matrix<T> matrix(std::int64_t rows, std::int64_t cols) const {
    return {data_, {rows, cols}};
  }

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace switchyard

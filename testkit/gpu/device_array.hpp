#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/gpu/device_buffer.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard {

/// 0 where there is no driver either.
inline int num_devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) cudaGetLastError();
  return count;
}

/// `count` values at `from` on a GPU, once `stream` has done what is on it. A copy that is queued
/// while an exchange runs may keep another rank's from what that waits for: so wait first.
template <typename T>
std::vector<T> copy_out(const void* from, std::int64_t count, cudaStream_t stream) {
  std::vector<T> out(static_cast<std::size_t>(count));
  SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
  SWITCHYARD_CUDA(
      cudaMemcpyAsync(out.data(), from, out.size() * sizeof(T), cudaMemcpyDeviceToHost, stream));
  SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
  return out;
}

/// Memory on a GPU for tests and benches, poisoned with 0xff bytes (a NaN in every floating type)
/// or made from host values; 256 bytes more than asked for. All copies go over `stream`.
class DeviceBytes {
 public:
  explicit DeviceBytes(std::size_t bytes, cudaStream_t stream = nullptr)
      : memory_(static_cast<std::int64_t>(bytes + 256)), bytes_(bytes), stream_(stream) {
    SWITCHYARD_CUDA(cudaMemsetAsync(data(), 0xff, bytes + 256, stream));
  }
  template <typename T>
  explicit DeviceBytes(const std::vector<T>& values, cudaStream_t stream = nullptr)
      : DeviceBytes(values.size() * sizeof(T), stream) {
    set(values);
  }

  template <typename T>
  void set(const std::vector<T>& values) const {
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream_));
    SWITCHYARD_CUDA(cudaMemcpyAsync(data(), values.data(), values.size() * sizeof(T),
                                    cudaMemcpyHostToDevice, stream_));
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream_));
  }
  void fill(int byte) const { SWITCHYARD_CUDA(cudaMemsetAsync(data(), byte, bytes_, stream_)); }
  [[nodiscard]] void* data() const { return memory_.data(); }
  template <typename T>
  [[nodiscard]] T* as() const {
    return static_cast<T*>(data());
  }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

 private:
  DeviceMemory memory_;
  std::size_t bytes_ = 0;
  cudaStream_t stream_ = nullptr;
};

/// The same of `size` values of T, by the null stream.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t size) : memory_(size * sizeof(T)) {}
  explicit DeviceArray(const std::vector<T>& values) : memory_(values) {}

  void set(const std::vector<T>& values) const { memory_.set(values); }
  void fill(int byte) const { memory_.fill(byte); }
  /// The values, after all work on the device.
  [[nodiscard]] std::vector<T> get() const {
    SWITCHYARD_CUDA(cudaDeviceSynchronize());
    return copy_out<T>(memory_.data(), static_cast<std::int64_t>(size()), nullptr);
  }
  [[nodiscard]] T* data() const { return memory_.as<T>(); }
  [[nodiscard]] std::byte* bytes() const { return memory_.as<std::byte>(); }
  [[nodiscard]] std::size_t size() const { return memory_.bytes() / sizeof(T); }
  [[nodiscard]] Vector<T> vector() const { return {data(), {static_cast<std::int64_t>(size())}}; }
  [[nodiscard]] Matrix<T> matrix(std::int64_t rows, std::int64_t cols) const {
    return {data(), {rows, cols}};
  }

 private:
  DeviceBytes memory_;
};

}  // namespace switchyard

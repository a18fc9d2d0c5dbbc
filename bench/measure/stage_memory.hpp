#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "switchyard/execution.hpp"
#include "switchyard/tensor.hpp"

namespace switchyard::bench {

/// Memory where a backend's stages want theirs: this process's, or the current GPU's. All of it
/// lives as long as the object.
class StageMemory {
 public:
  explicit StageMemory(Backend backend);
  ~StageMemory();
  StageMemory(const StageMemory&) = delete;
  StageMemory& operator=(const StageMemory&) = delete;

  /// Of all that was made here.
  [[nodiscard]] std::int64_t bytes() const { return bytes_; }
  /// Zeroed; 256-byte aligned on CUDA, 64 on the host, as PyTorch's. @throws Error{kOutOfMemory}.
  [[nodiscard]] std::byte* make(std::int64_t bytes);
  /// Data of the host where stages read it: on the CPU `host` itself, which must then live as long.
  [[nodiscard]] const std::byte* place(const void* host, std::int64_t bytes);
  /// Host data into memory of this object, or onto itself.
  void put(void* to, const void* host, std::int64_t bytes) const;
  /// From memory of this object; waits for the device.
  void fetch(void* host, const std::byte* from, std::int64_t bytes) const;

  template <typename T>
  [[nodiscard]] Matrix<T> make_matrix(std::int64_t rows, std::int64_t cols) {
    return {reinterpret_cast<T*>(make(rows * cols * std::int64_t{sizeof(T)})), {rows, cols}};
  }
  template <typename T>
  [[nodiscard]] Matrix<const T> place(Matrix<const T> host) {
    const auto* memory = place(host.data, host.size() * std::int64_t{sizeof(T)});
    return {reinterpret_cast<const T*>(memory), host.shape};
  }
  template <typename T>
  [[nodiscard]] Vector<const T> place(Vector<const T> host) {
    const auto* memory = place(host.data, host.size() * std::int64_t{sizeof(T)});
    return {reinterpret_cast<const T*>(memory), host.shape};
  }
  [[nodiscard]] ConstRawMatrix place(ConstRawMatrix host) {
    return {place(host.data, host.bytes()), host.dtype, host.rows, host.cols};
  }

 private:
  struct Blocks;
  Backend backend_;
  std::int64_t bytes_ = 0;
  std::unique_ptr<Blocks> blocks_;
};

/// Bytes of GPUs' memory that the library holds in this process now, and the most that it held
/// since it began, or since forget_device_peak(): its buffers and the bench's, not what CUDA has of
/// its own. 0 without CUDA.
[[nodiscard]] std::int64_t device_bytes();
[[nodiscard]] std::int64_t peak_device_bytes();
void forget_device_peak();

}  // namespace switchyard::bench

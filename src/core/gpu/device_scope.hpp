#pragma once

namespace switchyard {

/// Makes a GPU the calling thread's current one as long as it lives; nothing for -1.
class DeviceScope {
 public:
  static constexpr int kNone = -1;

  /// @throws Error{kDevice}: there is no such device; {kUnsupported}: built without CUDA.
  explicit DeviceScope(int device);
  ~DeviceScope();  // NOLINT(performance-trivially-destructible): not so with CUDA
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  [[maybe_unused]] int before_ = kNone;  // unused without CUDA
};

}  // namespace switchyard

// The current device of a thread, changed for a while.
#include "core/gpu/device_scope.hpp"

#ifdef SWITCHYARD_WITH_CUDA
#include "core/gpu/cuda_check.hpp"
#else
#include "core/check.hpp"
#endif

namespace switchyard {

#ifdef SWITCHYARD_WITH_CUDA

DeviceScope::DeviceScope(int device) {
  if (device == kNone) return;
  SWITCHYARD_CUDA(cudaGetDevice(&before_));
  if (device != before_) SWITCHYARD_CUDA(cudaSetDevice(device));
}

DeviceScope::~DeviceScope() {
  if (before_ != kNone) cudaSetDevice(before_);
}

#else

DeviceScope::DeviceScope(int device) {
  if (device != kNone) fail(ErrorCode::kUnsupported, "this library is built without CUDA");
}
DeviceScope::~DeviceScope() = default;

#endif

}  // namespace switchyard
